"""Lists of exact keys with virtual keys for the rest, and budgets spread over rows."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.group import Sorted, sort_by_group
from gossamer.group.places import place_means
from gossamer.select.compensate import entries, group_means, list_compensated
from gossamer.select.spread import take_spread
from oracle import assert_matches, tolerance

ROWS, GROUPS, TILE = 3, 6, 64


def grouped(shape: Shape, *, padded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return labels [B, Hk, S], -1 at padded keys, and key_valid; the last group stays empty."""
    g = shape.generator()
    size = (shape.batch, shape.kv_heads, shape.num_keys)
    labels = torch.randint(GROUPS - 1, size, generator=g)
    if not padded:
        return labels, None
    valid = torch.rand(shape.batch, shape.num_keys, generator=g) < 0.8
    valid[:, 0] = True
    return torch.where(valid[:, None], labels, -1), valid


def random_taken(shape: Shape, keys: Sorted) -> torch.Tensor:
    """Return [B, H, R, C]: nothing, some or all keys of each group."""
    g = shape.generator()
    size = keys.size.repeat_interleave(shape.group, dim=1)[:, :, None]
    share = torch.tensor([0.0, 0.5, 1.0])[
        torch.randint(3, (shape.batch, shape.heads, ROWS, GROUPS), generator=g)
    ]
    return (size * share).long()


