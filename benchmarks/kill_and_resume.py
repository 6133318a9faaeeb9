"""Kill `gossamer compare` and `gossamer calibrate` at random moments and compare the results.

    python benchmarks/kill_and_resume.py

Each command runs once undisturbed, and once killed (SIGKILL) at ten random moments and started
again after each. Both must end with the same result: the same rows but for the times, and the same
bytes of the profile's tensors. Exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PROMPTS = (
    "a red circle moves left over a meadow, camera pans right",
    "a blue star moves up over a cat, camera is still",
)
SIZE = ["--height", "112", "--width", "160", "--num-frames", "17"]
TIMES = ("attention_ms", "plan_ms", "plan_share", "total_ms", "video", "records")


def main() -> None:
    """Run both commands with and without kills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, default=Path("out/kill-and-resume"))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.scratch, ignore_errors=True)
    draw = random.Random(arguments.seed)
    failed = [
        name
        for name, command, result in (
            ("compare", compare_command, compare_result),
            ("calibrate", calibrate_command, calibrate_result),
        )
        if not same(name, command, result, arguments, draw)
    ]
    sys.exit(f"different results: {', '.join(failed)}" if failed else 0)


def same(
    name: str, command: object, result: object, arguments: argparse.Namespace, draw: random.Random
) -> bool:
    """Run one command undisturbed and killed, and say whether the results agree."""
    whole, broken = (arguments.scratch / f"{name}-{kind}" for kind in ("whole", "killed"))
    begin = time.monotonic()
    run(command(whole), None)
    length = time.monotonic() - begin
    moments = []
    while len(moments) < arguments.kills:
        # Starting takes seconds of its own: moments count from where work may have begun.
        moment = draw.uniform(0.3 * length, 0.9 * length)
        if run(command(broken), moment):
            # It finished before: what is left on disk starts over, so that all moments are used.
            shutil.rmtree(broken)
        moments.append(round(moment, 1))
    run(command(broken), None)
    agree = result(whole) == result(broken)
    verdict = "the same" if agree else "DIFFERENT"
    print(f"{name}, {length:.1f} s long, killed after {moments} s: {verdict}", flush=True)
    return agree


def run(command: list[str], seconds: float | None) -> bool:
    """Run a command, or kill it after a while; return whether it finished."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from gossamer.cli.app import main; main()", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False
    if process.returncode:
        raise RuntimeError(errors)
    return True


def compare_command(out: Path) -> list[str]:
    """Return the comparison: two prompts, three methods."""
    methods = "dense,svg2@.3,instagen@.3"
    return ["compare", *PROMPTS, "--methods", methods, "--steps", "3", *SIZE, "--out", str(out)]


def compare_result(out: Path) -> list[dict[str, object]]:
    """Return the rows without what differs from run to run."""
    document = json.loads((out / "results.json").read_text())
    rows = [
        # The perceptual network's sums depend on where its memory lies, in the last digits.
        {k: round(v, 9) if isinstance(v, float) else v for k, v in run.items() if k not in TIMES}
        for run in document["runs"]
    ]
    return [*rows, document["recipes"], document["settings"]]


def calibrate_command(out: Path) -> list[str]:
    """Return the calibration: two prompts at one size."""
    return [
        "calibrate",
        *PROMPTS,
        "--steps",
        "3",
        "--size",
        "112x160x17",
        "--buckets",
        "2",
        "--out",
        str(out / "profile.safetensors"),
        "--work",
        str(out / "work"),
    ]


def calibrate_result(out: Path) -> dict[str, object]:
    """Return the profile's tensors as bytes, and its metadata."""
    from safetensors import safe_open

    with safe_open(out / "profile.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name).tobytes() for name in sorted(file.keys())}
        return {"tensors": tensors, "metadata": sorted(file.metadata())}


if __name__ == "__main__":
    main()
