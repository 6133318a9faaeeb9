"""On a GPU: the CPU's plans, without waiting for the device; the kernels; reuse."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.kernels.flash import lists, paged, unavailable
from gossamer.methods import get_method_class
from gossamer.testing import method_at
from oracle import assert_matches, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # flash-attn-4 and its compiler warn of themselves wherever "auto" first takes them.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument aux_data:UserWarning"),
]

FIXED = [name for name in gs.list_methods() if name != "dense"]


def on_gpu(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(x.cuda() for x in shape.tensors(dtype))


@pytest.mark.parametrize("name", gs.list_methods())
@pytest.mark.parametrize("text", [None, (0, 77)])
def test_a_plan_is_valid_and_attends_like_the_cpus(name: str, text: tuple[int, int] | None) -> None:
    """Rounding may move a token between clusters, so plans are compared by what they compute."""
    shape = Shape(2, 2, 2, 1100, 1100, 64, 3)
    valid = torch.arange(1100) < torch.tensor([[1100], [900]])
    method = method_at(name, 0.3)
    plan = method.plan(*on_gpu(shape), gs.Call(text=text, key_valid=valid.cuda()))
    assert plan.device.type == "cuda"
    plan.validate()
    there = plan.to("cpu")
    here = method.plan(*shape.tensors(), gs.Call(text=text, key_valid=valid))
    assert there.density == pytest.approx(here.density, abs=0.01)
    out = gs.attend(*on_gpu(shape), plan, kernel="reference").out.cpu()
    torch.testing.assert_close(out, gs.attend(*shape.tensors(), there).out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FIXED)
def test_the_same_input_gives_the_same_plan_again(name: str) -> None:
    tensors = on_gpu(Shape(1, 4, 1, 3000, 3000, 64, 3))
    method = gs.get_method(name, density=0.2)
    first, second = (method.plan(*tensors).keys for _ in range(2))
    assert torch.equal(first.index, second.index)
    assert torch.equal(first.count, second.count)


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_budget_does_not_wait_for_the_device(name: str) -> None:
    tensors = on_gpu(Shape(1, 4, 1, 3000, 3000, 64, 3))
    method, state = gs.get_method(name, density=0.2), {}
    method.plan(*tensors, state=state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(2)  # a wait is an error
    try:
        plan = method.plan(*tensors, gs.Call(step=1), state=state)
        density = plan.density_tensor
    finally:
        torch.cuda.set_sync_debug_mode(0)
    if not get_method_class(name).fixed_density:
        assert float(density) == pytest.approx(0.2, abs=0.02)


def test_a_plan_of_full_size_takes_less_than_a_gibibyte() -> None:
    """93,600 tokens, 12 heads, 300 and 1000 clusters, beyond the inputs and the plan itself."""
    q, k, v = (torch.randn(1, 12, 93600, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    method = gs.InstaGen(density=0.15, query_clusters=300, key_clusters=1000, iterations=2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = method.plan(q, k, v)
    peak = torch.cuda.max_memory_allocated()
    kept = torch.cuda.memory_allocated() - before
    assert plan.density == pytest.approx(0.15, abs=0.001)
    assert peak - before - kept < 1 << 30, f"{(peak - before - kept) / 2**20:.0f} MiB"


def test_a_session_times_with_events() -> None:
    tensors = on_gpu(Shape(1, 2, 1, 600, 600, 64, 3), torch.bfloat16)
    session = gs.Session(gs.Recipe(method=gs.InstaGen(density=0.3), min_tokens=0, dense_steps=1))
    session.attention(*tensors, gs.Call(step=0))
    if find_spec("triton") is None:
        with pytest.warns(UserWarning, match="no fast kernel runs on cuda"):
            session.attention(*tensors, gs.Call(step=1))
    else:
        session.attention(*tensors, gs.Call(step=1))
    dense, sparse = session.records
    plan = gs.InstaGen(density=0.3).plan(*tensors)
    fast = next(name for name, no in gs.explain_kernels(*tensors, plan).items() if not no)
    assert (dense.path, sparse.path, sparse.kernel) == ("dense", "sparse", fast)
    assert dense.attention_ms > 0
    assert sparse.plan_ms > 0


# Every head dim in bfloat16, and some in the others: float32 products take long to compile.
WIDTHS = [
    *((torch.bfloat16, dim) for dim in (20, 32, 64, 80, 128, 256)),
    *((torch.float16, dim) for dim in (64, 128)),
    *((torch.float32, dim) for dim in (20, 64, 128)),
]


# Most draws compile a kernel of their own: few for each of many parameters, which workers share.
@pytest.mark.parametrize(
    ("dtype", "dim"), WIDTHS, ids=[f"{dtype}-{dim}".removeprefix("torch.") for dtype, dim in WIDTHS]
)
@settings(max_examples=10)
@given(shapes(), options(), st.sampled_from([None, None, 0.3, -0.2, 0.0]))
def test_law_1_triton_equals_the_reference(
    dtype: torch.dtype, dim: int, shape: Shape, opt: Options, scale: float | None
) -> None:
    pytest.importorskip("triton")
    shape = replace(shape, dim=dim)
    check_against_the_reference("triton", shape.tensors(dtype), random_plan(shape, opt), scale)


def check_against_the_reference(
    kernel: str,
    tensors: tuple[torch.Tensor, ...],
    plan: gs.SparsePlan,
    scale: float | None = None,
) -> None:
    q, k, v = tensors
    keys, extra = plan.keys, ()
    if isinstance(keys, gs.KeyTokens) and keys.extra_k is not None:
        extra = (keys.extra_k.to(k.dtype), keys.extra_v.to(v.dtype))
        plan = replace(plan, keys=replace(keys, extra_k=extra[0], extra_v=extra[1]))
    got = gs.attend(*(x.cuda() for x in tensors), plan.to("cuda"), kernel=kernel, scale=scale)
    want = gs.attend(*(x.double() for x in tensors), plan, kernel="reference", scale=scale)
    if extra:
        k, v = torch.cat([k, extra[0]], 2), torch.cat([v, extra[1]], 2)
    allowed = tolerance(q, k, v, scale=scale)
    assert_matches(gs.AttentionOutput(got.out.cpu(), got.lse.cpu()), want, allowed)


def needs_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test on other GPUs."""
    other = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
    return pytest.mark.skipif(other, reason="needs a Hopper GPU")(test)