def plan_of(shape: Shape, keys: gs.KeyTokens, valid: torch.Tensor | None) -> gs.SparsePlan:
    """Return a plan whose tiles read the rows in turn."""
    tiles = -(-shape.num_queries // TILE)
    row = (torch.arange(tiles, dtype=torch.int32) % ROWS).view(1, 1, -1)
    return gs.SparsePlan(
        num_queries=shape.num_queries,
        num_keys=shape.num_keys,
        tile=TILE,
        keys=keys,
        tile_row=row,
        key_valid=valid,
    )


@settings(max_examples=40)  # the loops are slow
@given(shapes(max_tokens=150), st.booleans(), st.booleans())
def test_rows_hold_what_is_taken_and_means_for_what_is_not(
    shape: Shape, padded: bool, bounded: bool
) -> None:
    """Every entry of every row, and every mean, against loops."""
    _, k, v = shape.tensors()
    labels, valid = grouped(shape, padded=padded)
    if valid is not None:  # what stands in the padding is never read
        k, v = (x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (k, v))
    keys = sort_by_group(labels, GROUPS, valid=valid)
    taken = random_taken(shape, keys)
    size = keys.size.repeat_interleave(shape.group, dim=1)
    count = entries(taken, size)
    width = int(count.max()) + 3 if bounded else None
    rows = list_compensated(taken, keys, k, v, labels=labels, width=width)
    assert torch.equal(rows.count.long(), count)
    assert rows.extra_k is not None
    assert rows.extra_v is not None
    assert rows.extra_k.dtype == k.dtype
    want = torch.zeros(shape.batch, shape.heads, ROWS, shape.num_keys + GROUPS)
    for b in range(shape.batch):
        for h in range(shape.heads):
            of_group = labels[b, h // shape.group]
            for c in range(GROUPS):
                members = (of_group == c).nonzero()[:, 0]
                if len(members) == 0:
                    continue
                for x, extra in ((k, rows.extra_k), (v, rows.extra_v)):
                    mean = x[b, h // shape.group, members].double().mean(0)
                    got = extra[b, h // shape.group, c].double()
                    torch.testing.assert_close(got, mean, rtol=1e-5, atol=1e-6)
                for r in range(ROWS):
                    number = int(taken[b, h, r, c])
                    want[b, h, r, members[:number]] = 1.0
                    if number == 0:
                        want[b, h, r, shape.num_keys + c] = len(members)
    plan = plan_of(shape, rows, valid)
    plan.validate()
    got = plan.weights().expand(shape.batch, shape.heads, -1, -1)
    tile = torch.arange(shape.num_queries) // TILE % ROWS
    torch.testing.assert_close(got, want[:, :, tile], rtol=1e-6, atol=0.0)


def test_axes_may_be_those_of_query_heads_or_kv_heads_or_shared() -> None:
    shape = Shape(2, 2, 3, 100, 200, 16, 1)
    _, k, v = shape.tensors()
    labels = torch.randint(GROUPS, (1, 1, 200), generator=shape.generator())
    shared = sort_by_group(labels, GROUPS)
    by_kv = sort_by_group(labels.expand(2, 2, -1), GROUPS)
    by_query = sort_by_group(labels.expand(2, 6, -1), GROUPS)
    taken = random_taken(shape, by_kv)
    got = [list_compensated(taken, keys, k, v, labels=labels) for keys in (shared, by_kv, by_query)]
    for other in got[1:]:
        for name in ("start", "count", "index", "log_weight", "extra_k", "extra_v", "extra_of"):
            assert torch.equal(getattr(got[0], name), getattr(other, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_counts_a_virtual_key_as_often_as_its_group_has_keys(dtype: torch.dtype) -> None:
    shape = Shape(2, 1, 2, 192, 150, 16, 3)
    q, k, v = shape.tensors(dtype)
    labels, _ = grouped(shape, padded=False)
    keys = sort_by_group(labels, GROUPS)
    plan = plan_of(
        shape, list_compensated(random_taken(shape, keys), keys, k, v, labels=labels), None
    )
    # The same by hand: virtual keys appended as keys, weights added to the logits.
    rows = plan.keys
    assert isinstance(rows, gs.KeyTokens)
    assert rows.extra_k is not None
    assert rows.extra_v is not None
    every_k, every_v = (
        torch.cat(pair, 2).double() for pair in ((k, rows.extra_k), (v, rows.extra_v))
    )
    logits = (
        q.double() @ every_k.mT.repeat_interleave(2, 1) / math.sqrt(16)
        + plan.weights().double().log()
    )
    out = logits.softmax(-1) @ every_v.repeat_interleave(2, 1)
    want = gs.AttentionOutput(out, logits.logsumexp(-1))
    assert_matches(gs.attend(q, k, v, plan), want, tolerance(q, k, v))


def test_refresh_renews_the_means_and_leaves_padding_out() -> None:
    shape = Shape(2, 2, 2, 90, 130, 16, 5)
    _, k, v = shape.tensors()
    labels, valid = grouped(shape, padded=True)
    assert valid is not None
    keys = sort_by_group(labels, GROUPS, valid=valid)
    plan = plan_of(
        shape, list_compensated(random_taken(shape, keys), keys, k, v, labels=labels), valid
    )
    k2, v2 = (x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (2 - k, 3 * v))
    renewed = plan.refresh(k2, v2).keys
    fresh = list_compensated(random_taken(shape, keys), keys, k2, v2, labels=labels)
    assert isinstance(renewed, gs.KeyTokens)
    for name in ("extra_k", "extra_v"):
        torch.testing.assert_close(getattr(renewed, name), getattr(fresh, name))


@given(shapes(), st.booleans())
def test_means_of_places_and_of_groups_agree(shape: Shape, padded: bool) -> None:
    """Two ways to the same means: by label, and by place with holes."""
    _, x, _ = shape.tensors()
    labels = torch.arange(shape.num_keys) // 7
    places = torch.arange(-(-shape.num_keys // 7) * 7)
    places = torch.where(places < shape.num_keys, places, -1).view(-1, 7)
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.5
        x = x.masked_fill(~valid[:, None, :, None], float("nan"))
        labels = torch.where(valid[:, None], labels, -1)
    means, size = place_means(x, places, valid=valid)
    by_label = group_means(x, labels.expand(shape.batch, 1, -1), len(places))
    torch.testing.assert_close(means, by_label)
    assert int(size.expand(shape.batch, -1).sum()) == (
        shape.batch * shape.num_keys if valid is None else int(valid.sum())
    )


@given(st.integers(0, 2**16), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_spread_rows_keep_a_prefix_that_grows_with_the_budget(
    seed: int, rows: int, columns: int, has_forced: bool
) -> None:
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, columns, generator=g)
    cost = torch.randint(1, 9, (1, columns), generator=g)
    forced = torch.rand(rows, columns, generator=g) < 0.2 if has_forced else None
    kept = [
        take_spread(scores, cost, cost.sum(-1).double() * share, forced=forced)
        for share in (0.0, 0.01, 0.2, 0.5, 0.51, 0.9, 1.0)
    ]
    for less, more in itertools.pairwise(kept):
        assert not (less & ~more).any()
    assert kept[-1].all()
    # Without a budget: the forced blocks and nothing else; one block in a row without any (BC18).
    least = torch.zeros_like(kept[0]) if forced is None else forced
    best = torch.arange(columns) == scores.argmax(-1, keepdim=True)
    assert torch.equal(kept[0], least | (best & ~least.any(-1, keepdim=True)))
    for keep in kept:
        free = scores if forced is None else scores.masked_fill(forced, torch.inf)
        worst_kept = free.masked_fill(~keep, torch.inf).amin(-1)
        best_left = free.masked_fill(keep, -torch.inf).amax(-1)
        assert (worst_kept >= best_left).all()


@pytest.mark.parametrize("share", [0.13, 0.31, 0.77])
def test_spread_rows_meet_the_budget_together(share: float) -> None:
    """Whole blocks of unequal sizes: each row is off by up to a block, all together by little."""
    g = torch.Generator().manual_seed(3)
    cost = torch.randint(1, 65, (4, 1, 1, 37), generator=g)
    scores = torch.randn(4, 2, 300, 37, generator=g)
    budget = cost.sum(-1).double() * share
    spent = (take_spread(scores, cost, budget) * cost).sum(-1).double().mean(-1)
    # A row's rounding is without bias and has a deviation of at most half a block: their mean over
    # 300 rows is below four of its deviations. Always rounding up would be off by some 20.
    assert ((spent - budget[..., 0]).abs() < 4 * 32 / 300**0.5).all()


def test_spread_debts_are_saved_in_later_rows() -> None:
    cost = torch.full((1, 8), 10)
    budget = torch.full((6,), 15.0, dtype=torch.float64)
    forced = torch.zeros(6, 8, dtype=torch.bool)
    forced[0, :6] = True  # costs 60 of 15: three rows' worth of debt
    forced[1:, 0] = True
    scores = torch.arange(8.0).flip(0).expand(6, -1)
    spent = (take_spread(scores, cost, budget, forced=forced, carry=True) * cost).sum(-1)
    assert spent.tolist()[:2] == [60, 10]
    assert abs(int(spent.sum()) - 90) <= 20  # 60 + 5 * 10 is the least
    alone = (take_spread(scores, cost, budget, forced=forced) * cost).sum(-1)
    assert int(alone.sum()) > int(spent.sum())
