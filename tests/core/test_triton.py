"""The Triton kernel on the CPU, through Triton's interpreter: the tests of every kernel."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gossamer as gs
from gossamer.kernels import triton as kernel
from gossamer.kernels.triton.launch import forward_configuration, up_to_power_of_2
from gossamer.testing import Shape

TESTS = Path(__file__).parent / "test_kernels.py"


@pytest.mark.parametrize(
    "part", ["reference", "launch_order or not_read", "nan or logit or dim or tile", "length"]
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


@pytest.mark.parametrize("memory", [65_536, 101_376, 166_912, 232_448])  # T4, Ada, A100, H100
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("tile", [16, 64, 128, 256])
@pytest.mark.parametrize("blocks", [False, True])
def test_it_launches_what_fits_the_gpu(memory: int, dim: int, tile: int, blocks: bool) -> None:
    width = up_to_power_of_2(dim)
    for hides in (False, True):
        kind = {"blocks": blocks and not hides, "hides": hides}
        chosen = forward_configuration(tile, dim, torch.bfloat16, **kind, memory=memory)
        assert chosen is not None
        held = chosen["M"] + 2 * chosen["STAGES"] * chosen["N"] + hides * chosen["N"]
        assert 2 * width * held <= memory


def test_it_says_that_a_tile_does_not_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_is_interpreted", lambda: True)
    monkeypatch.setattr(kernel, "_shared_memory", lambda _: 16_384)
    q, k, v = Shape(1, 1, 1, 300, 300, 128, 0).tensors(torch.float32)
    plan = gs.BlockTopK(density=0.5).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError, match="16384 bytes of shared memory"):
        gs.attend(q, k, v, plan, kernel="triton")


def test_what_the_compiler_cannot_place_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")

    class Forward:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(**_: object) -> None:
                raise triton.runtime.errors.OutOfResources(106_496, 101_376, "shared memory")

            return launch

    module = SimpleNamespace(forward=Forward())
    monkeypatch.setitem(sys.modules, "gossamer.kernels.triton.forward", module)
    monkeypatch.setattr(kernel, "forward", module, raising=False)
    monkeypatch.setattr(kernel, "_is_interpreted", lambda: True)
    q, k, v = Shape(1, 1, 1, 300, 300, 64, 0).tensors(torch.float32)
    plan = gs.BlockTopK(density=0.5).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError, match="106496, Hardware limit: 101376"):
        gs.attend(q, k, v, plan, kernel="triton")