# What plans have, since each kind compiles a kernel of its own: drawn freely they would be many.
HOPPER_PLANS = {
    "tokens": Options(False, False, False, False, 0, None, False, False, 128, 0.3),
    "permuted": Options(False, False, False, False, 0, None, True, True, 128, 1.0),
    "weighted": Options(False, False, False, True, 0, None, False, False, 128, 0.3),
    "weighted, virtual": Options(False, False, False, True, 5, None, True, False, 128, 0.3),
    "virtual, window": Options(False, False, False, False, 1, (30, 9, 2), True, False, 128, 1.0),
    "causal": Options(False, True, False, False, 0, None, True, False, 128, 0.3),
    "causal, weighted": Options(False, True, True, True, 0, None, False, False, 128, 0.3),
    "blocks": Options(True, False, False, False, 0, None, True, False, 128, 0.3),
    "causal blocks": Options(True, True, False, False, 0, None, False, False, 128, 1.0),
    "padded blocks": Options(True, False, True, False, 0, (40, -1, 3), False, True, 128, 0.3),
    "sparse": Options(False, False, True, True, 0, None, True, False, 128, 0.05),
    "empty": Options(True, False, False, False, 0, None, False, False, 128, 0.0),
}


@needs_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", HOPPER_PLANS)
@settings(max_examples=10)
@given(
    shapes(max_tokens=700),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([None, None, 0.3, -0.2, 0.0]),
)
def test_law_1_hopper_equals_the_reference(
    name: str, dim: int, shape: Shape, dtype: torch.dtype, scale: float | None
) -> None:
    plan = random_plan(replace(shape, dim=dim), HOPPER_PLANS[name])
    tensors = replace(shape, dim=dim).tensors(dtype)
    check_against_the_reference("hopper", tensors, plan, scale)


