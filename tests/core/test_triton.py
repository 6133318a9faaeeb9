"""The Triton kernel on the CPU, through Triton's interpreter: the tests of every kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.testing import Shape

TESTS = Path(__file__).parent / "test_kernels.py"


@pytest.mark.parametrize(
    "part", ["reference", "launch_order or not_read", "nan or logit or dim", "length"]
)
def test_it_passes_the_tests_of_every_kernel(part: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "HYPOTHESIS_PROFILE": "interpreter",
        "PYTEST_XDIST_WORKER_COUNT": "1",
    }
    pick = f"triton and ({part})"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(TESTS),
        "-k",
        pick,
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def test_it_says_why_it_cannot_run_here() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 320, 0).tensors(torch.float64)
    plan = gs.BlockTopK(density=0.5, tile=512).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError) as error:
        gs.attend(q, k, v, plan, kernel="triton")
    for reason in ("on cpu", "torch.float64", "head dim 320 is above 256", "tile 512 is above 256"):
        assert reason in str(error.value)
