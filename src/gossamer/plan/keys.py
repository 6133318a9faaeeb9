"""Which keys the rows of a plan read: whole blocks of a key order, or single tokens of one pool."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self, cast

import torch
from torch import Tensor

from gossamer.call import is_index
from gossamer.errors import PlanError, described

_ROWS = "[B|1, H|1, R]"  # the axes of what each key row has
_WORD = 32  # bits in one word of the bit-mask encoding


class _OnDevice:
    """Moves every tensor field of a frozen dataclass to a device."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy with every tensor on `device`."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)  # pyright: ignore[reportArgumentType] -- mixed into dataclasses only
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)  # pyright: ignore[reportArgumentType] -- as above


def check_fields(
    given: object,
    dtype: torch.dtype | None,
    axes: Mapping[str, str],
    *,
    optional: Collection[str] = (),
) -> None:
    """Refuse what is no tensor, and tensors of another dtype or number of axes.

    Kernels read them as what the format says they are.

    Args:
        given: What holds the tensors.
        dtype: What they must be; None for any.
        axes: Their attributes, with their axes as text such as "[B|1, H|1, R]".
        optional: Those that may be None.

    Raises:
        PlanError: Naming the tensor, what it is and what it must be.
    """
    for name, layout in axes.items():
        tensor = getattr(given, name)
        if tensor is None and name in optional:
            continue
        check_tensor(f"{type(given).__name__}.{name}", tensor, dtype, layout)


def check_tensor(name: str, value: object, dtype: torch.dtype | None, layout: str) -> None:
    """Refuse what is no tensor of a dtype (None: of any) with the axes of a layout.

    Raises:
        PlanError: Naming the tensor, what it is and what it must be.
    """
    if not isinstance(value, Tensor):
        kind = "a tensor" if dtype is None else f"a {dtype} tensor"
        raise PlanError(f"{name} is {described(value)}, must be {kind} {layout}")
    if dtype is not None and value.dtype != dtype:
        raise PlanError(f"{name} is {value.dtype}, must be {dtype}")
    if value.dim() != layout.partition("]")[0].count(",") + 1:
        raise PlanError(f"{name} has shape {tuple(value.shape)}, must be {layout}")


