"""Run `gossamer calibrate` on the fake pipeline several times, dying without warning where told to.

    python killed.py FOLDER LIFE... -- ARGUMENTS...

A life is CALLS:NAME. The command runs with --work NAME-work and --out NAME.safetensors, and its
process ends at the CALLS-th attention call, without unwinding, as `kill -9` would do; at the N-th
file where CALLS is -N, when it is written but not yet in its place; not at all where it is 0. Exit
codes go to stdout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXIT = 77


def set_trap(calls: int) -> None:
    """Let this process end where told to."""
    import gossamer as gs

    left = {"calls": calls, "files": -calls}
    attention, replace = gs.Session.attention, os.replace

    def mortal(*args: object, **keywords: object) -> object:
        left["calls"] -= 1
        if left["calls"] == 0:
            os._exit(EXIT)
        return attention(*args, **keywords)

    def mortal_replace(source: str, target: str) -> None:
        left["files"] -= 1
        if left["files"] == 0:
            os._exit(EXIT)
        replace(source, target)

    gs.Session.attention, os.replace = mortal, mortal_replace


def main() -> None:
    """Import once, and fork a process for each life."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    torch.set_num_threads(1)
    import gossamer as gs
    from evaluation.fake_pipeline import FakePipeline, apply_fake
    from gossamer import models
    from gossamer.cli import model as model_module
    from gossamer.cli.app import app
    from gossamer.cli.console import quiet_libraries

    folder = Path(sys.argv[1])
    end = sys.argv.index("--")
    gs.apply = apply_fake
    models.tiny_wan_path = lambda: folder
    model_module.load_pipeline = lambda *_, **__: FakePipeline()
    with quiet_libraries():  # imports what every life would import again
        pass
    for life in sys.argv[2:end]:
        calls, _, name = life.partition(":")
        child = os.fork()
        if child == 0:
            set_trap(int(calls))
            os.dup2(2, 1)  # stdout is for the exit codes
            places = ["--work", f"{name}-work", "--out", f"{name}.safetensors"]
            app(["calibrate", *sys.argv[end + 1 :], *places])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
