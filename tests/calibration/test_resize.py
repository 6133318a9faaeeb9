"""Resizing threshold maps: conservative at every p, against token-by-token loops."""

import itertools

import pytest
import torch

from gossamer.select.profile import resize_heads
from gossamer.select.resize import AXIS_ORDERS, footprint, resize_map, token_order
from gossamer.select.saliency import threshold_map, threshold_mask

PAIRS = [
    ((2, 4, 6), (2, 4, 6)),
    ((2, 4, 6), (3, 7, 9)),  # larger, by no whole factor
    ((2, 4, 6), (2, 8, 12)),
    ((3, 5, 7), (2, 3, 4)),  # smaller
    ((4, 4, 4), (1, 9, 2)),  # both at once
    ((1, 1, 50), (1, 1, 77)),  # a sequence
    ((2, 6, 4), (2, 4, 6)),  # another aspect ratio
]


def places(grid, axes):
    """Where each token (f, r, c) stands in an order of the axes."""
    order = AXIS_ORDERS[axes]
    ranges = [range(grid[a]) for a in order]
    found = {}
    for place, at in enumerate(itertools.product(*ranges)):
        token = tuple(at[order.index(a)] for a in range(3))
        found[token] = place
    return found


def touched_by_loops(source, target, axes, block):
    """Which source blocks each target block's cells overlap, in exact integers."""
    have, want = places(source, axes), places(target, axes)
    rows = [set() for _ in range(-(-len(want) // block))]
    for token, place in want.items():
        for other, where in have.items():
            overlaps = all(
                x * s < (y + 1) * t and (x + 1) * s > y * t
                for x, y, s, t in zip(token, other, source, target, strict=True)
            )
            if overlaps:
                rows[place // block].add(where // block)
    return rows


@pytest.mark.parametrize("axes", [0, 2, 5])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_footprints(source, target, axes):
    got = footprint(source, target, axes=axes, block=8)
    assert [set(row) for row in got.tolist()] == touched_by_loops(source, target, axes, 8)


@pytest.mark.parametrize("axes", range(6))
def test_orders_are_those_of_the_axes(axes):
    grid = (2, 3, 4)
    order = token_order(grid, axes, torch.device("cpu")).tolist()
    want = places(grid, axes)
    for token, place in want.items():
        assert order[place] == (token[0] * 3 + token[1]) * 4 + token[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("axes", [0, 4])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_resized_mask_is_the_rounded_up_footprint_at_every_p(source, target, axes, dtype):
    block = 8
    number = -(-source[0] * source[1] * source[2] // block)
    maps = threshold_map(torch.rand(2, 3, number, number)).amin(0).to(dtype)
    got = resize_map(maps, source, target, axes=axes, block=block)
    rows = touched_by_loops(source, target, axes, block)
    for p in (0.01, 0.2, 0.5, 0.9, 1.0):
        mask = threshold_mask(maps, p)
        resized = got <= max(torch.tensor(p).to(dtype), 1 / number)
        for u, v in itertools.product(range(len(rows)), repeat=2):
            near = mask[:, sorted(rows[u])][:, :, sorted(rows[v])]
            kept = resized[:, u, v]
            assert torch.equal(kept & near.any((1, 2)), near.any((1, 2)))  # nothing is lost
            exact = (maps[:, sorted(rows[u])][:, :, sorted(rows[v])] <= p).any((1, 2))
            assert torch.equal(kept, near.any((1, 2)) | exact)  # and nothing is added
        assert threshold_mask(got, p).any(-1).all()


def test_bilinear_interpolation_of_the_map_would_lose_blocks():
    """The gap that the minimum closes: the mean of T is above p where one of its blocks is not."""
    source, target = (1, 1, 64), (1, 1, 96)
    maps = threshold_map(torch.rand(1, 8, 8))
    got = resize_map(maps, source, target, axes=0, block=8)
    smooth = torch.nn.functional.interpolate(maps[None], size=(12, 12), mode="bilinear")[0]
    assert (got <= 0.25).sum() > 1.2 * (smooth <= 0.25).sum()


def test_the_same_grid_is_left_alone():
    maps = torch.rand(2, 6, 6)
    assert resize_map(maps, (2, 4, 6), (2, 4, 6), axes=1, block=8) is maps


def test_heads_of_different_orders_are_resized_each_in_its_own():
    source, target = (2, 4, 6), (3, 4, 9)
    maps = torch.rand(2, 5, 6, 6)
    order = torch.tensor([3, 0, 3, 5, 0], dtype=torch.uint8)
    got = resize_heads(maps, order, source, target, block=8)
    for head, axes in enumerate(order.tolist()):
        want = resize_map(maps[:, head], source, target, axes=axes, block=8)
        assert torch.equal(got[:, head], want)
