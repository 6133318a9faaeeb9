"""WaveAlign: tiles that read the same keys are launched together, long ones first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.counter import uniform
from gossamer.errors import PlanError, described
from gossamer.order.base import Order, OrderDecision, register
from gossamer.order.gpu import wavealign as gpu
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan
from gossamer.plan.density import count_visible
from gossamer.plan.fit import check_is_plan
from gossamer.plan.rows import expand, tile_queries, tile_rows

_SALT = 4  # of the start of the subspace iteration
_BLOCK = 128  # keys that single keys are counted in
_CHUNK_BYTES = 256 << 20  # of the lists and products of the heads that are ordered together
# Of one list entry: index, value and place by column (20), and at most what a sort of them or a
# running sum of products holds (48).
_ENTRY_BYTES = 68
_UNIT = 2.0**30  # fixed point of the transposed product
_DEPENDENT = 1e-5  # share of a column left by orthogonalising that is rounding

_CTAS_PER_SM = 1  # tiles of 128 rows at head dim 128 fill an SM's registers
_SMS = 132  # of an H100 or H200; where the plan is on no GPU

# The estimate of the gain is ours, from these measurements.
# Up to 98K tokens the paper finds no gain on an H100 (figure 13): K and V of one head, in bf16 at
# head dim 128, are then as large as its L2 cache of 50 MB, which the H200 shares.
_MIN_TOKENS = 98_304
# The paper skips at densities of 1.7% and 6.7% and gains from 14.5% (figure 13).
_MIN_DENSITY = 0.067
# Measured on an H200 with the kernel `hopper` on uneven rows of clustered masks at a density of .2:
# 1.05 at 148K tokens and 1.08 at 364K, which is this much times the share that no two rows have in
# common and the root of the share of K and V that the L2 cache does not hold. Tiles by length
# within waves gain nothing there: a multiprocessor that is free takes the next tile.
_GAIN = 0.113
_OVERHEAD = 0.032  # of attention's time, the most that the paper measures (1.1 to 3.2%)


@register
@dataclass(frozen=True, kw_only=True)
class WaveAlign(Order):
    """Launch tiles that read the same keys in the same wave, and long rows of a wave first.

    Stage 1, per head: B is the mask of tiles and key blocks (for single keys, how many of each 128
    keys a tile reads). The two leading left singular vectors of the centred mask B - 1 mean(B)^T
    give every tile a point (u1, u2), and tiles are sorted by its angle atan2(u2, u1). The vectors
    come from subspace iteration, without a Gram matrix, and centring is a correction of rank 1. On
    a CPU its products run over the lists, O(entries) per step; on a GPU, with two columns, over the
    mask at a byte an entry, of as many heads at once as fit 256 MiB (`order/gpu/`; a head whose own
    mask is larger takes the lists). Stage 2 cuts that order into waves of as many tiles as run at
    once and sorts each by descending count, so that a wave's short rows end where the next one's
    long rows begin.

    The result is a launch order and nothing else: outputs are the same bit for bit. Tiles without
    a query or a key stand last. Heads with fewer than 3 other tiles, or whose tiles all read the
    same, keep their order.

    Differs from the paper: the circle of angles is cut at its widest gap instead of at -pi, which
    would split a neighbourhood in two; the estimate of the gain is our own.

    Attributes:
        wave: Tiles that run at once; "auto" takes the GPU's number of SMs, 132 without a GPU.
        rank: Columns of the subspace iteration, at least 2. The angle uses the two leading ones;
            more columns converge in fewer steps, but a GPU has kernels for two alone.
        iters: Steps of the subspace iteration (paper: 5 to 15).
        skip: "auto" leaves plans as they are where ordering is not estimated to pay; "never" orders
            every plan.
    """

    name: ClassVar[str] = "wavealign"
    paper: ClassVar[str] = (
        "WaveAlign: Cache-Aware Query-Row Scheduling for Sparse Attention in Long-Video Generation"
    )

    wave: int | str = "auto"
    rank: int = 2
    iters: int = 8
    skip: str = "auto"

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        counts = [("rank", 2), ("iters", 1)]
        counts += [("wave", 1)] if self.wave != "auto" else []
        for name, least in counts:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                also = ' or "auto"' if name == "wave" else ""
                raise PlanError(
                    f"wavealign: {name}={described(value)} must be an integer >= {least}{also}"
                )
        if self.skip not in ("auto", "never"):
            raise PlanError(
                f"wavealign: skip={described(self.skip)} must be one of ('auto', 'never')"
            )

    def decide(self, plan: SparsePlan) -> OrderDecision:
        """Estimate the gain from the length and the density."""
        check_is_plan(plan)
        tokens, wave = plan.num_keys, self._wave(plan)
        density = _density(plan)
        spilled = max(0.0, 1 - _MIN_TOKENS / max(tokens, 1))  # of K and V, from the L2 cache
        # The denser the rows, the more any two of them share in any order.
        gain = 1 + math.sqrt(spilled) * _GAIN * (1 - density)
        if self.skip == "never":
            return OrderDecision(order=True, reason='skip="never"', estimated_gain=gain)
        pays = False
        if tokens <= _MIN_TOKENS:
            reason = f"{tokens} keys: up to {_MIN_TOKENS}, K and V of a head stay in the L2 cache"
        elif density <= _MIN_DENSITY:
            reason = f"density {density:.3f}: up to {_MIN_DENSITY}, attention is too short"
        elif plan.num_tiles <= wave:
            reason = f"{plan.num_tiles} tiles: all run in one wave of {wave}"
        else:
            pays = gain > 1 + _OVERHEAD
            relation = "above" if pays else "not above"
            reason = f"estimated gain {gain:.3f}x, {relation} the {1 + _OVERHEAD:.3f}x it costs"
        return OrderDecision(order=pays, reason=reason, estimated_gain=gain)

    def order(self, plan: SparsePlan, decision: OrderDecision | None = None) -> SparsePlan:
        """Return the plan with its launch order, or as it is where ordering does not pay.

        Args:
            plan: The plan.
            decision: What `decide` returned for this plan; None asks it where plans may be left as
                they are.

        Raises:
            PlanError: It is no plan.
        """
        check_is_plan(plan)
        if decision is None and self.skip == "auto":
            decision = self.decide(plan)
        leaves = decision is not None and not decision.order
        if leaves or plan.num_tiles == 0 or plan.keys.num_rows == 0:
            return plan
        columns = _num_columns(plan)
        if gpu.takes(plan, columns, self.rank):
            order = gpu.launch_order(
                plan,
                _axes(plan),
                num_columns=columns,
                block=_BLOCK,
                iters=self.iters,
                salt=_SALT,
                dependent=_DEPENDENT,
                wave=self._wave(plan),
            )
            return replace(plan, launch_order=order)
        batch, heads = _axes(plan)
        width = _width(plan)
        line = torch.arange(batch * heads, device=plan.device)
        per_line = _ENTRY_BYTES * max(plan.num_tiles, plan.keys.num_rows) * width
        parts = [
            self._order_lines(plan, part // heads, part % heads, width)
            for part in line.split(max(1, _CHUNK_BYTES // max(per_line, 1)))
        ]
        order = torch.cat(parts).view(batch, heads, plan.num_tiles)
        return replace(plan, launch_order=order.int())

    def _order_lines(self, plan: SparsePlan, batch: Tensor, head: Tensor, width: int) -> Tensor:
        """Return the order [x, T] of the tiles of some heads."""
        at = (batch, head)
        shape = _axes(plan)
        rows = expand(tile_rows(plan), *shape)[at]  # [x, T]
        count = expand(plan.keys.count, *shape)[at].long().gather(1, rows)
        has_query = expand((tile_queries(plan) >= 0).any(-1), *shape)[at]
        active = has_query & (count > 0)
        mask = _block_lists(plan, at, rows, active, width)
        first = torch.argsort(
            (~active).byte(), dim=-1, stable=True
        )  # as they came, empty ones last
        spatial = _by_angle(mask.embed(self.rank, self.iters), active)
        spatial = torch.where(mask.is_uniform(), first, spatial)
        order = _in_waves(spatial, count, active, self._wave(plan))
        return torch.where(mask.number < 3, first, order)

    def _wave(self, plan: SparsePlan) -> int:
        """Return how many tiles run at once."""
        if isinstance(self.wave, int):
            return self.wave
        if plan.device.type != "cuda":
            return _SMS * _CTAS_PER_SM
        properties = torch.cuda.get_device_properties(plan.device)
        return properties.multi_processor_count * _CTAS_PER_SM


def _axes(plan: SparsePlan) -> tuple[int, int]:
    """Return (B, H) of the tensors that decide which keys a tile reads."""
    keys = plan.keys
    tensors = [keys.count, keys.index if isinstance(keys, KeyBlocks) else keys.start]
    tensors += [x for x in (plan.query_index, plan.tile_row) if x is not None]
    return max(x.shape[0] for x in tensors), max(x.shape[1] for x in tensors)


def _density(plan: SparsePlan) -> float:
    """Return the mean share of visible keys that a tile with any reads; one synchronisation."""
    keys = plan.keys
    if min(plan.num_tiles, plan.num_keys, keys.num_rows) == 0:
        return 1.0
    shape = _axes(plan)
    count = expand(keys.count, *shape).gather(2, expand(tile_rows(plan), *shape)).double()
    active = (expand((tile_queries(plan) >= 0).any(-1), *shape) & (count > 0)).double()
    mean = (count * active).sum() / active.sum().clamp(min=1)
    whole = keys.num_blocks(plan.num_keys) if isinstance(keys, KeyBlocks) else plan.num_keys
    visible = count_visible(plan).double().mean() / plan.num_keys
    return float((mean / whole / visible.clamp(min=1e-9)).clamp(max=1.0))


def _width(plan: SparsePlan) -> int:
    """Return the most blocks that any row lists; one synchronisation."""
    keys = plan.keys
    longest = max(1, int(keys.count.max()))
    return longest if isinstance(keys, KeyBlocks) else min(longest, _num_columns(plan))


def _num_columns(plan: SparsePlan) -> int:
    """Return C, the number of key blocks, virtual keys in blocks behind the real ones'."""
    keys = plan.keys
    if isinstance(keys, KeyBlocks):
        return keys.num_blocks(plan.num_keys)
    return -(-(plan.num_keys + keys.num_extra) // _BLOCK)


class _Masks(NamedTuple):
    """Masks B of tiles and key blocks, as lists.

    Attributes:
        column: [x, T, K] int64, the blocks of each tile; 0 where nothing is listed.
        value: [x, T, K] float32, the mask's entries: whole numbers, 0 where nothing is listed and
            for tiles that are left out.
        number: [x, 1] int64, tiles that are not left out.
        active: [x, T, 1] float32, 1 for these.
        by: [x * T * K] int64, the entries of all masks by mask and column.
        edge: [x * C + 1] int64, where each column begins among them.
        total: [x, C] int64, sums of the columns.
    """

    column: Tensor
    value: Tensor
    number: Tensor
    active: Tensor
    by: Tensor
    edge: Tensor
    total: Tensor

    def is_uniform(self) -> Tensor:
        """Return whether the centred mask is 0, [x, 1] bool: all tiles read the same."""
        square = _down(self.value.square().long(), self.by, self.edge)
        return (square * self.number == self.total.square()).all(-1, keepdim=True)

    def embed(self, rank: int, iters: int) -> Tensor:
        """Return the two leading left singular vectors of the centred mask, [x, T, 2].

        Up to a rotation in their plane, which turns all angles alike.
        """
        device = self.value.device
        mean = self.total / self.number.clamp(min=1)  # [x, C]
        block = torch.arange(mean.shape[1], device=device)
        start = uniform(_SALT, block[:, None], torch.arange(rank, device=device), device=device)
        right = (start.float() - 0.5).expand(len(mean), -1, -1)  # [x, C, rank]
        for _ in range(iters):
            left = _orthonormal(self._centred(right, mean))
            right = self._transposed(left) - mean[..., None] * left.sum(1, keepdim=True)
        left = self._centred(_orthonormal(right), mean)
        if rank > 2:  # the leading two directions inside the subspace
            turn = torch.linalg.eigh((left.mT @ left).double()).eigenvectors
            left = left @ turn[..., -2:].flip(-1).float()
        return _orthonormal(left)

    def _centred(self, right: Tensor, mean: Tensor) -> Tensor:
        """Return (B - 1 mean^T) right, [x, T, rank], 0 for tiles that are left out."""
        line = torch.arange(len(right), device=right.device)[:, None, None]
        product = (right[line, self.column] * self.value[..., None]).sum(2)
        return product - self.active * (mean[:, None] @ right)

    def _transposed(self, left: Tensor) -> Tensor:
        """Return B^T left, [x, C, rank].

        In whole numbers of 2^-30, whose running sums are exact. The columns of `left` are at most
        1 long.
        """
        products = [
            _down((self.value * (left[..., r : r + 1] * _UNIT)).round().long(), self.by, self.edge)
            for r in range(left.shape[-1])
        ]
        return (torch.stack(products, dim=-1).double() / _UNIT).float()


def _down(entries: Tensor, by: Tensor, edge: Tensor) -> Tensor:
    """Sum entries [x, T, K] int64 by column: [x, C].

    As differences of a running sum over the entries in the order of their columns. On a GPU
    additions by atomics would wait for one another, thousands to a column.
    """
    running = torch.nn.functional.pad(entries.flatten()[by].cumsum(0), (1, 0))
    return running[edge].diff().view(len(entries), -1)


def _orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal columns that span those of x [..., n, rank]; 0 for dependent ones."""
    done: list[Tensor] = []
    for column in x.double().unbind(-1):
        rest = column
        for other in done * 2:  # twice: one pass leaves rounding
            rest = rest - other * (other * rest).sum(-1, keepdim=True)
        length = rest.norm(dim=-1, keepdim=True)
        depends = length <= _DEPENDENT * column.norm(dim=-1, keepdim=True)
        done.append(torch.where(depends, 0.0, rest / length))
    return torch.stack(done, dim=-1).float()


def _block_lists(
    plan: SparsePlan, at: tuple[Tensor, Tensor], rows: Tensor, active: Tensor, width: int
) -> _Masks:
    """Return the masks of some heads `at` (batch, head) [x]; `rows` and `active` are [x, T]."""
    keys, shape = plan.keys, _axes(plan)
    if isinstance(keys, KeyBlocks):
        count = expand(keys.count, *shape)[at]  # [x, R]
        index = expand(keys.index[..., :width], *shape)[at]  # [x, R, K]
        value = torch.arange(width, device=plan.device) < count[..., None]
        index = torch.where(value, index, 0)
    else:
        start, count = expand(keys.start, *shape)[at], expand(keys.count, *shape)[at]
        index, value = _count_in_blocks(keys, start, count, width)
    by_tile = rows[..., None].expand(-1, -1, width)
    index = index.long().gather(1, by_tile)
    value = value.float().gather(1, by_tile) * active[..., None]
    columns = _num_columns(plan)
    line = torch.arange(len(rows), device=plan.device)
    column, by = (line[:, None, None] * columns + index).flatten().sort(stable=True)
    first = torch.arange(len(rows) * columns + 1, device=plan.device)
    edge = torch.searchsorted(column, first)
    total = _down(value.long(), by, edge)
    number = active.sum(-1, keepdim=True)
    return _Masks(index, value, number, active.float()[..., None], by, edge, total)


def _count_in_blocks(
    keys: KeyTokens, start: Tensor, count: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Count the keys of each row [x, R] in blocks of 128: which blocks and how many keys of each.

    Returns:
        index [x, R, width] int64 and value [x, R, width] int64, 0 where nothing is listed.
    """
    begin, size = start.flatten(), count.flatten()
    longest = max(1, int(size.max()))
    index = begin.new_zeros(len(begin), width + 1)
    value = torch.zeros_like(index)
    row = torch.arange(len(begin), device=begin.device)
    place = torch.arange(longest, device=begin.device)
    for part in row.split(max(1, _CHUNK_BYTES // (32 * longest))):
        listed = place < size[part, None]
        at = torch.where(listed, begin[part, None] + place, begin[part, None])
        block = keys.index[at.clamp(max=max(keys.index.numel() - 1, 0))].long() // _BLOCK
        # Lists ascend, so a block's keys stand side by side.
        is_new = torch.nn.functional.pad(block[:, 1:] != block[:, :-1], (1, 0), value=True)
        slot = torch.where(listed, (is_new & listed).cumsum(1) - 1, width)
        index[part] = index[part].scatter(1, slot, block)
        value[part] = value[part].scatter_add(1, slot, listed.long())
    shape = (*start.shape, width)
    return index[:, :width].reshape(shape), value[:, :width].reshape(shape)


def _by_angle(points: Tensor, active: Tensor) -> Tensor:
    """Return the tiles sorted by the angle of their points [x, T, 2]; inactive ones last: [x, T].

    The circle is cut at its widest gap, so that neighbours on it stay neighbours.
    """
    angle = torch.atan2(points[..., 1], points[..., 0]).masked_fill(~active, torch.inf)
    angle, order = angle.sort(dim=-1, stable=True)
    number = active.sum(-1, keepdim=True)
    tile = torch.arange(angle.shape[1], device=angle.device)
    inside = tile < number
    previous = angle.roll(1, dims=-1)
    last = angle.gather(1, (number - 1).clamp(min=0))
    previous = torch.where(tile == 0, last - 2 * math.pi, previous)
    gap = (angle - previous).masked_fill(~inside, -torch.inf)  # in front of each tile
    cut = gap.argmax(-1, keepdim=True)
    source = torch.where(inside, (tile + cut) % number.clamp(min=1), tile)
    return order.gather(1, source)


def _in_waves(order: Tensor, count: Tensor, active: Tensor, wave: int) -> Tensor:
    """Return the order [x, T], inactive tiles last, with each wave by descending count.

    By one sort; inactive tiles form a last wave. `count` and `active` [x, T] are by tile.
    """
    place = torch.arange(order.shape[1], device=order.device)
    is_empty = place >= active.sum(-1, keepdim=True)
    group = torch.where(is_empty, order.shape[1], place // wave)
    longest = torch.iinfo(torch.int32).max
    fewer = torch.where(is_empty, 0, longest - count.gather(1, order))
    return order.gather(1, torch.argsort((group << 32) + fewer, dim=-1, stable=True))
