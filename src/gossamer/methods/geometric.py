"""What methods share whose pattern is geometry: bands over blocks, runs over grids, checks."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.group.patches import Patches
from gossamer.plan import KeyTokens, SparsePlan
from gossamer.select.runs import Runs, list_runs, solve_knob


def band_entry(
    num_rows: int, num_columns: int, *, tile: int, block: int, shift: int, device: torch.device
) -> Tensor:
    """Return how far apart the middles of tiles and blocks stand, [1, 1, R, C] float64 tokens.

    Args:
        num_rows: R, tiles of consecutive queries.
        num_columns: C, blocks of consecutive keys.
        tile: Queries per tile.
        block: Keys per block.
        shift: Position of the first query among the keys.
        device: Where the result lies.
    """
    row = torch.arange(num_rows, device=device).double()[:, None] * tile + (tile - 1) / 2 + shift
    column = torch.arange(num_columns, device=device).double() * block + (block - 1) / 2
    return (row - column).abs()[None, None]


def valid_tokens(call: Call, length: int, device: torch.device) -> Tensor:
    """Return the tokens that count, [B|1, length] bool: all where there is no padding."""
    if call.key_valid is not None:
        return call.key_valid
    return torch.ones(1, length, dtype=torch.bool, device=device)


def places_valid(valid: Tensor, order: Tensor, size: int) -> Tensor:
    """Return which places of an order hold a token that counts, cut into groups of `size`.

    Args:
        valid: [B|1, S] bool.
        order: [P] int64, the token at each place, -1 for none; P is a multiple of `size`.
        size: Places per group.

    Returns:
        [B|1, P / size, size] bool.
    """
    held = valid[:, order.clamp(min=0)] & (order >= 0)
    return held.unflatten(1, (-1, size))


def padded_order(length: int, size: int, device: torch.device) -> Tensor:
    """Return 0…length-1, filled up with -1 to a multiple of `size`, int64."""
    order = torch.arange(length, device=device)
    return torch.nn.functional.pad(order, (0, -length % size), value=-1)


def runs_plan(
    patches: Patches,
    runs: Runs,
    lengths: tuple[int, int],
    call: Call,
    device: torch.device,
    *,
    knob: float = 0.0,
    density: float | None = None,
) -> SparsePlan:
    """Return the plan in which each tile reads the union of its queries' windows.

    It is made on the CPU from sizes alone and copied once. Only a density to be met under padding,
    or padding where queries are not the keys' own, has to read the padding back from the device.

    Args:
        patches: The tiles.
        runs: What they read at each value of the knob.
        lengths: N and S.
        call: The call.
        device: Where the plan lies.
        knob: The knob's value, where no density is given.
        density: The density to meet; None where the knob is given.
    """
    num_queries, num_keys = lengths
    host = torch.device("cpu")
    if density is None:
        value = torch.full((1,), knob, dtype=torch.float64, device=host)
    else:
        valid = valid_tokens(call, num_keys, host).to(host)
        valid_q = valid if num_queries == num_keys else valid.new_ones(1, num_queries)
        index = patches.query_index
        order = index.long().flatten() if index is not None else None
        order = padded_order(num_queries, patches.tile, host) if order is None else order
        queries = places_valid(valid_q, order, patches.tile).sum(-1).expand(len(valid), -1)
        value = solve_knob(runs, queries, valid, density)
    keys = list_runs(runs, value)
    if call.key_valid is not None and num_queries != num_keys:
        keys = _never_padding_alone(keys, call.key_valid.to(host))
    plan = SparsePlan(
        num_queries=num_queries,
        num_keys=num_keys,
        tile=patches.tile,
        keys=_sent(keys, device),
        query_index=_sent_tensor(patches.query_index, device),
        key_valid=call.key_valid,
        scale=call.scale,
    )
    return plan


def _never_padding_alone(keys: KeyTokens, valid: Tensor) -> KeyTokens:
    """Let rows that list padding alone read every key: a query must not go without any."""
    length = valid.shape[1]
    every = torch.arange(length, dtype=torch.int32, device=valid.device)
    held = torch.nn.functional.pad(valid[:, keys.index.long()].long().cumsum(1), (1, 0))
    start, count = (x.expand(len(valid), -1, -1) for x in (keys.start, keys.count))
    first, last = (x.long().flatten(1) for x in (start, start + count))
    starved = (held.gather(1, last) == held.gather(1, first)).view(start.shape)
    return KeyTokens(
        start=torch.where(starved, len(keys.index), start),
        count=torch.where(starved, length, count),
        index=torch.cat([keys.index, every]),
    )


def _sent_tensor(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """Copy a tensor from the CPU without waiting for the device."""
    return None if tensor is None else tensor.to(device, non_blocking=True)


def _sent(keys: KeyTokens, device: torch.device) -> KeyTokens:
    """Copy key rows from the CPU without waiting for the device."""
    start, count, index = (
        x.to(device, non_blocking=True) for x in (keys.start, keys.count, keys.index)
    )
    return KeyTokens(start=start, count=count, index=index)
