"""WEST: threshold maps from watched generations, against equation 2 by plain loops."""

from __future__ import annotations

import itertools

import pytest
import torch

import gossamer as gs
from calibration.events import GRID, TOKENS, attention_map, show, tensors
from gossamer.calibration import AxisObserver, Setup, WestObserver, measured_steps, merge_thresholds
from gossamer.select.resize import AXIS_ORDERS, token_order

BLOCK = 8
BLOCKS = TOKENS // BLOCK


def setup(**settings):
    plain = {"num_steps": 4, "num_buckets": 1, "measured": (0, 1, 2, 3), "block": BLOCK}
    return Setup(**plain | settings)


def saliency(q, k, order=None, valid=None):
    """Equation 1 per batch row and head, as nested lists of sums."""
    p = attention_map(q, k, valid)
    if valid is not None:
        p = p * valid[:, None, :, None]
    order = torch.arange(TOKENS) if order is None else order
    p = p[:, :, order][..., order]
    return p.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5)) / BLOCK**2


def thresholds(*saliencies):
    """Equation 2: the least p = k / n at which any map has the block among its row's best k."""
    maps = torch.cat([s.flatten(0, -4) if s.dim() > 4 else s for s in saliencies])  # [M, H, R, R]
    out = torch.ones(maps.shape[1:])
    for h, u, v in itertools.product(*(range(n) for n in out.shape)):
        for k in range(1, BLOCKS + 1):
            top = [set(m[h, u].topk(k).indices.tolist()) for m in maps]
            if any(v in best for best in top):
                out[h, u, v] = k / BLOCKS
                break
    return out.half()


def test_a_map_is_the_definition():
    q, k, v = tensors(1)
    west = WestObserver(setup())
    show(west, q, k, v)
    assert west.grid == GRID
    assert torch.equal(west.thresholds()[0, 0], thresholds(saliency(q, k)))
    assert west.seconds > 0


def test_grouped_heads_and_batch_rows_are_united():
    q, k, v = tensors(2, heads=4, kv_heads=2, batch=3)
    west = WestObserver(setup())
    show(west, q, k, v)
    assert torch.equal(west.thresholds()[0, 0], thresholds(saliency(q, k)))


def test_steps_of_a_bucket_and_branches_are_united_and_layers_kept_apart():
    west = WestObserver(setup(num_buckets=2))
    seen = {}
    for step, layer, branch in itertools.product(range(4), range(2), ("cond", "uncond")):
        q, k, v = tensors(hash((step, layer, branch == "cond")) % 1000)
        seen[step, layer, branch] = saliency(q, k)
        show(west, q, k, v, step=step, layer=layer, branch=branch, num_layers=2)
    got = west.thresholds()
    assert got.shape == (2, 2, 2, BLOCKS, BLOCKS)
    for bucket, layer in itertools.product(range(2), range(2)):
        parts = [
            seen[s, layer, b] for s in (2 * bucket, 2 * bucket + 1) for b in ("cond", "uncond")
        ]
        assert torch.equal(got[bucket, layer], thresholds(*parts))


def test_a_step_between_measured_ones_reads_the_union_of_its_neighbours():
    """Steps 0 and 3 of 4 measured, a bucket per step: 1 and 2 lie between."""
    west = WestObserver(setup(num_buckets=4, measured=(0, 3)))
    parts = []
    for step in range(4):
        q, k, v = tensors(step)
        parts.append(saliency(q, k))
        show(west, q, k, v, step=step)
    got = west.thresholds()[:, 0]
    both = thresholds(parts[0], parts[3])
    assert torch.equal(got, torch.stack([thresholds(parts[0]), both, both, thresholds(parts[3])]))


@pytest.mark.parametrize(
    ("num_steps", "buckets", "measured", "readers"),
    [
        (8, 2, (0, 3, 7), {0: [0], 3: [0, 1], 7: [1]}),
        (4, 4, (2,), {2: [0, 1, 2, 3]}),  # nothing else is near
        (6, 3, (0, 1, 2, 3, 4, 5), {0: [0], 1: [0], 2: [1], 3: [1], 4: [2], 5: [2]}),
    ],
)
def test_which_buckets_read_a_measured_step(num_steps, buckets, measured, readers):
    made = setup(num_steps=num_steps, num_buckets=buckets, measured=measured)
    assert made.readers == readers


def test_measured_steps_are_spread_and_keep_both_ends():
    assert measured_steps(16, 6) == (0, 3, 6, 9, 12, 15)
    assert measured_steps(16, None) == tuple(range(16))
    assert measured_steps(5, 1) == (2,)
    assert measured_steps(5, 5) == (0, 1, 2, 3, 4)
    with pytest.raises(gs.PlanError, match="9 measured steps: must be between 1 and num_steps=8"):
        measured_steps(8, 9)


