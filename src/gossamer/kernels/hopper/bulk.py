"""K and V as matrices that whole blocks are copied from at once (TMA)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gossamer.plan import KeyBlocks, SparsePlan

_STEP = 128  # keys that the kernel takes at once
_LEAST = 32  # keys per copy: 16 of 16 keys a step take longer than threads that copy rows


class Bulk(NamedTuple):
    """What the kernel takes of K and V for bulk copies.

    Attributes:
        k: Descriptor of a matrix [rows, columns] that holds k's heads above or beside one another.
        v: The same of v.
        row_b: Rows from one batch row to the next.
        row_h: Rows from one KV head to the next; 0 where they lie beside one another.
        col_h: Columns from one KV head to the next.
    """

    k: Any = None
    v: Any = None
    row_b: int = 0
    row_h: int = 0
    col_h: int = 0


def bulk_matrices(k: Tensor, v: Tensor, plan: SparsePlan) -> Bulk:
    """Return the matrices, or none where blocks are not copied whole.

    Args:
        k: [B, Hk, S, D] keys, D dense, rows aligned to 16 bytes.
        v: [B, Hk, S, D] values.
        plan: Blocks of another order, with padding, of fewer than 32 keys or of a size that does
            not divide a step are gathered key by key.
    """
    keys = plan.keys
    if not isinstance(keys, KeyBlocks) or keys.key_order is not None or plan.key_valid is not None:
        return Bulk()
    if keys.block < _LEAST or _STEP % keys.block:
        return Bulk()
    places = _places(k)
    if places is None or places != _places(v):
        return Bulk()
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    row_b, row_h, col_h = places
    layout = gl.NVMMASharedLayout(128, 16, 2)
    block = [keys.block, k.shape[-1]]
    of_k, of_v = (
        TensorDescriptor.from_tensor(_matrix(x, row_b, row_h, col_h), block, layout) for x in (k, v)
    )
    return Bulk(of_k, of_v, row_b, row_h, col_h)


def _places(x: Tensor) -> tuple[int, int, int] | None:
    """Return rows per batch row, and rows and columns per head; None where x is no matrix."""
    batch, head, row, _ = x.stride()
    if row == 0 or batch % row:
        return None
    if head % row == 0:
        return batch // row, head // row, 0
    beside = head * (x.shape[1] - 1) + x.shape[3] <= row
    return (batch // row, 0, head) if beside else None


def _matrix(x: Tensor, row_b: int, row_h: int, col_h: int) -> Tensor:
    batch, heads, length, dim = x.shape
    rows = (batch - 1) * row_b + (heads - 1) * row_h + length
    return x.as_strided((rows, (heads - 1) * col_h + dim), (x.stride(2), 1))
