"""Key rows as page tables of one width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan

_PAGES = (16, 32, 64, 128)  # keys per block that may be a page of their own
_UNASKED_BYTES = 32 << 20  # of a table, up to which its width is bounded instead of read back
# Memory at work per entry: the table and what it is made from; weights, and what is computed on the
# way to leave out those of 0; moving entries together.
_ENTRY_BYTES, _WEIGHT_BYTES, _COMPACT_BYTES = 12, 24, 28


class Table(NamedTuple):
    """Page tables of some rows.

    Attributes:
        table: [n, W] int32.
        length: [n] int32, keys (not pages) that a row reads.
        log_weight: [n, W] float32, or None.
    """

    table: Tensor
    length: Tensor
    log_weight: Tensor | None


@dataclass(frozen=True, eq=False)
class Lists:
    """Makes the page tables of a plan, some pairs of batch row and query head at a time.

    Attributes:
        plan: The plan.
        batch: B.
        heads: H.
        width: Entries of a row, at most, before blocks are cut into keys.
        stride: Where in the pool row r of all rows begins is r * stride; None where that is not so,
            or not known.
        page: Keys per page.
    """

    plan: SparsePlan
    batch: int
    heads: int
    width: int
    stride: int | None
    page: int

    @classmethod
    def of(cls, plan: SparsePlan, batch: int, heads: int) -> Lists:
        """Decide what all pairs share; waits for the device where tables of tokens are large."""
        keys = plan.keys
        if isinstance(keys, KeyBlocks):
            width = max(1, min(keys.index.shape[-1], keys.num_blocks(plan.num_keys)))
            plain = keys.key_order is None and plan.key_valid is None
            whole = plain and keys.block in _PAGES and plan.num_keys % keys.block == 0
            return cls(plan, batch, heads, width, None, keys.block if whole else 1)
        width, stride = _row_shape(keys, plan.num_keys, batch * heads)
        return cls(plan, batch, heads, width, stride, 1)

    @property
    def bytes_per_pair(self) -> int:
        """Memory that the rows of one pair take while they are made, about."""
        keys = self.plan.keys
        width, entry = self.width, _ENTRY_BYTES
        if isinstance(keys, KeyBlocks):
            width *= keys.block // self.page
        elif keys.log_weight is not None:
            entry += _WEIGHT_BYTES
        if self.plan.key_valid is not None or getattr(keys, "key_order", None) is not None:
            entry += _COMPACT_BYTES
        return max(1, keys.num_rows * width * entry)

    def select(self, x: Tensor, part: slice) -> Tensor:
        """Return the pairs `part` of x [B|1, H|1, ...] as [pairs, ...], a view if it can be."""
        if x.shape[:2] == (self.batch, self.heads):
            return x.flatten(0, 1)[part]
        pair = torch.arange(part.start, part.stop, device=x.device)
        row = pair // self.heads if x.shape[0] > 1 else torch.zeros_like(pair)
        head = pair % self.heads if x.shape[1] > 1 else torch.zeros_like(pair)
        return x[row, head]

    def make(self, part: slice, base: Tensor, step: int) -> Table:
        """Return the page tables of the rows of some pairs.

        Args:
            part: The pairs.
            base: [pairs] int32, page of the first key of each pair.
            step: Pages from one key (block, where that is a page) to the next.
        """
        keys = self.plan.keys
        if isinstance(keys, KeyTokens):
            key, count, log_weight = self._tokens(keys, part)
        else:
            key, count = self._blocks(keys, part)
            log_weight = None
        base = base.repeat_interleave(keys.num_rows)[:, None]  # [n, 1]
        if log_weight is not None:
            return self._weighted(torch.add(base, key, alpha=step), key, count, log_weight, part)
        if self.page == 1 and self._has_gaps:
            key, count = _compact(key, self._is_read(key, count, part))
        return Table(torch.add(base, key, alpha=step), count, None)

    @property
    def _has_gaps(self) -> bool:
        """Whether a row may list what is not read: padded keys, or holes of a key order."""
        order = getattr(self.plan.keys, "key_order", None)
        holes = order is not None and order.shape[-1] != self.plan.num_keys
        return holes or self.plan.key_valid is not None

    def _tokens(self, keys: KeyTokens, part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys [n, W] int32, counts [n] int32 and weights [n, W] of rows of tokens."""
        start = self.select(keys.start, part).flatten()
        count = self.select(keys.count, part).flatten().int()
        pools = [keys.index] if keys.log_weight is None else [keys.index, keys.log_weight]
        if keys.index.numel() == 0:
            pools = [x.new_zeros(1) for x in pools]
        if self.stride is not None:
            rows = [x.view(-1, self.stride)[:, : self.width] for x in pools]
            if keys.start.shape[:2] == (self.batch, self.heads):
                inside = slice(part.start * keys.num_rows, part.stop * keys.num_rows)
                rows = [x[inside] for x in rows]
            else:
                rows = [x.index_select(0, start // self.stride) for x in rows]
        else:
            last = pools[0].numel() - 1
            narrow = last + self.width < 1 << 31
            dtype = torch.int32 if narrow else torch.int64
            place = start.to(dtype)[:, None] + torch.arange(
                self.width, dtype=dtype, device=start.device
            )
            place = place.clamp_(max=last).flatten()
            rows = [x.index_select(0, place).view(-1, self.width) for x in pools]
        return rows[0], count, rows[1] if len(rows) > 1 else None

    def _blocks(self, keys: KeyBlocks, part: slice) -> tuple[Tensor, Tensor]:
        """Return pages [n, W] int32 and counts of keys [n] int32 of rows of blocks.

        Where blocks are not pages they are cut into keys; holes of a key order are -1. What lies
        behind a row's blocks may be anything.
        """
        plan, block = self.plan, keys.block
        length = plan.num_keys if keys.key_order is None else keys.key_order.shape[-1]
        index = self.select(keys.index[..., : self.width], part).flatten(0, 1).int()
        if index.shape[-1] == 0:
            index = index.new_zeros(index.shape[0], 1)
        count = self.select(keys.count, part).flatten().int()
        # Lists ascend, so a row holds the ragged block last.
        last = index.gather(1, (count[:, None] - 1).clamp(min=0).long())[:, 0]
        num_blocks = keys.num_blocks(plan.num_keys)
        missing = torch.where(last == num_blocks - 1, num_blocks * block - length, 0)
        num_places = torch.where(count > 0, count * block - missing, 0).int()
        if self.page != 1 or block == 1:
            place = index
        else:
            offset = torch.arange(block, dtype=torch.int32, device=index.device)
            place = (index[..., None] * block + offset).flatten(1)  # [n, W * block]
        if keys.key_order is None:
            return place, num_places
        order = self.select(keys.key_order, part).int()  # [pairs, length]
        place = place.clamp(0, length - 1)
        ahead = torch.arange(len(order), dtype=torch.int32, device=place.device) * length
        place = place + ahead.repeat_interleave(keys.num_rows)[:, None]
        return order.flatten().index_select(0, place.flatten()).view_as(place), num_places

    def _is_read(self, key: Tensor, count: Tensor, part: slice) -> Tensor:
        """Return which of the keys [n, W] stand in a row, are no hole and are no padding."""
        read = torch.arange(key.shape[1], device=key.device) < count[:, None]
        read = read & (key >= 0)
        valid = self.plan.key_valid
        if valid is None or self.plan.num_keys == 0:
            return read
        inside = key.clamp(0, self.plan.num_keys - 1)
        if valid.shape[0] > 1:
            pair = torch.arange(part.start, part.stop, dtype=torch.int32, device=key.device)
            ahead = pair // self.heads * self.plan.num_keys
            inside = inside + ahead.repeat_interleave(self.plan.keys.num_rows)[:, None]
        valid = valid.flatten().index_select(0, inside.flatten()).view_as(key)
        return read & (valid | (key >= self.plan.num_keys))

    def _weighted(
        self, table: Tensor, key: Tensor, count: Tensor, log_weight: Tensor, part: slice
    ) -> Table:
        """Return the table of rows with weights, in which no entry of weight 0 names its own page.

        Such an entry keeps its place with weight -inf, and names the row's page of greatest weight:
        what is not read must not be loaded, since 0 * NaN is NaN.
        """
        read = self._is_read(key, count, part)
        log_weight = torch.where(read, log_weight.float(), -torch.inf)
        best, place = log_weight.max(1, keepdim=True)
        table = torch.where(log_weight > -torch.inf, table, table.gather(1, place))
        count = torch.where(best[:, 0] > -torch.inf, count, 0)
        return Table(table, count, log_weight)


def _row_shape(keys: KeyTokens, num_keys: int, pairs: int) -> tuple[int, int | None]:
    """Return how long rows of tokens are, at most, and their constant stride if they have one.

    Rows are unique lists of their pool. Where tables of that width are small they may be wider than
    need be, and nothing is read back from the device.
    """
    size, num_starts = keys.index.numel(), keys.start.numel()
    bound = max(1, min(size, num_keys + keys.num_extra))
    if 4 * bound * pairs * keys.num_rows <= _UNASKED_BYTES or num_starts == 0:
        return bound, None
    stride = size // num_starts
    rows = torch.arange(num_starts, device=keys.start.device)
    regular = (keys.start.flatten() == rows * stride).all()
    longest, is_regular = torch.stack([keys.count.max().long(), regular.long()]).tolist()
    width = max(1, longest)
    fits = bool(is_regular) and stride * num_starts == size and width <= stride
    return width, stride if fits else None


def _compact(key: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Move what is read of keys [n, W] to the front of each row; return keys and counts."""
    width = key.shape[1]
    running = read.cumsum(1, dtype=torch.int32)
    # What is not read goes to a column that is cut off.
    place = torch.where(read, running - 1, width)
    moved = key.new_zeros(len(key), width + 1).scatter_(1, place.long(), key)[:, :width]
    return moved, running[:, -1].contiguous()
