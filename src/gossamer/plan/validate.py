"""The laws that every plan obeys, checked one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.errors import PlanError
from gossamer.plan.density import count_keys, count_visible
from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.rows import expand, tile_queries, tile_rows

if TYPE_CHECKING:
    from gossamer.plan.plan import SparsePlan


def validate(plan: SparsePlan) -> None:
    """Raise PlanError for the first law that `plan` breaks."""
    check_lists(plan)
    _check_queries(plan)
    _check_coverage(plan)


def check_lists(plan: SparsePlan) -> None:
    """Raise PlanError where tiles, rows or the launch order name what does not exist.

    Or where rows do not ascend. Some tiles alone will do, as whoever checks a kernel takes them.
    Waits for the plan's device.
    """
    check_shapes(plan)
    _check_tiles(plan)
    _check_rows(plan)
    _check_launch_order(plan)


def check_shapes(plan: SparsePlan) -> None:
    """Raise PlanError where tensors of the plan do not fit one another; waits for no device."""
    tiles, keys = plan.num_tiles, plan.keys
    if plan.query_index is not None:
        width = plan.query_index.shape[-1]
        _require(width == plan.tile, f"query_index holds {width} a tile of {plan.tile}")
    if plan.tile_row is None:
        _require(keys.num_rows >= tiles, f"{keys.num_rows} key rows for {tiles} tiles")
    else:
        named = plan.tile_row.shape[-1]
        _require(named == tiles, f"tile_row names {named} of {tiles} tiles")
    if plan.launch_order is not None:
        same = plan.launch_order.shape[-1] == tiles
        _require(same, f"launch_order must be a permutation of the {tiles} tiles")
    if plan.key_valid is not None:
        length = plan.key_valid.shape[-1]
        _require(length == plan.num_keys, f"key_valid is of {length} keys, not {plan.num_keys}")


def _require(holds: bool | Tensor, law: str) -> None:
    if not bool(holds):
        raise PlanError(f"invalid plan: {law}")


def _check_tiles(plan: SparsePlan) -> None:
    """Tiles hold queries that exist and read rows that exist."""
    queries = tile_queries(plan)
    inside = (queries >= -1) & (queries < plan.num_queries)
    _require(inside.all(), f"query_index outside -1…{plan.num_queries - 1}")
    rows = tile_rows(plan)
    if rows.numel():
        fits = (rows.min() >= 0) & (rows.max() < plan.keys.num_rows)
        _require(fits, f"tile_row outside 0…{plan.keys.num_rows - 1}")


def _check_queries(plan: SparsePlan) -> None:
    """Every query stands in exactly one tile."""
    ordered = tile_queries(plan).flatten(2).sort(-1).values  # [B, H, T * tile], the -1 first
    padding = ordered.shape[-1] - plan.num_queries
    _require(padding >= 0, f"{ordered.shape[-1]} tile rows for {plan.num_queries} queries")
    expected = torch.arange(plan.num_queries, device=plan.device).expand_as(ordered[..., padding:])
    once = (ordered[..., padding:] == expected).all() & (ordered[..., :padding] == -1).all()
    _require(once, "every query must stand in exactly one tile")


def _check_rows(plan: SparsePlan) -> None:
    """Counts fit their storage; indices are in range, ascending and unique."""
    keys = plan.keys
    if isinstance(keys, KeyBlocks):
        _require((keys.count >= 0).all(), "a negative block count")
        fits = (keys.count <= keys.index.shape[-1]).all()
        _require(fits, "a count above the index's width")
        kept = torch.arange(keys.index.shape[-1], device=plan.device) < keys.count[..., None]
        limit = keys.num_blocks(plan.num_keys)
        inside = (keys.index >= 0) & (keys.index < limit)
        _require((inside | ~kept).all(), f"a block index outside 0…{limit - 1}")
        rising = (keys.index[..., 1:] > keys.index[..., :-1]) | ~kept[..., 1:]
        _require(rising.all(), "block indices must ascend and be unique in a row")
        if keys.key_order is not None:
            _check_key_order(plan, keys.key_order)
        return
    _require((keys.count >= 0).all(), "a negative key count")
    end = keys.start + keys.count
    _require((keys.start >= 0).all() & (end <= keys.index.numel()).all(), "a row outside the pool")
    if keys.index.numel():
        limit = plan.num_keys + keys.num_extra
        inside = (keys.index.min() >= 0) & (keys.index.max() < limit)
        _require(inside, f"a key index outside 0…{limit - 1}")
    if plan.causal:
        _require(keys.num_extra == 0, "virtual keys have no position, so no causal form")
    _require(_ascends(keys), "key indices must ascend and be unique in a row")


def _ascends(keys: KeyTokens) -> bool:
    """Return whether every row of the pool ascends; rows may share entries."""
    falls = keys.index[1:] <= keys.index[:-1]  # entry i + 1 is not above entry i
    if not bool(falls.any()):
        return True
    start, count = (x.flatten().long() for x in (keys.start, keys.count))
    inner = (count > 1).int()
    cover = torch.zeros(keys.index.numel() + 1, dtype=torch.int32, device=keys.index.device)
    cover.index_add_(0, start + inner, inner)
    cover.index_add_(0, start + count, -inner)
    inside = cover.cumsum(0)[1:-1] > 0  # entry i + 1 follows entry i in a row
    return not bool((falls & inside).any())


def _check_key_order(plan: SparsePlan, key_order: Tensor) -> None:
    """Every key stands at exactly one place."""
    ordered = key_order.long().sort(-1).values
    holes = ordered.shape[-1] - plan.num_keys
    _require(holes >= 0, f"key_order holds {ordered.shape[-1]} places for {plan.num_keys} keys")
    expected = torch.arange(plan.num_keys, device=plan.device).expand_as(ordered[..., holes:])
    once = (ordered[..., holes:] == expected).all() & (ordered[..., :holes] == -1).all()
    _require(once, "key_order must name every key once, and -1 elsewhere")


def _check_launch_order(plan: SparsePlan) -> None:
    """The launch order is a permutation of the tiles."""
    if plan.launch_order is None:
        return
    ordered = plan.launch_order.long().sort(-1).values
    tiles = torch.arange(plan.num_tiles, device=plan.device)
    same = ordered.shape[-1] == plan.num_tiles and bool((ordered == tiles).all())
    _require(same, f"launch_order must be a permutation of the {plan.num_tiles} tiles")


def _check_coverage(plan: SparsePlan) -> None:
    """Every query that can see a key, and is not padding itself, reads one."""
    read = count_keys(plan)  # [B, H, N]
    visible = expand(count_visible(plan)[:, None], *read.shape[:2])
    starved = (visible > 0) & (read == 0)
    if plan.key_valid is not None and plan.num_queries == plan.num_keys:
        starved = starved & plan.key_valid[:, None]
    if bool(starved.any()):
        batch, head, query = (int(i) for i in starved.nonzero()[0])
        raise PlanError(
            f"invalid plan: query {query} (batch {batch}, head {head}) reads no key "
            f"though it sees {int(visible[batch, head, query])}"
        )
