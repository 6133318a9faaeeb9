"""WaveAlign on a GPU; `order.wavealign.WaveAlign` is its entry.

The lists become a mask of tiles and key blocks once, a byte an entry: with T tiles and C blocks T C
bytes a head (8 MB at 364K tokens and blocks of 128), held for as many heads at once as fit a bound.
Products read it from the L2 cache in whole rows, where the lists (4 bytes an entry, at a density of
20% as many) would need gathers, and their transpose atomics or a second list by block. A bit an
entry would do for blocks alone: of single keys a mask holds how many of each block a tile reads.

Nothing here waits for the device. Orders take 2 launches an iteration and some 20 others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.group.gpu.available import runs_triton
from gossamer.plan import KeyBlocks, SparsePlan
from gossamer.plan.rows import expand

_MASK_BYTES = 256 << 20  # of the masks held at once, and the most of one head
_COLUMNS = 32  # that a program of `transpose` sums: a sector of memory of each row

# By the machine code: loads of 16 bytes a thread, and at 364K tokens and 4 heads all programs of a
# product resident at once on 132 SMs. One warp a program needs no barriers. An order then takes an
# H200 .47 ms; other sizes were not tried.
_CONSTANTS: dict[str, dict[str, int]] = {
    "mark": {"STEP": 256, "num_warps": 2},
    "count": {"STEP": 1024, "num_warps": 4},
    "start": {"STEP": 256, "num_warps": 4},
    "multiply": {"TILES": 8, "STEP": 512, "num_warps": 1},
    "transpose": {"TILES": 128, "COLUMNS": _COLUMNS, "STEP": 1024, "num_warps": 8},
    "place": {"STEP": 1024, "num_warps": 8},
    "arrange": {"STEP": 1024, "num_warps": 8},
}
KERNELS = tuple(_CONSTANTS)


def takes(plan: SparsePlan, num_columns: int, rank: int) -> bool:
    """Return whether the kernels order a plan of `num_columns` key blocks by `rank` columns."""
    size = plan.num_tiles * num_columns
    return rank == 2 and 0 < size <= _MASK_BYTES and runs_triton(plan.keys.count)


def configuration(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a kernel by name, and its constants and options."""
    from gossamer.order.gpu import masks, subspace

    # Triton's types do not know that a kernel takes a grid.
    kernel: Any = getattr(masks if name in ("mark", "count") else subspace, name)
    return kernel, {**_CONSTANTS[name], "enable_fp_fusion": True}


