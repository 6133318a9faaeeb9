"""The Triton kernel's gradients; test_triton_backward.py runs these where Triton interprets."""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.kernels import choose_kernel, transposed
from gossamer.kernels.triton import TritonKernel
from gossamer.plan.flat import flatten
from gradients import check_gradients, run
from training import check_training

assert os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter cuts float32 to bfloat16 instead of rounding it, so that is left to the GPU.
DTYPES = [torch.float32, torch.float16]
FIELDS = ("blocks", "causal", "padded", "weighted", "virtual", "window", "permuted", "shared_heads")


def plan_of(shape: Shape, tile: int = 64, density: float = 0.6, **given: object) -> gs.SparsePlan:
    """Return a random plan that has what is given."""
    chosen = {**dict.fromkeys(FIELDS, False), "virtual": 0, "window": None, **given}
    return random_plan(shape, Options(**chosen, tile=tile, density=density))


@given(shapes(max_tokens=40), options(), st.sampled_from(DTYPES), st.booleans())
def test_gradients_equal_the_references(
    shape: Shape, opt: Options, dtype: torch.dtype, with_lse: bool
) -> None:
    check_gradients(
        shape.tensors(dtype), random_plan(shape, opt), "triton", seed=shape.seed, with_lse=with_lse
    )


@pytest.mark.parametrize(
    "given",
    [
        {"blocks": True},
        {"blocks": True, "shared_heads": True, "permuted": True, "padded": True},
        {"blocks": True, "permuted": True},  # an order per query head, two to a KV head: atomics
        {"blocks": True, "causal": True, "padded": True},
        {"blocks": True, "permuted": True, "causal": True, "window": (40, 9, 3)},
        {"weighted": True, "virtual": 5, "padded": True, "window": (40, -1, 3)},
        {"causal": True, "permuted": True},
    ],
    ids=lambda given: " ".join(given),
)
def test_every_part_of_a_plan_has_its_gradient(given: dict[str, object]) -> None:
    """Lengths that no tile divides, a batch of two, two query heads to a KV head."""
    shape = Shape(2, 1, 2, 75, 107, 20, 3)
    check_gradients(shape.tensors(torch.float16), plan_of(shape, tile=32, **given), "triton")


@pytest.mark.parametrize("scale", [0.5, -0.3, 0.0])
@pytest.mark.parametrize("blocks", [False, True])
def test_any_scale_has_its_gradient(blocks: bool, scale: float) -> None:
    shape = Shape(1, 1, 2, 40, 50, 32, 1)
    plan = plan_of(shape, blocks=blocks)
    check_gradients(shape.tensors(torch.float16), plan, "triton", scale=scale)


