"""The Hopper kernel without a GPU: what it refuses, and the machine code it compiles to."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gluon_simulator import Simulator, simulate
from gossamer.kernels import hopper
from gossamer.kernels.hopper.bulk import bulk_matrices
from gossamer.kernels.strides import dense_rows
from gossamer.plan.rows import expand, tile_queries
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
        "queries",
        "block=64",
        "block=64 bulk",
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
    # Products over 16 columns, then over 16 keys; a tile's first scores, its steps, its last values
    # beside the next tile's first scores.
    columns, keys = (4, 8) if features == "dim=64" else (8, 8)
    weights = 1 if "weights" in features else 0
    scores = columns + weights
    assert code["products"] == 2 * (scores + 2 * (keys + scores))
    assert code["groups"] == 2 * (1 + weights + 2 * (2 + weights))
    assert code["copies"] >= 24
    assert code["bulk"] == (4 if "bulk" in features else 0)
    steps = code["steps"]
    assert [step["spills"] for step in steps] == [0, 0]  # of each consumer
    if "causal" not in features:
        # Beside its products: flash-attn-4's step takes 481 instructions; of these, 80 are passed
        # by in most steps.
        assert max(step["instructions"] for step in steps) <= 520
    if "bulk" not in features:
        # 32 copies of three instructions each, twice as many where weights are stored beside them.
        assert min(loop["instructions"] for loop in code["copying"]) <= 225
    if "causal" not in features and not weights:
        assert code["spills"] == 0


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[Simulator]:
    """Put the simulated kernels where `run` looks for them, on three multiprocessors."""
    sim = Simulator()
    search = simulate(SOURCES.parent / "triton" / "steps.py", sim)
    parts: dict[str, ModuleType] = {}
    for name in ("walk", "softmax", "produce", "consume", "forward"):  # each imports earlier ones
        imported = {f"{hopper.__name__}.{other}": module for other, module in parts.items()}
        parts[name] = simulate(SOURCES / f"{name}.py", sim, imported)
    imported = {"gossamer.kernels.triton.steps": search}
    parts["places"] = simulate(SOURCES / "places.py", sim, imported)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in parts.items():
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
        Options(True, False, False, False, 0, None, False, False, 128, 0.6),
        Options(True, False, True, False, 0, None, True, True, 128, 0.6),
    ],
    ids=[
        "tokens",
        "weighted, virtual, window",
        "causal tokens",
        "causal blocks",
        "blocks",
        "order",
    ],
)
def test_simulated_it_walks_rows_of_many_steps(
    opt: Options, slow: Literal["copies", "products"], simulated: Simulator
) -> None:
    """Every program walks several tiles, and every stage is filled several times."""
    shape = Shape(2, 2, 1, 300, 900, 128, 3)
    simulated.slow = slow
    try:
        check(shape.tensors(torch.bfloat16), random_plan(shape, opt))
    finally:
        simulated.slow = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_simulated_weights_that_halves_do_not_reach_weigh_nothing(dtype: torch.dtype) -> None:
    """Logarithms that overflow float16 once they are divided by the scale, beside usual ones."""
    shape = Shape(1, 1, 1, 130, 300, 64, 2)
    index = torch.arange(300).view(1, 1, 1, -1).expand(1, 1, 2, -1)
    log_weight = torch.randn(1, 1, 2, 300, generator=shape.generator())
    log_weight[..., 1::3] = -1e4
    log_weight[..., 2::3] = -torch.inf
    keys = gs.KeyTokens.from_lists(index, log_weight=log_weight)
    check(shape.tensors(dtype), gs.SparsePlan(num_queries=130, num_keys=300, tile=128, keys=keys))


@pytest.mark.parametrize("blocks", [False, True])
def test_simulated_a_launch_order_changes_no_bit(blocks: bool) -> None:
    shape = Shape(2, 2, 1, 300, 500, 64, 3)
    opt = Options(blocks, True, False, not blocks, 0, None, True, False, 128, 0.6)
    plan, tensors = random_plan(shape, opt), shape.tensors(torch.bfloat16)
    order = torch.rand(2, 2, plan.num_tiles, generator=shape.generator()).argsort(-1).int()
    want = hopper.HopperKernel().run(*tensors, plan, 0.125)
    got = hopper.HopperKernel().run(*tensors, replace(plan, launch_order=order), 0.125)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("beside", [False, True], ids=["heads above", "heads beside"])
def test_simulated_it_copies_whole_blocks_at_once(block: int, beside: bool) -> None:
    """From heads that lie above or beside one another, as diffusers has them."""
    shape = Shape(2, 2, 1, 200, 700, 64, block)
    q, k, v = shape.tensors(torch.bfloat16)
    if beside:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    mask = torch.rand(2, 2, 2, -(-700 // block), generator=shape.generator()) < 0.7
    plan = gs.SparsePlan(
        num_queries=200, num_keys=700, tile=128, keys=gs.KeyBlocks.from_mask(mask, block=block)
    )
    assert bulk_matrices(k, v, plan).k is not None
    check((q, k, v), plan)


@settings(max_examples=40)
@given(shapes(max_tokens=700), options())
def test_simulated_the_table_names_tiles_without_queries_and_what_all_queries_see(
    shape: Shape, opt: Options
) -> None:
    """What nobody attends is passed by, and nothing is hidden that the table calls seen."""
    plan = random_plan(shape, replace(opt, tile=128))
    batch, heads = shape.batch, shape.heads
    keys = plan.keys
    blocks = isinstance(keys, gs.KeyBlocks)
    order = dense_rows(keys.key_order) if blocks else None
    places = plan.num_keys if order is None else order.shape[-1]
    query, index = dense_rows(plan.query_index), keys.index.contiguous()
    table, claimed = hopper._locate_tiles(plan, (batch, heads), query, index, places, 3)
    assert claimed.item() == 3
    queries = expand(tile_queries(plan), batch, heads)
    position = queries + plan.num_keys - plan.num_queries
    for b, h, slot in torch.cartesian_prod(*(torch.arange(n) for n in table.shape[:3])).tolist():
        tile, first, length, seen_first, seen_end, _ = table[b, h, slot].tolist()
        real = queries[b, h, tile] >= 0
        assert (length < 0) == (not real.any())
        entry = torch.arange(seen_first, max(seen_first, min(seen_end, length)))
        if order is not None:
            assert not plan.causal or len(entry) == 0
            continue
        if blocks:
            flat = index.flatten()
            key = flat[first + entry // keys.block] * keys.block + entry % keys.block
        else:
            key = index[first + entry]
        at = position[b, h, tile][real][:, None]
        if plan.causal:
            assert (key <= at).all()
        if plan.window is not None:
            left, right, sink = plan.window
            low = at - left if left >= 0 else 0
            high = at + right if right >= 0 else plan.num_keys
            inside = (key >= low) & (key <= high)
            assert (inside | (key < sink) | (key >= plan.num_keys)).all()