@needs_hopper
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_walks_many_tiles_and_keeps_a_launch_order_bit_for_bit(
    blocks: bool, causal: bool
) -> None:
    """More tiles than multiprocessors, so that every program walks several; rows of many steps."""
    shape = Shape(2, 2, 3, 3000, 3000, 128, 5)
    opt = Options(blocks, causal, False, not blocks, 0, None, True, False, 128, 0.3)
    plan = random_plan(shape, opt).to("cuda")
    tensors = [x.cuda() for x in shape.tensors(torch.bfloat16)]
    order = torch.rand(2, 6, plan.num_tiles, device="cuda").argsort(-1).int()
    got = gs.attend(*tensors, plan, kernel="hopper")
    again = gs.attend(*tensors, replace(plan, launch_order=order), kernel="hopper")
    assert torch.equal(got.out, again.out)
    assert torch.equal(got.lse, again.lse)
    want = gs.attend(*tensors, plan, kernel="reference")
    assert_matches(got, want, tolerance(*(x.cpu() for x in tensors)))


@needs_hopper
def test_hopper_leaves_alone_what_is_not_listed() -> None:
    shape = Shape(2, 2, 1, 300, 700, 128, 4)
    opt = Options(False, False, True, True, 5, None, True, False, 128, 0.3)
    plan = random_plan(shape, opt)
    read = (plan.weights()[..., :700] > 0).any(2)[..., None]
    q, k, v = (x.cuda() for x in shape.tensors(torch.bfloat16))
    broken = [x.masked_fill(~read.cuda(), torch.nan) for x in (k, v)]
    want = gs.attend(q, k, v, plan.to("cuda"), kernel="hopper")
    got = gs.attend(q, *broken, plan.to("cuda"), kernel="hopper")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def needs_flash(test: Callable[..., None]) -> Callable[..., None]:
    """Skip a test where flash-attn-4 does not run."""
    missing = torch.cuda.is_available() and bool(unavailable(torch.device("cuda")))
    return pytest.mark.skipif(missing, reason="needs flash-attn-4 on a GPU that it knows")(test)


@needs_flash
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=8)  # most draws compile a kernel of their own
@given(shapes(max_tokens=700), options(), st.sampled_from([None, None, 0.3, -0.2, 0.0]))
def test_law_1_flash_equals_the_reference(
    dtype: torch.dtype, dim: int, shape: Shape, opt: Options, scale: float | None
) -> None:
    shape = replace(shape, dim=dim)
    opt = replace(opt, tile=128, window=None, causal=False)  # what the kernel supports
    check_against_the_reference("flash", shape.tensors(dtype), random_plan(shape, opt), scale)


