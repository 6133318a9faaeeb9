"""The adapter to flash-attn-4, against an emulation of what flash-attn-4 does with its tables."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.kernels import choose_kernel, flash
from gossamer.kernels.base import BackwardInput
from gossamer.kernels.flash import FlashKernel, call, lists, paged
from gossamer.kernels.hopper import HopperKernel
from gossamer.testing import method_at
from gradients import check_gradients
from oracle import assert_matches, tolerance
from training import check_training

TILE = 128


class _BlockSparse(NamedTuple):
    """The fields of flash-attn-4's block-sparse tensors that the adapter may set."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def _add_log_weight(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + aux_tensors[0][batch, kv_idx]


def _is_visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return kv_idx <= q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q


def _forward(q, k, v, **options) -> None:
    """Stand in for flash-attn-4's forward pass, and refuse what it would get silently wrong."""
    assert options.pop("tile_mn") == (TILE, TILE)
    assert options.pop("pack_gqa") is False
    assert options.pop("intra_wg_overlap") is True
    assert options.pop("mma_pv_is_rs") == (not 64 < q.shape[-1] <= 96)
    out, lse = options["out"], options["lse"]
    assert options["softmax_scale"] > 0
    assert out.stride(-1) == q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert lse.dtype == torch.float32
    assert out.shape == q.shape
    if "page_table" in options:
        _paged(q, k, v, **options)
    else:
        _block_sparse(q, k, v, **options)


