"""The Triton kernel's gradients on the CPU, by Triton's interpreter, and compiled for Hopper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_its_gradients_are_the_references() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "HYPOTHESIS_PROFILE": "interpreter",
        "PYTEST_XDIST_WORKER_COUNT": "1",
    }
    tests = str(HERE / "interpreted_backward.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


WANTED = [
    "queries block=128",
    "queries add",
    "queries add weights extra queries rows valid window d_lse dim=256 float16",
    "queries add dim=256 tile=256 float32",
    "keys block=128",
    "keys block=32 order queries valid causal",
    "keys block=256 dim=256 tile=256 group=1 num_heads=1 num_blocks=1",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Compile the kernels in a process of its own, with a cache of its own."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "compile_backward.py"), *WANTED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(WANTED, found, strict=True))


@pytest.mark.parametrize("kernel", WANTED)
def test_it_fits_hoppers_multiprocessors(kernel: str, made: dict[str, dict[str, int]]) -> None:
    code = made[kernel]
    assert code["shared"] + 1024 <= 227 * 1024
    assert code["threads"] * code["registers"] <= 65536


@pytest.mark.parametrize("kernel", ["queries block=128", "queries add", "keys block=128"])
def test_it_multiplies_on_tensor_cores(kernel: str, made: dict[str, dict[str, int]]) -> None:
    """By wgmma, with asynchronous copies, and all sums in registers."""
    code = made[kernel]
    assert code["products"] > 0
    assert code["slow_products"] == 0
    assert code["copies"] > 0
    assert code["spills"] == 0
    assert (code["sums"] > 0) == ("add" in kernel)
