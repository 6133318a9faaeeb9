"""Law 1: a kernel equals the reference on the same plan; the reference equals the textbook."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.kernels import cpu
from gossamer.plan import to_tokens
from gossamer.testing import method_at
from oracle import assert_matches, attention, tolerance

# Triton's interpreter runs on the CPU, in a process of its own: see test_triton.py.
FAST = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"
KERNELS = [FAST] if FAST == "triton" else [FAST, "reference"]
MOST = 70 if FAST == "triton" else 300  # tokens: the interpreter runs programs one by one
DTYPES = [torch.float32, torch.float16]
if FAST == "cpu":  # the interpreter cuts float32 to bfloat16 instead of rounding it
    DTYPES += [torch.bfloat16, torch.float64]


@given(shapes(max_tokens=120), options())
def test_the_reference_is_the_definition(shape: Shape, opt: Options) -> None:
    q, k, v = shape.tensors(torch.float64)
    plan = random_plan(shape, opt)
    got = gs.attend(q, k, v, plan, kernel="reference")
    if opt.virtual:
        keys = plan.keys
        k, v = (torch.cat(p, 2) for p in ((k, keys.extra_k.double()), (v, keys.extra_v.double())))
    want = attention(q, k, v, plan.weights())
    torch.testing.assert_close(got.out, want.out, rtol=1e-6, atol=1e-6)  # weights() is float32
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kernel", [FAST])
@given(shapes(max_tokens=MOST), options(), st.sampled_from(DTYPES))
def test_a_kernel_equals_the_reference(
    kernel: str, shape: Shape, opt: Options, dtype: torch.dtype
) -> None:
    q, k, v = shape.tensors(dtype)
    plan = random_plan(shape, opt)
    got = gs.attend(q, k, v, plan, kernel=kernel)
    want = gs.attend(q.double(), k.double(), v.double(), plan, kernel="reference")
    assert got.out.dtype == dtype
    assert got.lse.dtype == torch.float32
    allowed = tolerance(q, k, v)
    if opt.virtual or opt.weighted:  # virtual keys and weights change both range and magnitude
        keys = plan.keys
        extra = [] if keys.extra_k is None else [keys.extra_k.to(dtype)]
        extra_v = [] if keys.extra_v is None else [keys.extra_v.to(dtype)]
        allowed = tolerance(q, torch.cat([k, *extra], 2), torch.cat([v, *extra_v], 2))
    assert_matches(got, want, allowed)


@given(shapes(), options())
def test_blocks_and_their_tokens_compute_the_same(shape: Shape, opt: Options) -> None:
    q, k, v = shape.tensors()
    plan = random_plan(shape, opt)
    tokens = to_tokens(plan)
    assert isinstance(tokens.keys, gs.KeyTokens)
    a, b = gs.attend(q, k, v, plan), gs.attend(q, k, v, tokens)
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)


@given(shapes(max_tokens=90), options())
def test_small_chunks_change_nothing_but_rounding(shape: Shape, opt: Options) -> None:
    """Rows longer than a chunk are merged by log-sum-exp."""
    q, k, v = shape.tensors(torch.float64)
    plan = random_plan(shape, opt)
    whole = gs.attend(q, k, v, plan, kernel="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_GATHER_BYTES", 7 * 2 * shape.dim * 8)
        patch.setattr(cpu, "_MASK_BYTES", 4 * 5)
        parts = gs.attend(q, k, v, plan, kernel="cpu")
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@given(shapes(max_tokens=MOST // 2), options())
def test_law_4_the_launch_order_changes_no_bit(kernel: str, shape: Shape, opt: Options) -> None:
    q, k, v = shape.tensors()
    plan = random_plan(shape, opt)
    order = torch.rand(plan.batch, plan.heads, plan.num_tiles, generator=shape.generator())
    ordered = replace(plan, launch_order=order.argsort(-1).int())
    want, got = (gs.attend(q, k, v, p, kernel=kernel) for p in (plan, ordered))
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.parametrize("name", gs.list_methods())
def test_batching_rows_changes_nothing_but_rounding(name: str) -> None:
    q, k, v = Shape(2, 2, 2, 700, 700, 16, 3).tensors(torch.float64)
    plan = method_at(name, 0.3).plan(q, k, v)
    together = gs.attend(q, k, v, plan, kernel="cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_BATCH_BYTES", 0)
        alone = gs.attend(q, k, v, plan, kernel="cpu")
    torch.testing.assert_close(together.out, alone.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(together.lse, alone.lse)


@pytest.mark.parametrize("kernel", KERNELS)
@given(shapes(max_tokens=min(MOST, 100)), options())
def test_what_is_not_read_changes_nothing(kernel: str, shape: Shape, opt: Options) -> None:
    """NaN and infinity in keys and values that no query reads stay where they are."""
    q, k, v = shape.tensors()
    plan = random_plan(shape, opt)
    clean = gs.attend(q, k, v, plan, kernel=kernel)
    read = plan.weights().expand(shape.batch, shape.heads, -1, -1)[..., : shape.num_keys] > 0
    read = read.unflatten(1, (shape.kv_heads, -1)).any(2).any(2)  # [B, Hk, S]
    dirty_k = k.masked_fill(~read[..., None], torch.nan)
    dirty_v = v.masked_fill(~read[..., None], torch.inf)
    dirty = gs.attend(q, dirty_k, dirty_v, plan, kernel=kernel)
    torch.testing.assert_close(dirty.out, clean.out, rtol=1e-5, atol=1e-6)
    assert torch.equal(dirty.lse == -torch.inf, clean.lse == -torch.inf)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_reaches_exactly_the_queries_that_read_it(kernel: str) -> None:
    q, k, v = Shape(1, 1, 1, 40, 40, 8, 3).tensors()
    v[0, 0, 20] = torch.nan
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=True))
    out = gs.attend(q, k, v, plan, kernel=kernel).out
    assert out[0, 0, :20].isfinite().all()
    assert out[0, 0, 20:].isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_masking_is_not_decided_by_the_size_of_a_logit(kernel: str) -> None:
    """Every logit is -8e5, far below any finite 'minus infinity' (flashinfer #4267)."""
    q = torch.full((1, 1, 64, 64), 100.0)
    k = torch.full((1, 1, 64, 64), -1000.0)
    v = torch.randn(1, 1, 64, 64)
    result = gs.attend(q, k, v, gs.Dense().plan(q, k, v), kernel=kernel)
    torch.testing.assert_close(result.out, v.mean(2, keepdim=True).expand_as(v))
    expected = -100.0 * 1000 * 64 / 8 + torch.tensor(64.0).log()
    torch.testing.assert_close(result.lse, expected.expand(1, 1, 64))


@pytest.mark.parametrize("size", [30.0, 256.0])
@pytest.mark.parametrize("method", gs.list_methods())
def test_float16_logits_do_not_overflow(method: str, size: float) -> None:
    """q.k is past 65504 before and, at 256, after the scale; in routing as in attention."""
    x = size * torch.ones(1, 1, 8, 128, dtype=torch.float16)
    v = torch.randn(1, 1, 8, 128).half()
    out = gs.sparse_attention(x, x, v, gs.get_method(method, density=1.0))
    expected = v.float().mean(2, keepdim=True).expand(1, 1, 8, 128)
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [31, 64, 72, 80, 96, 128, 160, 256])
def test_any_head_dim_has_its_own_scale(kernel: str, dim: int) -> None:
    q, k, v = Shape(1, 1, 2, 50, 50, dim, 1).tensors()
    got = gs.attend(q, k, v, gs.Dense().plan(q, k, v), kernel=kernel)
    assert_matches(got, attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("blocks", [False, True])
def test_a_tile_may_hold_more_rows_than_a_program(kernel: str, blocks: bool) -> None:
    """Of 256 queries, permuted, the last tile ragged; float32 at head dim 160 takes 64 of them."""
    shape = Shape(1, 1, 2, 300, 70, 160, 3)
    opt = Options(blocks, False, False, not blocks, 0, None, True, False, 256, 0.5)
    plan, tensors = random_plan(shape, opt), shape.tensors()
    got = gs.attend(*tensors, plan, kernel=kernel)
    want = gs.attend(*(x.double() for x in tensors), plan, kernel="reference")
    assert_matches(got, want, tolerance(*tensors))


@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [(1, 1), (9, 9), (12, 12), (63, 65), (137, 137), (1, 4099), (401, 203), (130, 0)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_length_works(kernel: str, num_queries: int, num_keys: int, causal: bool) -> None:
    q, k, v = Shape(1, 2, 2, num_queries, num_keys, 16, 1).tensors()
    plan = gs.Dense().plan(q, k, v, gs.Call(causal=causal))
    got = gs.attend(q, k, v, plan, kernel=kernel)
    want = gs.attend(q, k, v, plan, kernel="reference")
    assert got.out.shape == q.shape
    torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.lse == -torch.inf, want.lse == -torch.inf)


def test_log_sum_exp_is_the_same_with_and_without_grad() -> None:
    q, k, v = Shape(2, 2, 2, 128, 128, 64, 0).tensors(torch.bfloat16)
    plan = gs.InstaGen(density=0.5).plan(q, k, v)
    plain = gs.attend(q, k, v, plan, kernel="reference").lse
    with torch.inference_mode():
        inference = gs.attend(q, k, v, plan, kernel="reference").lse
    graph = gs.attend(q.clone().requires_grad_(), k, v, plan).lse
    assert torch.equal(plain, inference)
    assert torch.equal(plain, graph.detach())


@pytest.mark.parametrize("method", gs.list_methods())
def test_gradients_equal_those_of_the_textbook(method: str) -> None:
    """A ragged length, where gradients of padding would be counted."""
    tensors = Shape(1, 1, 2, 130, 130, 16, 5).tensors(torch.float64)
    plan = method_at(method, 0.5).plan(*tensors)
    ours = [x.clone().requires_grad_() for x in tensors]
    theirs = [x.clone().requires_grad_() for x in tensors]
    gs.attend(*ours, plan).out.square().sum().backward()
    q, k, v = theirs
    if isinstance(plan.keys, gs.KeyTokens) and plan.keys.extra_k is not None:  # constants
        k = torch.cat([k, plan.keys.extra_k], 2)
        v = torch.cat([v, plan.keys.extra_v], 2)
    attention(q, k, v, plan.weights()).out.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_the_reference_has_gradients_of_weights_and_virtual_keys_too() -> None:
    shape = Shape(1, 1, 2, 5, 7, 4, 5)
    opt = Options(False, False, False, True, 3, None, False, False, 16, 0.6)
    plan = random_plan(shape, opt)
    parts = [getattr(plan.keys, name).double() for name in ("log_weight", "extra_k", "extra_v")]

    def run(q: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        keys = replace(plan.keys, log_weight=parts[0], extra_k=parts[1], extra_v=parts[2])
        return gs.attend(q, k, v, replace(plan, keys=keys), kernel="reference").out

    q, k, v = shape.tensors(torch.float64)
    leaves = [x.requires_grad_() for x in (q, *parts)]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_an_explicit_kernel_never_falls_back() -> None:
    q, k, v = Shape(1, 1, 1, 8, 8, 8, 0).tensors()
    plan = gs.Dense().plan(q, k, v)
    with pytest.raises(gs.UnsupportedError, match="kernel 'cpu' cannot run this: inference only"):
        gs.attend(q.requires_grad_(), k, v, plan, kernel="cpu")
    with pytest.raises(gs.UnsupportedError, match=r"unknown kernel 'cuda': known are auto, hopper"):
        gs.attend(q, k, v, plan, kernel="cuda")


def test_every_kernel_explains_itself() -> None:
    q, k, v = Shape(1, 1, 1, 8, 8, 8, 0).tensors()
    plan = gs.Dense().plan(q, k, v)
    reasons = gs.explain_kernels(q, k, v, plan)
    assert list(reasons) == gs.list_kernels()
    assert (reasons["cpu"], reasons["reference"]) == ([], [])
    assert "runs on GPU tensors, these are on cpu" in reasons["triton"]
    reasons = gs.explain_kernels(q.requires_grad_(), k, v, plan)
    assert reasons["cpu"] == ["inference only; use kernel='reference' for gradients"]


@pytest.mark.parametrize("offset", [0, 8])
def test_strided_inputs_equal_contiguous_ones(offset: int) -> None:
    fused = torch.randn(1, 100, 3 * 64 + offset)
    before = fused.clone()
    q, k, v = (x.unflatten(2, (4, 16)).transpose(1, 2) for x in fused[..., offset:].split(64, 2))
    method = gs.InstaGen(density=0.4)
    strided = gs.sparse_attention(q, k, v, method)
    plain = gs.sparse_attention(q.contiguous(), k.contiguous(), v.contiguous(), method)
    torch.testing.assert_close(strided, plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(fused, before)


def test_the_output_does_not_depend_on_uninitialised_memory() -> None:
    q, k, v = Shape(1, 1, 1, 130, 130, 16, 0).tensors()
    plan = gs.BlockTopK(blocks=1).plan(q, k, v)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = gs.attend(q, k, v, plan).out
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()