def _paged(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_q,
    seqused_k,
    page_table,
    max_seqlen_q,
    softmax_scale,
    out,
    lse,
    score_mod=None,
    aux_tensors=None,
) -> None:
    total, heads, _ = q.shape
    pages, page, kv_heads, _ = k.shape
    number = len(cu_seqlens_q) - 1
    assert (heads, kv_heads) == (1, 1)
    assert k.shape == v.shape
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert lse.shape == (1, total)
    assert page_table.shape[0] == len(seqused_q) == len(seqused_k) == number
    assert page_table.shape[1] > 0
    assert page_table.stride(1) == 1
    for x in (cu_seqlens_q, seqused_q, seqused_k, page_table):
        assert x.dtype == torch.int32
        assert x.stride(-1) == 1
    assert cu_seqlens_q[0] == 0
    assert cu_seqlens_q[-1] == total
    for n in range(number):
        first, used, count = (int(x[n]) for x in (cu_seqlens_q, seqused_q, seqused_k))
        assert used in (0, int(cu_seqlens_q[n + 1]) - first)
        if used == 0:
            continue  # no tile: nothing is written
        assert used <= max_seqlen_q
        assert 0 < count <= page_table.shape[1] * page
        place = torch.arange(count)
        listed = page_table[n, place // page].long()
        assert listed.min() >= 0
        assert listed.max() < pages
        keys, values = (x[listed, place % page, 0].double() for x in (k, v))
        score = q[first : first + used, 0].double() @ keys.T * softmax_scale
        if score_mod is not None:
            assert aux_tensors[0].dtype == torch.float32
            assert aux_tensors[0].stride(aux_tensors[0].__leading_dim__) == 1
            assert page == 1
            row = torch.full_like(score, n, dtype=torch.int64)
            score = score_mod(
                score,
                row,
                torch.zeros_like(row),
                q_idx=torch.arange(used)[:, None].expand_as(row),
                kv_idx=place.expand_as(row),
                seqlen_info=SimpleNamespace(seqlen_q=used, seqlen_k=count),
                aux_tensors=aux_tensors,
            )
        inside = slice(first, first + used)
        out[inside, 0], lse[0, inside] = _softmax(score, values, out.dtype)


def _block_sparse(q, k, v, *, block_sparse_tensors, softmax_scale, out, lse, mask_mod=None) -> None:
    tensors = block_sparse_tensors
    batch, num_queries, heads, _ = q.shape
    num_keys, group = k.shape[1], heads // k.shape[2]
    tiles, blocks = -(-num_queries // TILE), -(-num_keys // TILE)
    assert tensors.block_size == (TILE, TILE)
    assert k.shape == v.shape
    assert lse.shape == (batch, heads, num_queries)
    pairs = (
        (tensors.mask_block_cnt, tensors.mask_block_idx),
        (tensors.full_block_cnt, tensors.full_block_idx),
    )
    for count, index in pairs:
        assert count.dtype == index.dtype == torch.int32
        assert count.shape[2] == index.shape[2] == tiles
        assert 0 < index.shape[3] <= blocks
    out.fill_(torch.nan)
    lse.fill_(torch.nan)
    info = SimpleNamespace(seqlen_q=num_queries, seqlen_k=num_keys)
    for b in range(batch):
        for h in range(heads):
            spread = [[x.expand(batch, heads, *x.shape[2:])[b, h] for x in pair] for pair in pairs]
            for t in range(tiles):
                query = torch.arange(t * TILE, min((t + 1) * TILE, num_queries))
                parts = [_listed(c[t], i[t], num_keys) for c, i in spread]
                key = torch.cat(parts)
                keys, values = (x[b, key, h // group].double() for x in (k, v))
                score = q[b, query, h].double() @ keys.T * softmax_scale
                masked = len(parts[0])  # the mask runs on the masked list alone
                if mask_mod is not None and masked:
                    row = query[:, None].expand(-1, masked)
                    column = parts[0].expand_as(row)
                    seen = mask_mod(None, None, row, column, info, None)
                    score[:, :masked].masked_fill_(~seen, -torch.inf)
                out[b, query, h], lse[b, h, query] = _softmax(score, values, out.dtype)


def _backward(
    q, k, v, out, d_out, lse, *, softmax_scale, dlse, block_sparse_tensors, mask_mod=None
) -> tuple[torch.Tensor, ...]:
    """Stand in for flash-attn-4's backward pass, block of keys by block of keys."""
    tensors = block_sparse_tensors
    batch, num_queries, heads, _ = q.shape
    num_keys, group = k.shape[1], heads // k.shape[2]
    tiles, blocks = -(-num_queries // TILE), -(-num_keys // TILE)
    assert q.shape[-1] in (64, 96, 128), "of 80 and 112 the gradients of queries are wrong"
    assert softmax_scale > 0
    assert tensors.block_size == (TILE, TILE)
    assert d_out.shape == out.shape == q.shape
    assert lse.shape == (batch, heads, num_queries)
    assert q.dtype == out.dtype == d_out.dtype
    assert 0 not in d_out.stride()
    assert dlse is None or (dlse.dtype == torch.float32 and dlse.shape == lse.shape)
    pairs = (
        (tensors.mask_block_cnt, tensors.mask_block_idx),
        (tensors.full_block_cnt, tensors.full_block_idx),
    )
    for count, index in pairs:
        assert count.dtype == index.dtype == torch.int32
        assert count.shape[2] == index.shape[2] == blocks
        assert 0 < index.shape[3] <= tiles
    delta = (out.double() * d_out.double()).sum(-1).transpose(1, 2)  # [B, H, N]
    delta = delta if dlse is None else delta - dlse.double()
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    info = SimpleNamespace(seqlen_q=num_queries, seqlen_k=num_keys)
    for b, h, block in itertools.product(range(batch), range(heads), range(blocks)):
        spread = [[x.expand(batch, heads, *x.shape[2:])[b, h, block] for x in p] for p in pairs]
        parts = [index[: int(count)].long() for count, index in spread]
        assert len(torch.cat(parts).unique()) == len(parts[0]) + len(parts[1])
        key = torch.arange(block * TILE, min((block + 1) * TILE, num_keys))
        keys, values = (x[b, key, h // group].double() for x in (k, v))
        for masked, part in zip((True, False), parts, strict=True):
            assert (part.diff() > 0).all(), "a list must ascend"
            query = (part[:, None] * TILE + torch.arange(TILE)).flatten()
            query = query[query < num_queries]
            score = q[b, query, h].double() @ keys.T * softmax_scale
            if masked and mask_mod is not None and len(query):
                row, column = query[:, None].expand_as(score), key.expand_as(score)
                score.masked_fill_(~mask_mod(None, None, row, column, info, None), -torch.inf)
            sums = lse[b, h, query].double()
            p = (score - sums.masked_fill(sums == -torch.inf, 0.0)[:, None]).exp()
            outer = d_out[b, query, h].double()
            d_s = p * (outer @ values.T - delta[b, h, query][:, None])
            d_q[b, query, h] += d_s @ keys * softmax_scale
            d_k[b, key, h // group] += d_s.T @ q[b, query, h].double() * softmax_scale
            d_v[b, key, h // group] += p.T @ outer
    return tuple(x.to(q.dtype) for x in (d_q, d_k, d_v))


def _listed(count, index, num_keys) -> torch.Tensor:
    """Return the keys of a list; only the first block that is met is cut at the last key."""
    listed = index[: int(count)].long()
    assert (listed.diff() > 0).all(), "a list must ascend"
    keys = (listed[:, None] * TILE + torch.arange(TILE)).flatten()
    behind = keys >= num_keys
    assert not behind[:-TILE].any(), "a block past the end is not the last of its list"
    return keys[~behind]


def _softmax(score, values, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    lse = score.logsumexp(-1)
    p = (score - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp()
    return (p @ values).to(dtype), lse.float()


@pytest.fixture(params=[True, False], ids=["hopper", "blackwell"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel run on the CPU, with and without block sparsity."""
    library = call.Library(_forward, _backward, _BlockSparse, _add_log_weight, _is_visible)
    monkeypatch.setattr(call, "library", lambda: library)
    monkeypatch.setattr(flash, "_missing", list)
    monkeypatch.setattr(flash, "_device_reasons", lambda device: [])
    monkeypatch.setattr(flash, "_takes_blocks", lambda device: request.param)


def _check(q, k, v, plan: gs.SparsePlan, scale: float | None = None) -> None:
    keys, extra = plan.keys, ()
    if isinstance(keys, gs.KeyTokens) and keys.extra_k is not None:
        extra = (keys.extra_k.to(k.dtype), keys.extra_v.to(v.dtype))
        plan = replace(plan, keys=replace(keys, extra_k=extra[0], extra_v=extra[1]))
    got = gs.attend(q, k, v, plan, kernel="flash", scale=scale)
    exact = (x.double() for x in (q, k, v))
    want = gs.attend(*exact, plan, kernel="reference", scale=scale)
    if extra:
        k, v = torch.cat([k, extra[0]], 2), torch.cat([v, extra[1]], 2)
    assert got.out.dtype == q.dtype
    assert_matches(got, want, tolerance(q, k, v, scale=scale))


def _drawn(shape: Shape, opt: Options) -> tuple[Shape, Options]:
    """Return what the kernel supports of what was drawn: tiles, head dims and masks."""
    dim = {8: 64, 20: 80, 32: 96}.get(shape.dim, 128)
    shape = replace(shape, dim=dim)
    return shape, replace(opt, tile=TILE, window=None, causal=False)


def _tensors(shape: Shape, token_major: bool) -> list[torch.Tensor]:
    """Return q, k and v in bfloat16, as models hold them or as the library does."""
    tensors = shape.tensors(torch.bfloat16)
    if not token_major:
        return list(tensors)
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]


@pytest.mark.usefixtures("emulated")
@settings(max_examples=150)
@given(shapes(), options(), st.booleans(), st.sampled_from([None, 0.3, -0.2, 0.0]))
def test_it_equals_the_reference(
    shape: Shape, opt: Options, token_major: bool, scale: float | None
) -> None:
    shape, opt = _drawn(shape, opt)
    _check(*_tensors(shape, token_major), random_plan(shape, opt), scale)


@pytest.mark.usefixtures("emulated")
@given(shapes(), options(), st.integers(1, 4))
def test_parts_and_strides_change_nothing(shape: Shape, opt: Options, pairs: int) -> None:
    """Rows at a constant stride are read as such, and heads run some at a time."""
    shape, opt = _drawn(shape, opt)
    tensors, plan = _tensors(shape, False), random_plan(shape, opt)
    whole = gs.attend(*tensors, plan, kernel="flash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "_UNASKED_BYTES", 0)
        per_pair = lists.Lists.of(plan, shape.batch, shape.heads).bytes_per_pair
        patch.setattr(paged, "_WORK_BYTES", per_pair * pairs)
        parts = gs.attend(*tensors, plan, kernel="flash")
    assert torch.equal(parts.out, whole.out)
    assert torch.equal(parts.lse, whole.lse)


@st.composite
def block_plans(draw: st.DrawFn) -> tuple[Shape, gs.SparsePlan]:
    """Draw a plan of blocks of every size, of whole or ragged lengths, in any order of keys."""
    shape = draw(shapes())
    block = draw(st.sampled_from([1, 8, 16, 32, 64, 128, 256]))
    whole = draw(st.booleans())
    num_keys = -(-shape.num_keys // block) * block if whole else shape.num_keys
    shape = replace(shape, num_keys=num_keys, dim=64)
    generator = torch.Generator().manual_seed(shape.seed)
    opt = replace(draw(options()), blocks=True, tile=TILE, window=None, causal=draw(st.booleans()))
    plan = random_plan(shape, replace(opt, permuted=opt.permuted and not opt.causal))
    places = draw(st.sampled_from(["own", "permuted", "permuted per head", "holes"]))
    if opt.causal and block == TILE:
        plan = replace(plan, key_valid=None)
        places = "own"
    elif opt.causal:
        plan = replace(plan, causal=False)
    order = None
    length = num_keys
    if places != "own":
        heads = shape.heads if places == "permuted per head" else 1
        length = num_keys if places != "holes" else -(-num_keys // block) * block + block
        order = torch.rand(1, heads, length, generator=generator).argsort(-1)
        order = torch.where(order < num_keys, order, -1).int()
    rows = (*plan.keys.count.shape, -(-length // block))
    mask = torch.rand(rows, generator=generator) < opt.density
    keys = gs.KeyBlocks.from_mask(mask, block=block, key_order=order)
    # What stands behind a row's blocks is ignored, whatever it is.
    kept = torch.arange(keys.index.shape[-1]) < keys.count[..., None]
    noise = torch.randint(-(2**31), 2**31 - 1, keys.index.shape, generator=generator)
    keys = replace(keys, index=torch.where(kept, keys.index, noise.int()))
    return shape, replace(plan, keys=keys)


@pytest.mark.usefixtures("emulated")
@settings(max_examples=200)
@given(block_plans())
def test_blocks_of_every_size_equal_the_reference(drawn: tuple[Shape, gs.SparsePlan]) -> None:
    shape, plan = drawn
    if plan.causal and not flash._takes_blocks(plan.device):
        assert "9.0 alone" in str(
            FlashKernel().supports(*shape.tensors(torch.bfloat16), plan, gradients=False)
        )
        return
    _check(*shape.tensors(torch.bfloat16), plan)


@pytest.mark.usefixtures("emulated")
@settings(max_examples=60)
@given(block_plans(), st.sampled_from([None, 0.3, -0.2, 0.0]), st.booleans())
def test_gradients_of_whole_blocks_equal_the_references(
    drawn: tuple[Shape, gs.SparsePlan], scale: float | None, with_lse: bool
) -> None:
    shape, plan = drawn
    tensors = shape.tensors(torch.bfloat16)
    wanted = [x.requires_grad_() for x in shape.tensors(torch.bfloat16)]
    if FlashKernel().supports(*wanted, plan, gradients=True):
        with pytest.raises(gs.UnsupportedError, match="gradients|9.0 alone"):
            gs.attend(*wanted, plan, kernel="flash")
        return
    check_gradients(tensors, plan, "flash", scale=scale, with_lse=with_lse)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "given", [{}, {"causal": True}, {"permuted": True}], ids=["plain", "causal", "permuted"]
)
def test_every_kind_of_block_plan_has_its_gradient(given: dict[str, bool], dim: int) -> None:
    """Ragged lengths, two query heads to a KV head, shared rows, an order of keys."""
    shape = Shape(2, 1, 2, 300, 430, dim, 5)
    opt = Options(True, False, False, False, 0, None, False, False, TILE, 0.5)
    plan = random_plan(shape, replace(opt, **given))
    rows = (*plan.keys.count.shape, 4)
    mask = torch.rand(rows, generator=shape.generator()) < 0.6
    order = torch.randperm(430, generator=shape.generator()).int().view(1, 1, -1)
    keys = gs.KeyBlocks.from_mask(
        mask, block=TILE, key_order=order if given == {"permuted": True} else None
    )
    plan, tensors = replace(plan, keys=keys), shape.tensors(torch.bfloat16)
    if flash._takes_blocks(plan.device):
        for scale in (None, -0.2, 0.0):
            check_gradients(tensors, plan, "flash", scale=scale)
    else:
        reasons = FlashKernel().supports(*tensors, plan, gradients=True)
        assert "gradients run on compute capability 9.0 alone" in reasons


@pytest.mark.parametrize("emulated", [True], indirect=True)
@pytest.mark.usefixtures("emulated")
def test_a_block_trains_in_one_graph() -> None:
    """Tiles with rows that hold no query, and an order of keys: all is put in order twice."""
    shape = Shape(2, 1, 2, 300, 300, 64, 5)
    opt = Options(True, False, False, False, 0, None, True, False, TILE, 0.5)
    plan = random_plan(shape, opt)
    mask = torch.rand((*plan.keys.count.shape, 3), generator=shape.generator()) < 0.6
    order = torch.randperm(300, generator=shape.generator()).int().view(1, 1, -1)
    plan = replace(plan, keys=gs.KeyBlocks.from_mask(mask, block=TILE, key_order=order))
    assert bool((plan.query_index < 0).any())
    check_training(shape, plan, "flash", dtype=torch.bfloat16)


@pytest.mark.usefixtures("emulated")
@given(shapes(), options(), st.booleans())
def test_what_is_not_read_changes_nothing(shape: Shape, opt: Options, in_keys: bool) -> None:
    """NaN in keys and values that no row reads, in padding and under weights of 0."""
    shape, opt = _drawn(shape, opt)
    q, k, v = shape.tensors(torch.bfloat16)
    plan = random_plan(shape, opt)
    if opt.weighted:
        weight = plan.keys.log_weight
        dead = torch.rand(weight.shape, generator=shape.generator()) < 0.3
        keys = replace(plan.keys, log_weight=weight.masked_fill(dead, -torch.inf))
        plan = replace(plan, keys=keys)
    read = (plan.weights()[..., : shape.num_keys] > 0).any(2)  # [B|1, H|1, S]
    read = read.expand(shape.batch, shape.heads, -1)
    read = read.unflatten(1, (shape.kv_heads, shape.group)).any(2)
    broken = [x.masked_fill(~read[..., None], torch.nan) for x in (k, v)]
    want = gs.attend(q, k, v, plan, kernel="flash")
    got = gs.attend(q, broken[0] if in_keys else k, broken[1], plan, kernel="flash")
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", gs.list_methods())
def test_it_runs_the_plans_of_every_method(name: str) -> None:
    """Text, padding and grids as methods place them."""
    shape = Shape(2, 2, 2, 460, 460, 64, 3)
    q, k, v = shape.tensors(torch.bfloat16)
    valid = torch.arange(460) < torch.tensor([[460], [300]])
    for arguments in ({}, {"text": (0, 60)}, {"key_valid": valid}, {"causal": True}):
        method = method_at(name, 0.4)
        if arguments.get("causal") and type(method).causal_reason:
            continue
        plan = method.plan(q, k, v, gs.Call(**arguments))
        if not FlashKernel().supports(q, k, v, plan, gradients=False):
            _check(q, k, v, plan)


@pytest.mark.usefixtures("emulated")
def test_nothing_to_read_is_no_trouble() -> None:
    q, k, v = Shape(1, 2, 1, 150, 130, 64, 0).tensors(torch.bfloat16)
    none = torch.zeros(1, 1, 2, dtype=torch.int32)
    for keys in (
        gs.KeyTokens.from_lists(torch.zeros(1, 1, 2, 0, dtype=torch.int32)),
        gs.KeyBlocks(block=128, count=none, index=torch.zeros(1, 1, 2, 0, dtype=torch.int32)),
        gs.KeyBlocks(block=32, count=none, index=torch.zeros(1, 1, 2, 0, dtype=torch.int32)),
    ):
        plan = gs.SparsePlan(num_queries=150, num_keys=130, tile=TILE, keys=keys)
        out, lse = gs.attend(q, k, v, plan, kernel="flash")
        assert not out.any()
        assert (lse == -torch.inf).all()
    plan = gs.SparsePlan(num_queries=0, num_keys=130, tile=TILE, keys=keys)
    assert gs.attend(q[:, :, :0], k, v, plan, kernel="flash").out.shape == (1, 2, 0, 64)


@pytest.mark.usefixtures("emulated")
def test_rows_may_overlap_at_a_constant_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_UNASKED_BYTES", 0)
    q, k, v = Shape(1, 1, 1, 256, 300, 64, 0).tensors(torch.bfloat16)
    keys = gs.KeyTokens(
        start=torch.tensor([[[0, 4]]]),
        count=torch.tensor([[[8, 4]]], dtype=torch.int32),
        index=torch.arange(8, dtype=torch.int32) * 7,
    )
    _check(q, k, v, gs.SparsePlan(num_queries=256, num_keys=300, tile=TILE, keys=keys))


def _plan(**changes: object) -> gs.SparsePlan:
    keys = gs.KeyTokens.from_lists(torch.arange(256).view(1, 1, 1, -1).expand(1, 1, 2, -1))
    return replace(gs.SparsePlan(num_queries=256, num_keys=256, tile=TILE, keys=keys), **changes)


def _blocks(block: int) -> gs.KeyBlocks:
    return gs.KeyBlocks.from_mask(torch.ones(1, 1, 2, 256 // block, dtype=torch.bool), block=block)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            _plan(tile=64, tile_row=torch.zeros(1, 1, 4, dtype=torch.int32)),
            "tile 64 is not 128",
        ),
        (_plan(window=(3, 3, 0)), "a window is cut per query"),
        (_plan(causal=True), "causal rows are single tokens or blocks other than 128"),
        (_plan(causal=True, keys=_blocks(64)), "blocks other than 128"),
        (
            _plan(
                causal=True,
                keys=_blocks(128),
                query_index=torch.arange(256).int().view(1, 1, 2, 128),
            ),
            "have lost their positions",
        ),
        (
            _plan(causal=True, keys=_blocks(128), key_valid=torch.ones(1, 256, dtype=torch.bool)),
            "causal plans of padded keys",
        ),
    ],
)
def test_a_plan_is_refused_with_the_reason(plan: gs.SparsePlan, reason: str) -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, 64, 0).tensors(torch.bfloat16)
    with pytest.raises(gs.UnsupportedError, match=reason):
        gs.attend(q, k, v, plan, kernel="flash")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dim", "dtype", "reason"),
    [
        (64, torch.float32, "dtype torch.float32 is not one of torch.bfloat16, torch.float16"),
        (72, torch.bfloat16, "head dim 72 is not a multiple of 16 from 64 to 128"),
        (32, torch.bfloat16, "head dim 32 is not"),
        (144, torch.bfloat16, "head dim 144 is not"),
    ],
)
def test_a_size_is_refused_with_the_reason(dim: int, dtype: torch.dtype, reason: str) -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, dim, 0).tensors(dtype)
    assert reason in "; ".join(FlashKernel().supports(q, k, v, _plan(), gradients=False))


@pytest.mark.usefixtures("emulated")
def test_gradients_are_refused_with_the_reason() -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, 64, 0).tensors(torch.bfloat16)
    q.requires_grad_()
    for plan in (_plan(), _plan(keys=_blocks(64))):
        assert "whole blocks of 128" in str(FlashKernel().supports(q, k, v, plan, gradients=True))
    plan = _plan(keys=_blocks(128))
    reasons = FlashKernel().supports(q, k, v, plan, gradients=True)
    if not flash._takes_blocks(q.device):
        assert reasons == ["gradients run on compute capability 9.0 alone"]
        return
    assert reasons == []
    torch.use_deterministic_algorithms(True)
    try:
        assert "in no fixed order" in str(FlashKernel().supports(q, k, v, plan, gradients=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_packages_and_devices_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = Shape(1, 1, 1, 256, 256, 64, 0).tensors(torch.bfloat16)
    for found, reason in (
        (None, 'pip install "gossamer[hopper]"'),
        ("4.1.0", "is written for flash-attn-4 4.0.0b36, and 4.1.0 is installed"),
    ):
        monkeypatch.setattr(flash, "_installed", lambda found=found: found)
        reasons = FlashKernel().supports(q, k, v, _plan(), gradients=False)
        assert reason in reasons[0]
        assert "9.0 or 10.x, these tensors are on cpu" in reasons[1]
    monkeypatch.setattr(flash, "_installed", lambda: "4.0.0b36")
    for capability, taken in (((8, 0), 1), ((9, 0), 0), ((10, 0), 0), ((10, 3), 0), ((12, 0), 1)):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        reasons = flash._device_reasons(torch.device("cuda", 0))
        assert len(reasons) == taken, capability
        assert flash._takes_blocks(torch.device("cuda", 0)) == (capability == (9, 0))


def test_auto_takes_it_first_for_blocks_of_its_own_size_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernel in (FlashKernel, HopperKernel):
        monkeypatch.setattr(kernel, "supports", lambda *_, **__: [])
    q, k, v = Shape(1, 1, 1, 300, 300, 64, 0).tensors(torch.bfloat16)
    blocks, tokens = (make(density=0.3).plan(q, k, v) for make in (gs.BlockTopK, gs.InstaGen))
    ordered = replace(blocks, launch_order=torch.arange(blocks.num_tiles).int().view(1, 1, -1))
    chosen = [
        choose_kernel(q, k, v, plan, "auto", gradients=False).name
        for plan in (blocks, tokens, ordered)
    ]
    assert chosen == ["flash", "hopper", "hopper"]


def test_it_compiles_for_hopper_without_a_gpu() -> None:
    """In a process of its own: flash-attn-4 and the CuTe DSL decide on the chip when imported."""
    if flash._missing():
        pytest.skip("needs flash-attn-4")
    environment = {**os.environ, **_OFFLINE, "PYTEST_XDIST_WORKER_COUNT": "1"}
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "compiles_here"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "14 passed" in result.stdout


_OFFLINE = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}


def _run_by_the_test_above() -> None:
    if any(os.environ.get(name) != value for name, value in _OFFLINE.items()):
        pytest.skip("runs in the process of test_it_compiles_for_hopper_without_a_gpu")


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dim", "page", "weighted", "number", "width"),
    [
        (128, 1, False, 8, 256),
        (128, 1, False, 1000, 256),  # above 256 sequences it looks them up in a table
        (128, 1, True, 8, 256),
        (128, 1, True, 1, 1),
        (128, 32, False, 8, 256),
        (64, 1, False, 8, 256),
        (96, 1, True, 8, 256),
    ],
)
def test_pages_compiles_here(dim: int, page: int, weighted: bool, number: int, width: int) -> None:
    _run_by_the_test_above()
    with FakeTensorMode():
        q, out = (_empty(1000, 1, dim, dtype=torch.bfloat16) for _ in range(2))
        pool = _empty(4096 // page, page, 1, dim, dtype=torch.bfloat16)
        sequences = call.Sequences(
            begin=_empty(number + 1),
            used=_empty(number),
            longest=TILE,
            table=_empty(number, width),
            length=_empty(number),
            log_weight=_empty(number, width, dtype=torch.float32) if weighted else None,
        )
        lse = _empty(1, 1000, dtype=torch.float32)
        call.attend_pages(q, pool, pool, out, lse, sequences, 0.1)


@pytest.mark.parametrize(("dim", "causal"), [(128, False), (128, True), (64, False)])
def test_blocks_compiles_here(dim: int, causal: bool) -> None:
    _run_by_the_test_above()
    heads = 4 if causal else 1
    with FakeTensorMode():
        q, out = (_empty(1, 4, 1000, dim, dtype=torch.float16) for _ in range(2))
        k = _empty(1, 2, 900, dim, dtype=torch.float16)
        block_lists = call.BlockLists(
            _empty(1, 4, 8),
            _empty(1, 4, 8, 6),
            _empty(1, heads, 8),
            _empty(1, heads, 8, 2 if causal else 1),
            causal,
        )
        lse = _empty(1, 4, 1000, dtype=torch.float32)
        call.attend_blocks(q, k, k, out, lse, block_lists, 0.1)


@pytest.mark.parametrize(
    ("dim", "group", "causal"), [(128, 1, False), (128, 2, True), (96, 1, False), (64, 2, False)]
)
def test_gradients_compiles_here(dim: int, group: int, causal: bool) -> None:
    """With tiles of 64 queries above a head dim of 64, two to each that is listed."""
    _run_by_the_test_above()
    with FakeTensorMode():
        q, out, d_out = (_empty(1, 4, 1000, dim, dtype=torch.bfloat16) for _ in range(3))
        k, v = (_empty(1, 4 // group, 900, dim, dtype=torch.bfloat16) for _ in range(2))
        lse, d_lse = (_empty(1, 4, 1000, dtype=torch.float32) for _ in range(2))
        block_lists = call.BlockLists(
            _empty(1, 4, 8),
            _empty(1, 4, 8, 8),
            _empty(1, 4 if causal else 1, 8),
            _empty(1, 4 if causal else 1, 8, 8 if causal else 1),
            causal,
        )
        given = BackwardInput(q, k, v, out, lse, d_out, d_lse)
        grads = call.differentiate_blocks(given, block_lists, 0.1)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