@pytest.mark.parametrize(("block", "tile"), [(8, 16), (16, 24), (48, 100), (160, 200)])
def test_blocks_and_tiles_need_be_no_powers_of_two(block: int, tile: int) -> None:
    """Blocks below 16 keys by atomics, and blocks and tiles that are cut into parts."""
    shape = Shape(1, 1, 2, 210, 190, 16, 2)
    plan = plan_of(shape, tile=tile, blocks=True)
    mask = torch.rand(1, 2, plan.num_tiles, -(-190 // block), generator=shape.generator()) < 0.6
    plan = replace(plan, keys=gs.KeyBlocks.from_mask(mask, block=block))
    check_gradients(shape.tensors(torch.float16), plan, "triton")


@pytest.mark.parametrize("dim", [64, 96, 160, 256])
def test_any_head_dim_has_its_gradient(dim: int) -> None:
    shape = Shape(1, 1, 1, 40, 50, dim, 1)
    for blocks in (False, True):
        plan = plan_of(shape, blocks=blocks)
        check_gradients(shape.tensors(torch.float16), plan, "triton")


@pytest.mark.parametrize("blocks", [False, True])
def test_what_is_not_read_has_no_gradient_and_gives_none(blocks: bool) -> None:
    """NaN in keys, values and memory: the gradients of the others stay as they are, bit for bit."""
    shape = Shape(2, 1, 2, 60, 150, 16, 4)
    q, k, v = shape.tensors()
    plan = plan_of(shape, density=0.2, blocks=blocks, padded=True, shared_heads=True)
    read = (plan.weights() > 0).any(2).any(1)[:, None, :, None]  # [B|1, 1, S, 1]
    assert not read.all()
    ones = (torch.ones_like(q), torch.ones(q.shape[:3]))
    want = run((q, k, v), plan, ones, "triton")
    broken = [x.masked_fill(~read, torch.nan) for x in (k, v)]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        got = run((q, *broken), plan, ones, "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for grad in got[1:]:
        assert not grad.masked_fill(read, 0.0).any()


@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_only_what_is_asked_for_is_returned(kept: str) -> None:
    shape = Shape(1, 1, 1, 40, 50, 16, 1)
    plan = plan_of(shape, blocks=True)
    whole = dict(zip("qkv", shape.tensors(), strict=True))
    d_out = torch.randn(whole["q"].shape)
    wanted = run(tuple(whole.values()), plan, (d_out, torch.zeros(1, 1, 40)), "triton")
    leaf = whole[kept].requires_grad_()
    gs.attend(*whole.values(), plan, kernel="triton").out.backward(d_out)
    assert torch.equal(leaf.grad, wanted["qkv".index(kept)])
    assert [x.grad is None for x in whole.values()] == [name != kept for name in whole]


def test_strided_inputs_and_gradients_equal_contiguous_ones() -> None:
    shape = Shape(2, 1, 2, 40, 50, 16, 1)
    plan, tensors = plan_of(shape, blocks=True), shape.tensors()
    g = torch.randn(2, 40, 2, 16)
    plain = [x.clone().requires_grad_() for x in tensors]
    gs.attend(*plain, plan, kernel="triton").out.backward(g.transpose(1, 2).contiguous())
    beside = [x.transpose(1, 2).contiguous().requires_grad_() for x in tensors]
    out = gs.attend(*(x.transpose(1, 2) for x in beside), plan, kernel="triton").out
    out.transpose(1, 2).backward(g)
    for a, b in zip(beside, plain, strict=True):
        assert torch.equal(a.grad.transpose(1, 2), b.grad)


@pytest.mark.parametrize("num_keys", [0, 30])
def test_nothing_to_read_has_no_gradient(num_keys: int) -> None:
    for keys in (
        gs.KeyTokens.from_lists(torch.zeros(1, 1, 1, 0, dtype=torch.int32)),
        gs.KeyBlocks.from_mask(torch.zeros(1, 1, 1, -(-num_keys // 16)).bool(), block=16),
    ):
        plan = gs.SparsePlan(num_queries=40, num_keys=num_keys, tile=64, keys=keys)
        tensors = Shape(1, 2, 1, 40, num_keys, 16, 0).tensors()
        for grad in run(tensors, plan, (torch.ones(1, 2, 40, 16), torch.ones(1, 2, 40)), "triton"):
            assert not grad.any()
    plan = gs.SparsePlan(num_queries=0, num_keys=num_keys, tile=64, keys=keys)
    q, k, v = (x.requires_grad_() for x in Shape(1, 2, 1, 0, num_keys, 16, 0).tensors())
    gs.attend(q, k, v, plan, kernel="triton").out.sum().backward()
    assert not k.grad.any()
    assert not v.grad.any()


def test_auto_takes_it_for_gradients() -> None:
    q, k, v = Shape(1, 1, 1, 40, 50, 16, 1).tensors()
    plan = plan_of(Shape(1, 1, 1, 40, 50, 16, 1), blocks=True)
    assert choose_kernel(q, k, v, plan, "auto", gradients=True).name == "triton"


def test_what_has_no_gradient_is_refused_with_the_reason() -> None:
    shape = Shape(1, 1, 1, 40, 50, 16, 1)
    q, k, v = shape.tensors()
    q.requires_grad_()
    plan = plan_of(shape, virtual=3)
    plan.keys.extra_k.requires_grad_()
    with pytest.raises(gs.UnsupportedError, match="virtual keys that require gradients"):
        gs.attend(q, k, v, plan, kernel="triton")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(gs.UnsupportedError, match="use_deterministic_algorithms forbids"):
            gs.attend(q, k, v, plan_of(shape), kernel="triton")
        gs.attend(q, k, v, plan_of(shape, blocks=True), kernel="triton")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_block_trains_in_one_graph(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward passes in all, one eager and one compiled: none is repeated for gradients."""
    passes = []
    run_once = TritonKernel.run
    monkeypatch.setattr(TritonKernel, "run", lambda *a: passes.append(a) or run_once(*a))
    shape = Shape(1, 1, 2, 40, 40, 16, 1)
    check_training(shape, plan_of(shape, blocks=blocks, weighted=not blocks), "auto")
    assert len(passes) == 2


def test_the_ops_pass_torchs_own_checks() -> None:
    shape = Shape(1, 1, 2, 40, 50, 16, 1)
    leaves = [x.requires_grad_() for x in shape.tensors()]
    rest = (*flatten(plan_of(shape, blocks=True)), 0.25, "triton", True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.gossamer.attend.default, (*leaves, *rest), test_utils=checks)
    q, k, v = (x.detach() for x in leaves)
    out, lse = torch.ops.gossamer.attend(q, k, v, *rest)
    arguments = (q, k, v, out, lse, out, None, *rest)  # the last stands for `of_keys` here
    opcheck(torch.ops.gossamer.attend_backward.default, arguments, test_utils=checks)


def test_a_plan_made_in_inference_mode_trains() -> None:
    shape = Shape(1, 1, 2, 40, 50, 16, 1)
    with torch.inference_mode():
        plan = plan_of(shape, weighted=True)
    check_gradients(shape.tensors(torch.float16), plan, "triton")


def test_second_derivatives_are_refused() -> None:
    shape = Shape(1, 1, 1, 40, 50, 16, 1)
    q, k, v = (x.requires_grad_() for x in shape.tensors())
    out = gs.attend(q, k, v, plan_of(shape, blocks=True), kernel="triton").out
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attend_backward.* no autograd formula"):
        grad.sum().backward()


@given(shapes(max_tokens=120), options(), st.sampled_from([1, 1 << 12, 1 << 40]))
def test_transposed_lists_name_the_tiles_of_each_block(
    shape: Shape, opt: Options, work_bytes: int
) -> None:
    plan = random_plan(shape, replace(opt, blocks=True, virtual=0, weighted=False))
    mask = plan.keys.to_mask(plan.num_keys)  # [B|1, H|1, R, num_blocks]
    if plan.tile_row is not None:
        mask = torch.stack(
            [
                torch.stack([m[row] for m, row in zip(*pair, strict=True)])
                for pair in zip(mask, plan.tile_row.long(), strict=True)
            ]
        )
    if plan.causal and not opt.permuted:
        last = (torch.arange(plan.num_tiles) + 1) * plan.tile - 1 + shape.num_keys
        begin = torch.arange(mask.shape[-1]) * plan.keys.block
        mask = mask & (begin <= (last - shape.num_queries)[:, None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transposed, "_WORK_BYTES", work_bytes)
        lists = transposed.list_tiles(plan, plan.keys)
    assert torch.equal(lists.num_tiles, mask.sum(2, dtype=torch.int32))
    kept = torch.arange(plan.num_tiles) < lists.num_tiles[..., None]
    assert torch.equal(lists.tiles[kept].long(), mask.mT.nonzero()[:, -1])
