"""The keys of highest score, ascending, without a sort: two passes over a row by one program."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.group.gpu import ranks
from gossamer.group.gpu.ranks import level_of_rank, load_ordered

_WARPS = 8


@triton.jit(do_not_specialize=("width",))
def _list_top(
    score_ptr,
    count_ptr,
    index_ptr,
    scratch_ptr,
    length,
    width,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """List the best keys of one row; the level that parts them first, then the keys in order."""
    number = tl.program_id(0).to(tl.int64)
    row = score_ptr + number * length
    index_row = index_ptr + number * width
    count = tl.minimum(tl.load(count_ptr + number).to(tl.int32), width)
    scratch = scratch_ptr + number * CAPACITY
    level, above = level_of_rank(
        row, length, tl.maximum(count, 1), scratch, BLOCK, SAMPLE, CAPACITY
    )
    left = count - above  # of the keys that equal the level, the first so many
    step = tl.arange(0, BLOCK)
    last = tl.zeros([BLOCK], tl.int32)
    listed = 0
    ties = 0
    for start in range(0, length, BLOCK):
        at = start + step
        mask = at < length
        key = load_ordered(row, at, mask)
        is_above = mask & (key > level)
        is_tie = mask & (key == level)
        # One scan counts both: neither exceeds a step, which 16 bits hold.
        scan = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), 0)
        tie = ties + (scan >> 16)
        keep = is_above | (is_tie & (tie <= left))
        place = listed + (scan & 0xFFFF) + tl.minimum(tie, left) - 1
        tl.store(index_row + place, at, mask=keep & (place < width))
        last = tl.maximum(last, tl.where(keep, at, 0))
        total = tl.max(scan, 0)  # the last one, as neither half ever falls
        listed += total & 0xFFFF
        ties += total >> 16
    greatest = tl.max(last, 0)
    for start in range(count, width, BLOCK):
        at = start + step
        tl.store(index_row + at, at * 0 + greatest, mask=at < width)


def top_keys(score: Tensor, count: Tensor, width: int) -> Tensor:
    """Return the keys of highest score, ascending; as `select.exact.top_keys`.

    Waits for nothing and allocates, beside the result, 32 KiB a row where rows are long.

    Args:
        score: [..., S] float32.
        count: [...] integer.
        width: L, at most S.

    Returns:
        [..., L] int32.
    """
    score = score.contiguous()
    length = score.shape[-1]
    rows = score.shape[:-1].numel()
    index = torch.empty(*score.shape[:-1], width, dtype=torch.int32, device=score.device)
    if rows and width:
        room = rows * ranks.CAPACITY if length > ranks.CAPACITY else 1
        scratch = torch.empty(room, dtype=torch.int32, device=score.device)
        kernel: Any = _list_top  # Triton's types do not know that it takes a grid
        kernel[(rows,)](
            score,
            count.expand(score.shape[:-1]).contiguous(),
            index,
            scratch,
            length,
            width,
            BLOCK=ranks.BLOCK,
            SAMPLE=ranks.SAMPLE,
            CAPACITY=ranks.CAPACITY,
            num_warps=_WARPS,
        )
    return index