@pytest.mark.parametrize("where", [(0, 5), (20, 25), (48, 53)])
def test_text_takes_its_share_of_the_softmax_and_no_block(where):
    q, k, v = tensors(3, tokens=TOKENS + 5)
    k[:, :, where[0] : where[1]] += 1.0
    west = WestObserver(setup())
    show(west, q, k, v, text=where)
    p = attention_map(q, k)
    latent = [i for i in range(TOKENS + 5) if not where[0] <= i < where[1]]
    p = p[:, :, latent][..., latent]
    sums = p.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5))
    assert torch.equal(west.thresholds()[0, 0], thresholds(sums))


def test_padding_counts_nowhere():
    q, k, v = tensors(4, batch=2)
    valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [16]])
    q, k = (x.masked_fill(~valid[:, None, :, None], 0.0) for x in (q, k))
    noisy = [x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (q, k)]
    west = WestObserver(setup())
    show(west, *noisy, v, key_valid=valid)
    want = thresholds(saliency(q[:1], k[:1]))
    own = saliency(q[1:], k[1:], valid=valid[1:])
    # The second row's two valid blocks, in its two valid rows; the rest is padding.
    both = torch.minimum(want, thresholds(own))
    assert torch.equal(west.thresholds()[0, 0, :, :2, :2], both[:, :2, :2])


@pytest.mark.parametrize("axes", range(6))
def test_a_head_in_another_order_has_the_map_of_the_reordered_tokens(axes):
    q, k, v = tensors(5, heads=4, kv_heads=2)
    order = torch.tensor([[0, axes, axes, 3]], dtype=torch.uint8)
    west = WestObserver(setup(permute="axis"), order)
    show(west, q, k, v)
    for head, a in enumerate(order[0].tolist()):
        tokens = token_order(GRID, a, torch.device("cpu"))
        want = thresholds(saliency(q, k, tokens))[head]
        assert torch.equal(west.thresholds()[0, 0, head], want)


def test_the_axis_of_blockwise_attention_is_found():
    """Each head attends within one frame, one row or one column of the grid."""
    grid = (4, 4, 8)
    axes = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    heads = [6.0 * torch.nn.functional.one_hot(axis.flatten(), 8) for axis in axes]
    q = torch.stack(heads)[None]
    axis = AxisObserver(setup(block=16))
    show(axis, q, q, q, grid=grid)
    order = axis.order()
    assert [AXIS_ORDERS[a][0] for a in order[0].tolist()] == [0, 1, 2]
    assert order[0, 0] == 0  # raster order where it is as good as another


def test_merging_is_the_minimum_and_resizes_other_grids():
    a, b = torch.rand(2, 1, 1, 2, 6, 6).half().unbind()
    order = torch.zeros(1, 2, dtype=torch.uint8)
    merged = merge_thresholds([(a, GRID), (b, GRID)], order, GRID, block=BLOCK)
    assert torch.equal(merged, torch.minimum(a, b))
    turned = (2, 6, 4)
    merged = merge_thresholds([(a, GRID), (b, turned)], order, GRID, block=BLOCK)
    assert (merged <= a).all()
    assert merged.shape == a.shape
    with pytest.raises(gs.PlanError, match="cannot be united"):
        merge_thresholds([(a, GRID), (b[:, :, :1], GRID)], order, GRID, block=BLOCK)


def test_what_cannot_be_measured_is_left_out_or_refused():
    west = WestObserver(setup())
    q, k, v = tensors()
    show(west, q, k, v, grid=None)
    with pytest.raises(gs.UnsupportedError, match="no self-attention call with a grid"):
        west.thresholds()
    show(west, q, k, v, layer=1, num_layers=3)
    with pytest.raises(gs.UnsupportedError, match=r"layers \[0, 2\] of 3"):
        west.thresholds()
    with pytest.raises(gs.PlanError, match=r"\(2, 4, 6\) and \(2, 6, 4\)"):
        show(west, q, k, v, grid=(2, 6, 4))
    with pytest.raises(gs.UnsupportedError, match="all heads in one process"):
        show(WestObserver(setup()), q, k, v, head_offset=2, num_heads=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_buckets": 5}, "num_buckets=5: must be between 1 and num_steps=4"),
        ({"measured": (4,)}, r"measured=\(4,\)"),
        ({"measured": ()}, r"measured=\(\)"),
        ({"measured": (2, 1)}, "ascending"),
        ({"permute": "rows"}, "permute='rows'"),
        ({"block": 0}, "block=0"),
    ],
)
def test_bad_setups(settings, words):
    with pytest.raises(gs.PlanError, match=words):
        setup(**settings)
