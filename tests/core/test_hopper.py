"""The Hopper kernel without a GPU: what it refuses, and the machine code it compiles to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.testing import Shape

COMPILE = Path(__file__).parent / "compile_hopper.py"


def test_it_says_why_it_cannot_run_here() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 80, 0).tensors(torch.float32)
    plan = gs.BlockTopK(density=0.5, tile=64).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError) as error:
        gs.attend(q, k, v, plan, kernel="hopper")
    for reason in ("on cpu", "torch.float32", "head dim 80 is not one of 64, 128", "tile 64"):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    "features",
    [
        "",
        "dim=64",
        "float16",
        "weights virtual",
        "queries rows launch",
        "block=64",
        "causal queries",
    ],
)
def test_it_compiles_to_tensor_core_products_that_do_not_wait_for_one_another(
    features: str,
) -> None:
    """In a process of its own: another test may have told Triton to interpret."""
    pytest.importorskip("triton", reason="the extra `dev` brings it on Linux")
    command = [sys.executable, str(COMPILE), *features.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    code = json.loads(result.stdout)
    loops = 2 if "causal" in features else 1  # steps that hide something, steps that do not
    per_step = 12 if features == "dim=64" else 16  # products over 16 columns, then over 16 keys
    assert code["products"] == 2 * per_step * (1 + loops)
    assert code["groups"] == 2 * 2 * (1 + loops)
    assert code["copies"] >= 24
    if loops == 1 and "virtual" not in features:
        # A step that hides may keep some of what it compares in memory, and a producer that
        # chooses between two pools some of its addresses.
        assert code["spills"] == 0
