"""On a GPU: the CPU's plans, without waiting for the device; the Triton kernel; reuse."""

import warnings
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.methods import get_method_class
from oracle import assert_matches, tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
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
    method = gs.get_method(name, density=0.3)
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
    fast = "reference" if find_spec("triton") is None else "triton"
    assert (dense.path, sparse.path, sparse.kernel) == ("dense", "sparse", fast)
    assert dense.attention_ms > 0
    assert sparse.plan_ms > 0


@settings(max_examples=150)
@given(shapes(), options(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_law_1_triton_equals_the_reference(shape: Shape, opt: Options, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    tensors = shape.tensors(dtype)
    plan = random_plan(shape, opt)
    keys, extra = plan.keys, [None, None]
    if isinstance(keys, gs.KeyTokens) and keys.extra_k is not None:
        extra = [keys.extra_k.to(dtype), keys.extra_v.to(dtype)]
        plan = replace(plan, keys=replace(keys, extra_k=extra[0], extra_v=extra[1]))
    got = gs.attend(*(x.cuda() for x in tensors), plan.to("cuda"), kernel="triton")
    want = gs.attend(*(x.double() for x in tensors), plan, kernel="reference")
    q, k, v = tensors
    if extra[0] is not None:
        k, v = torch.cat([k, extra[0]], 2), torch.cat([v, extra[1]], 2)
    allowed = tolerance(q, k, v)
    assert_matches(gs.AttentionOutput(got.out.cpu(), got.lse.cpu()), want, allowed)


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