@needs_flash
@pytest.mark.parametrize("permuted", [False, True], ids=["in order", "permuted"])
@pytest.mark.parametrize("num_keys", [1024, 1000])
@pytest.mark.parametrize("block", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_runs_blocks_of_every_size(
    dim: int, block: int, num_keys: int, permuted: bool
) -> None:
    """As pages, as tokens and block-sparse; query tiles share rows, and some rows are empty."""
    shape = Shape(2, 2, 2, 900, num_keys, dim, block)
    opt = Options(True, False, False, False, 0, None, permuted, False, 128, 0.3)
    plan = random_plan(shape, opt)
    rows = (*plan.keys.count.shape, -(-num_keys // block))
    mask = torch.rand(rows, generator=shape.generator()) < 0.3
    mask[:, :, 1] = False
    order = None
    if permuted:
        order = torch.randperm(num_keys, generator=shape.generator()).int().view(1, 1, -1)
    keys = gs.KeyBlocks.from_mask(mask, block=block, key_order=order)
    plan = replace(plan, keys=keys)
    check_against_the_reference("flash", shape.tensors(torch.bfloat16), plan)


@needs_flash
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(900, 900), (1024, 1024), (300, 1000), (700, 500)]
)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_flash_runs_causal_blocks(dim: int, num_queries: int, num_keys: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("causal plans run on compute capability 9.0 alone")
    shape = Shape(2, 2, 2, num_queries, num_keys, dim, 1)
    opt = Options(True, True, False, False, 0, None, False, False, 128, 0.5)
    plan = random_plan(shape, opt)
    rows = (*plan.keys.count.shape, -(-num_keys // 128))
    mask = torch.rand(rows, generator=shape.generator()) < 0.5
    plan = replace(plan, keys=gs.KeyBlocks.from_mask(mask, block=128))
    check_against_the_reference("flash", shape.tensors(torch.bfloat16), plan)


@needs_flash
def test_flash_leaves_alone_what_is_not_read() -> None:
    """NaN under weights of 0 and in keys that are not listed, in a full and in a partial tile."""
    shape = Shape(2, 2, 1, 300, 700, 128, 4)
    opt = Options(False, False, True, True, 5, None, True, False, 128, 0.3)
    plan = random_plan(shape, opt)
    dead = torch.rand(plan.keys.log_weight.shape, generator=shape.generator()) < 0.3
    weight = plan.keys.log_weight.masked_fill(dead, -torch.inf)
    plan = replace(plan, keys=replace(plan.keys, log_weight=weight))
    read = (plan.weights()[..., :700] > 0).any(2)[..., None]
    q, k, v = (x.cuda() for x in shape.tensors(torch.bfloat16))
    broken = [x.masked_fill(~read.cuda(), torch.nan) for x in (k, v)]
    want = gs.attend(q, k, v, plan.to("cuda"), kernel="flash")
    got = gs.attend(q, *broken, plan.to("cuda"), kernel="flash")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@needs_flash
def test_flash_runs_long_lists_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at a constant stride, of which the longest is read back once."""
    monkeypatch.setattr(lists, "_UNASKED_BYTES", 0)
    monkeypatch.setattr(paged, "_WORK_BYTES", 1)
    shape = Shape(2, 2, 2, 3000, 3000, 128, 4)
    for weighted in (False, True):
        opt = Options(False, False, False, weighted, 0, None, False, False, 128, 0.3)
        plan = random_plan(shape, opt)
        check_against_the_reference("flash", shape.tensors(torch.bfloat16), plan)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_reuse_gives_the_same_wherever_it_is_kept(offload: str) -> None:
    """Plans and residuals in pinned host memory, fetched a layer ahead, change nothing."""
    tensors = on_gpu(Shape(1, 4, 1, 2000, 2000, 64, 3), torch.bfloat16)
    reuse = gs.Reuse(every=3, offload=offload)
    run = gs.Session(gs.Recipe(method=gs.BlockTopK(density=0.2), reuse=reuse, min_tokens=0))
    want = gs.Session(
        gs.Recipe(method=gs.BlockTopK(density=0.2), reuse=gs.Reuse(every=3), min_tokens=0)
    )
    for step in range(5):
        for layer in range(3):
            call = gs.Call(step=step, layer=layer)
            moved = [x + 0.01 * step * (layer + 1) for x in tensors]
            assert torch.equal(run.attention(*moved, call), want.attention(*moved, call))
    assert {r.path for r in run.records} == {"dense", "reuse"}
    summary = run.summary()
    assert summary["reuse_peak_bytes"] > 3 * tensors[0].numel() * 4
    assert ("reuse_compute_to_copy" in summary) == (offload == "cpu")