def launch_order(
    plan: SparsePlan,
    shape: tuple[int, int],
    *,
    num_columns: int,
    block: int,
    iters: int,
    salt: int,
    dependent: float,
    wave: int,
) -> Tensor:
    """Return the launch order of a plan that `takes` says it takes, [B, H, T] int32.

    Args:
        plan: The plan.
        shape: (B, H) of its lists and tiles.
        num_columns: C, key blocks that the mask counts.
        block: Keys of each, where the plan lists single keys.
        iters: Iterations.
        salt: Of the columns that they start from.
        dependent: Share of a column left by orthogonalising that is rounding.
        wave: Tiles that run at once.
    """
    lists = _Lists(plan, shape, num_columns, block)
    num_lines, num_tiles = lists.number.shape
    order = torch.empty_like(lists.number)
    at_once = max(1, _MASK_BYTES // (num_tiles * lists.padded))
    with torch.cuda.device_of(order):  # Triton launches on the current device; a CPU has none
        for low in range(0, num_lines, at_once):
            part = slice(low, low + at_once)
            number = lists.number[part]
            first, second = embed(lists.mask(part), number, iters, salt, dependent)
            angle = torch.atan2(second, first).masked_fill_(number == 0, torch.inf)
            order[part] = _in_waves(angle, number, wave)
    return order.view(*shape, num_tiles)


class _Lists:
    """The lists of a plan, each head of each batch row (line) with tensors of its own.

    Attributes:
        number: [B * H, T] int32, entries that each tile reads; 0 for tiles that take no part.
        padded: P, columns of the masks: C and some that are 0.
    """

    def __init__(
        self, plan: SparsePlan, shape: tuple[int, int], num_columns: int, block: int
    ) -> None:
        keys = self._keys = plan.keys
        self._shape, self._num_keys, self._block = shape, plan.num_keys, block
        self.padded = -(-num_columns // _COLUMNS) * _COLUMNS
        count = expand(keys.count, *shape)
        if plan.tile_row is None:
            self._row, number = None, count[..., : plan.num_tiles]
        else:
            row = expand(plan.tile_row, *shape)
            self._row, number = _by_line(row), count.gather(2, row.long())
        if plan.query_index is not None:  # a tile may hold no query
            number = number * expand((plan.query_index >= 0).any(-1), *shape)
        self.number = _by_line(number)

    def mask(self, part: slice) -> Tensor:
        """Return the masks of some lines, [x, T, P] uint8: how many keys or blocks each tile reads.

        0 for tiles that take no part.
        """
        keys, number = self._keys, self.number[part]
        row = None if self._row is None else self._row[part]
        num_lines, num_tiles = number.shape
        size = (num_lines, num_tiles, self.padded)
        grid = (num_tiles, num_lines)
        if isinstance(keys, KeyBlocks):
            mask = torch.zeros(size, dtype=torch.uint8, device=number.device)
            index = expand(keys.index.contiguous(), *self._shape)
            kernel, constants = configuration("mark")
            kernel[grid](
                *(index, row, number, mask),
                *(*index.stride()[:2], part.start, self._shape[1]),
                *(num_tiles, index.shape[3], self.padded),
                **constants,
            )
            return mask
        mask = torch.empty(size, dtype=torch.uint8, device=number.device)
        begin = _by_line(expand(keys.start, *self._shape))[part]
        longest = max(1, self._num_keys + keys.num_extra)
        kernel, constants = configuration("count")
        kernel[grid](
            *(keys.index.contiguous(), begin, row, number, mask),
            *(num_tiles, begin.shape[1], self.padded, 1 << (longest.bit_length() - 1)),
            BLOCK=self._block,
            **constants,
        )
        return mask


def embed(mask: Tensor, number: Tensor, iters: int, salt: int, dependent: float) -> Tensor:
    """Return the two leading left singular vectors of the centred masks, [2, x, T] float32.

    As `_Masks.embed` for rank 2, up to rounding: products are float32 sums, columns are made
    orthonormal in float64. The last step's columns are not made orthonormal before they are
    multiplied, since Gram-Schmidt of the products removes the same triangular factor. The vectors
    of a head are 0 where all tiles that take part read the same, or fewer than 3 do.

    Args:
        mask: [x, T, P] uint8.
        number: [x, T] int32, 0 for tiles that take no part; what these get means nothing.
        iters: Iterations, at least 1.
        salt: Of the columns to start from.
        dependent: Share of a column left by orthogonalising that is rounding.
    """
    num_lines, num_tiles, padded = mask.shape
    right = torch.empty(num_lines, 2, padded, dtype=torch.float32, device=mask.device)
    product = right.new_empty(num_lines, 2, num_tiles)
    points = right.new_empty(2, num_lines, num_tiles)
    start, constants = configuration("start")
    start[(-(-padded // constants["STEP"]), num_lines)](right, salt, padded, **constants)
    multiply, of_multiply = configuration("multiply")
    transpose, of_transpose = configuration("transpose")
    by_tile = (-(-num_tiles // of_multiply["TILES"]), num_lines)
    by_column = (padded // _COLUMNS, num_lines)
    for _ in range(iters):
        multiply[by_tile](mask, right, product, num_tiles, padded, **of_multiply)
        transpose[by_column](
            *(mask, product, number, right, num_tiles, padded),
            DEPENDENT=dependent,
            **of_transpose,
        )
    multiply[by_tile](mask, right, product, num_tiles, padded, **of_multiply)
    place, constants = configuration("place")
    place[(-(-num_tiles // constants["STEP"]), num_lines)](
        product, number, points, num_tiles, DEPENDENT=dependent, **constants
    )
    return points


def _in_waves(angle: Tensor, number: Tensor, wave: int) -> Tensor:
    """Return the order [x, T] int32 of tiles by angle, in waves by descending number.

    Args:
        angle: [x, T] float32, infinite for tiles that take no part.
        number: [x, T] int32, 0 for these.
        wave: Tiles that run at once.
    """
    num_lines, num_tiles = angle.shape
    angle, by = angle.sort(dim=-1, stable=True)
    tile = torch.empty_like(number)
    key = torch.empty_like(by)
    arrange, constants = configuration("arrange")
    arrange[(num_lines,)](angle, by, number, tile, key, num_tiles, wave, **constants)
    return tile.gather(1, key.argsort(dim=-1, stable=True))


def _by_line(x: Tensor) -> Tensor:
    """Return [B, H, n] as [B * H, n], contiguous."""
    return x.reshape(-1, x.shape[2]).contiguous()