def check_size(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, or one below `least`.

    Raises:
        PlanError: Naming it and the bound.
    """
    # Lengths may be symbolic while torch.compile traces.
    if not (is_index(value) and cast(int, value) >= least):
        raise PlanError(f"{name} is {described(value)}, must be an integer >= {least}")


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyBlocks(_OnDevice):
    """Rows of whole key blocks.

    Attributes:
        block: Keys per block.
        count: [B|1, H|1, R] int32, blocks that row r reads.
        index: [B|1, H|1, R, K] int32, block indices, ascending and unique in the first
            `count` entries; what lies behind them is ignored.
        key_order: [B|1, H|1, num_blocks * block] int32, which key stands at each place of the
            permuted order; -1 is a hole (ragged tiles, text that is not block-aligned).
            None: keys stand in their own order and only the last block may be ragged.
    """

    block: int
    count: Tensor
    index: Tensor
    key_order: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse lists of another dtype or number of axes, and blocks without a size."""
        check_size("KeyBlocks.block", self.block, 1)
        axes = {"count": _ROWS, "index": "[B|1, H|1, R, K]", "key_order": "[B|1, H|1, places]"}
        check_fields(self, torch.int32, axes, optional=("key_order",))

    @property
    def num_rows(self) -> int:
        """R, key rows per head."""
        return self.index.shape[2]

    def num_blocks(self, num_keys: int) -> int:
        """Return the number of blocks that `num_keys` keys and the holes fill."""
        check_size("num_keys", num_keys, 0)
        length = num_keys if self.key_order is None else self.key_order.shape[-1]
        return -(-length // self.block)

    def to_mask(self, num_keys: int) -> Tensor:
        """Return the block mask [B|1, H|1, R, num_blocks] bool."""
        batch, heads, rows, width = self.index.shape
        kept = torch.arange(width, device=self.index.device) < self.count[..., None]
        num_blocks = self.num_blocks(num_keys)
        # Ignored entries are written to a column of their own, which is then cut off.
        column = torch.where(kept, self.index, num_blocks).long()
        mask = torch.zeros(
            batch, heads, rows, num_blocks + 1, dtype=torch.bool, device=column.device
        )
        return mask.scatter_(-1, column, kept)[..., :num_blocks]

    @classmethod
    def from_mask(cls, mask: Tensor, *, block: int, key_order: Tensor | None = None) -> KeyBlocks:
        """Build the lists from a block mask [B|1, H|1, R, num_blocks] bool.

        Raises:
            PlanError: The mask is no such tensor.
        """
        check_tensor("mask", mask, torch.bool, "[B|1, H|1, R, num_blocks]")
        count = mask.sum(-1, dtype=torch.int32)
        # A stable sort of "not kept" moves the kept indices to the front, still ascending.
        index = torch.argsort((~mask).byte(), dim=-1, stable=True).int()
        return cls(block=block, count=count, index=index, key_order=key_order)

    def to_bits(self, num_keys: int) -> Tensor:
        """Return the compact row mask (CRM): int32 words [B|1, H|1, R, ceil(num_blocks / 32)].

        Bit i of word w stands for block 32 * w + i. torch computes little on uint32, so the words
        are int32 with the same bits; `.view(torch.uint32)` reinterprets them.
        """
        mask = self.to_mask(num_keys)
        mask = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % _WORD))
        bits = mask.unflatten(-1, (-1, _WORD)).long()  # [B, H, R, words, 32]
        shifts = torch.arange(_WORD, device=mask.device)
        return (bits << shifts).sum(-1).to(torch.int32)

    @classmethod
    def from_bits(
        cls, words: Tensor, *, block: int, num_keys: int, key_order: Tensor | None = None
    ) -> KeyBlocks:
        """Build the lists from the words that `to_bits` returns.

        Raises:
            PlanError: The words are no such tensor.
        """
        check_tensor("words", words, None, "[B|1, H|1, R, num_words]")
        if words.dtype == torch.uint32:
            words = words.view(torch.int32)
        shifts = torch.arange(_WORD, device=words.device)
        mask = ((words[..., None].long() >> shifts) & 1).bool().flatten(-2)
        length = num_keys if key_order is None else key_order.shape[-1]
        return cls.from_mask(mask[..., : -(-length // block)], block=block, key_order=key_order)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyTokens(_OnDevice):
    """Rows of single keys, as slices of one pool.

    A row is `index[start : start + count]`. Rows may leave slack behind their count, so that fixed
    budgets need no synchronisation, and may share storage: one full row can serve every text tile
    of every head and batch row. A padded [B, H, R, L] list is the constant-stride case.

    Attributes:
        start: [B|1, H|1, R] int64, where row r begins in the pool.
        count: [B|1, H|1, R] int32, keys that row r reads.
        index: [P] int32, the pool of key indices, ascending and unique within a row. An index
            >= num_keys names virtual key `index - num_keys`; virtual keys stand last. Slack repeats
            a listed key, never key 0, which may be padding.
        log_weight: [P] float32, natural log of each entry's weight; None where all are 1.
        extra_k: [B, Hk, E, D], virtual keys in k's dtype; None for none.
        extra_v: [B, Hk, E, D], their values.
        extra_of: [B, Hk, S] int32, the virtual key that stands for each key (-1 for none), so that
            `SparsePlan.refresh` can recompute them as means; None where they are not means.
    """

    start: Tensor
    count: Tensor
    index: Tensor
    log_weight: Tensor | None = None
    extra_k: Tensor | None = None
    extra_v: Tensor | None = None
    extra_of: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse halves of a pair, and lists of another dtype or number of axes."""
        check_fields(self, torch.int64, {"start": _ROWS})
        axes = {"count": _ROWS, "index": "[P]", "extra_of": "[B, Hk, S]"}
        check_fields(self, torch.int32, axes, optional=("extra_of",))
        extra = "[B, Hk, E, D]"
        axes = {"log_weight": "[P]", "extra_k": extra, "extra_v": extra}
        check_fields(self, None, axes, optional=axes)
        if (self.extra_k is None) != (self.extra_v is None):
            raise PlanError("extra_k and extra_v come together: give both or neither")

    @property
    def num_rows(self) -> int:
        """R, key rows per head."""
        return self.start.shape[2]

    @property
    def num_extra(self) -> int:
        """E, virtual keys per KV head."""
        return 0 if self.extra_k is None else self.extra_k.shape[2]

    @classmethod
    def from_lists(
        cls,
        index: Tensor,
        *,
        count: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> KeyTokens:
        """Build the constant-stride case from padded lists.

        Args:
            index: [B|1, H|1, R, L] integer, ascending per row in its first `count` entries.
            count: [B|1, H|1, R] integer; None where every row is L long.
            log_weight: [B|1, H|1, R, L] float32 or None.

        Raises:
            PlanError: These are no such tensors, such as lists of uneven length.
        """
        layout = "[B|1, H|1, R, L] (pad rows to one length and give their own as count)"
        check_tensor("index", index, None, layout)
        if count is not None:
            check_tensor("count", count, None, _ROWS)
        if log_weight is not None:
            check_tensor("log_weight", log_weight, None, layout)
            if log_weight.shape != index.shape:
                raise PlanError(
                    f"log_weight has shape {tuple(log_weight.shape)}, index "
                    f"{tuple(index.shape)}: give a weight for each entry"
                )
        batch, heads, rows, width = index.shape
        device = index.device
        start = torch.arange(batch * heads * rows, device=device) * width
        if count is None:
            count = torch.full((batch, heads, rows), width, device=device)
        return cls(
            start=start.view(batch, heads, rows),
            count=count.int(),
            index=index.reshape(-1).int(),
            log_weight=None if log_weight is None else log_weight.reshape(-1).float(),
        )
