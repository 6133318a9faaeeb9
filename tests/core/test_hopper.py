"""The Hopper kernel without a GPU: what it refuses, and the machine code it compiles to."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gluon_simulator import Simulator, simulate
from gossamer.kernels import hopper
from oracle import assert_matches, tolerance

SOURCES = Path(hopper.__file__).parent
COMPILE = Path(__file__).parent / "compile_hopper.py"


def test_it_says_why_it_cannot_run_here() -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 80, 0).tensors(torch.float32)
    plan = gs.BlockTopK(density=0.5, tile=64).plan(q, k, v)
    with pytest.raises(gs.UnsupportedError) as error:
        gs.attend(q, k, v, plan, kernel="hopper")
    for reason in ("on cpu", "torch.float32", "head dim 80 is not one of 64, 128", "tile 64"):
        assert reason in str(error.value)


@pytest.mark.parametrize(("version", "runs"), [("3.5.1", False), ("3.6.0", True), ("4.0.0", True)])
def test_it_asks_for_a_triton_that_it_knows(
    version: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert hopper._has_gluon.__wrapped__() is runs


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
    # 64 x 128 weights of 128 threads, in both consumers.
    assert code["exponentials beside a product"] >= 2 * 64 * loops
    assert code["repacks"] == 0
    if loops == 1 and "virtual" not in features:
        # A step that hides may keep some of what it compares in memory, and a producer that
        # chooses between two pools some of its addresses.
        assert code["spills"] == 0


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[Simulator]:
    """Put the simulated kernels where `run` looks for them, on three multiprocessors."""
    sim = Simulator()
    search = simulate(SOURCES.parent / "triton" / "forward.py", sim)
    modules = {
        "forward": simulate(SOURCES / "forward.py", sim),
        "bounds": simulate(SOURCES / "bounds.py", sim, gossamer__kernels__triton__forward=search),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, f"{hopper.__name__}.{name}", module)
            patch.setattr(hopper, name, module, raising=False)
        patch.setattr(hopper, "_num_multiprocessors", lambda _: 3)
        yield sim


def check(tensors: tuple[torch.Tensor, ...], plan: gs.SparsePlan, scale: float = 0.125) -> None:
    q, k, v = tensors
    keys, extra = plan.keys, ()
    if isinstance(keys, gs.KeyTokens) and keys.extra_k is not None:
        extra = (keys.extra_k.to(k.dtype), keys.extra_v.to(v.dtype))
        plan = replace(plan, keys=replace(keys, extra_k=extra[0], extra_v=extra[1]))
    got = hopper.HopperKernel().run(q, k, v, plan, scale)
    want = gs.attend(*(x.double() for x in tensors), plan, kernel="reference", scale=scale)
    if extra:
        k, v = torch.cat([k, extra[0]], 2), torch.cat([v, extra[1]], 2)
    assert_matches(got, want, tolerance(q, k, v, scale=scale))


@settings(max_examples=40)
@given(
    shapes(max_tokens=700),
    options(),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([0.125, -0.2, 0.0]),
)
def test_law_1_simulated_it_equals_the_reference(
    shape: Shape, opt: Options, dtype: torch.dtype, scale: float
) -> None:
    shape = replace(shape, dim=64 if shape.seed % 4 else 128)  # four stages, or two
    opt = replace(opt, tile=128)
    check(shape.tensors(dtype), random_plan(shape, opt), scale)


@pytest.mark.parametrize("slow", ["copies", "products"])
@pytest.mark.parametrize(
    "opt",
    [
        Options(False, False, False, False, 0, None, True, False, 128, 0.6),
        Options(False, False, False, True, 5, (300, 100, 3), False, False, 128, 0.6),
        Options(False, True, False, False, 0, None, True, False, 128, 0.6),
        Options(True, True, False, False, 0, None, False, False, 128, 0.6),
        Options(True, False, True, False, 0, None, True, True, 128, 0.6),
    ],
    ids=["tokens", "weighted, virtual, window", "causal tokens", "causal blocks", "key order"],
)
def test_simulated_it_walks_rows_of_many_steps(
    opt: Options, slow: Literal["copies", "products"], simulated: Simulator
) -> None:
    """Every program walks several tiles, and every stage is filled several times."""
    shape = Shape(1, 1, 1, 700, 900, 128, 3)
    simulated.slow = slow
    try:
        check(shape.tensors(torch.bfloat16), random_plan(shape, opt))
    finally:
        simulated.slow = None
