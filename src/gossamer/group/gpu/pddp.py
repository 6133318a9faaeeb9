"""Fast PDDP on a GPU: the levels of `group.pddp` in a few launches each, for all heads and groups.

Power iteration by reading the tokens, as on a CPU, would read them 17 times a level: at 12 heads x
75,600 tokens x 128 in bfloat16 one read of 232 MB takes an H200 55 us, so ten levels 9 ms. Here a
level reads them at most twice. The first pass sums each group's second moments on the tensor cores
(30 GFLOP a level), and the power iteration runs on these 128 x 128 numbers; the second pass
projects. Below the first level it is enough to sum the left half of every group: the right half has
what is missing. A balanced split needs the value of one rank and no sort (`gpu.cut`), and many
programs share a large group. Small groups do all of this in one program, whose second read the
cache serves.

Inside a tile tokens keep their order, where the CPU's stand by projection: what a tile holds is the
same. The moments are of tokens less a common shift, rounded to their dtype, so that directions
carry its rounding: tokens next to a cut may fall on its other side.
"""

# pyright: basic

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gossamer.group.gpu import pddp_kernels

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 128
_MIN_DOT = 16  # the least side of a matrix product on tensor cores
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_STEP = 32  # tokens per step: 64 take more registers than let two programs share a multiprocessor
# Tokens per program of the moments: 22 programs for each of 12 heads of 75,600 tokens are two for
# each of 132 multiprocessors. What a program sums depends on no other row.
_MOMENT_SPAN = 3424
_PROJECT_SPAN = 256
_PROJECT_STEP = 64
_SMALL = 4096  # tokens of a group that one program splits
_SMALL_BLOCK = 1024  # of them, reordered at once
_LEAST_CAPACITY = 256  # tokens that a program of the smallest groups has registers for
_SHIFT_SAMPLE = 128  # tokens whose mean is taken from all
_BINS = 2048  # of projections: 0.08% of normal ones in the fullest
_MEMBERS = 4096  # values of one bin that are listed
_PART_BLOCK = 2048  # tokens that a program of a large group reorders
_CHUNKS = 64  # counts of such programs added in one step

_WARPS = {"shift": 4, "project": 4}  # 8 elsewhere
# Stages of the loops over tokens: of two loads, one finds where the other reads, so that a third of
# the stages are tokens on their way.
_STAGES = {"moments": 5, "split": 5, "project": 3, "axis": 3}
KERNELS = {
    "shift": pddp_kernels.shift_kernel,
    "moments": pddp_kernels.moments_kernel,
    "axis": pddp_kernels.axis_kernel,
    "project": pddp_kernels.project_kernel,
    "gather": pddp_kernels.gather_kernel,
    "part": pddp_kernels.part_kernel,
    "split": pddp_kernels.split_kernel,
}


def configuration(
    name: str, dim: int, dtype: torch.dtype, *, wide: bool = False, most: int = _SMALL
) -> tuple[Any, dict[str, Any]]:
    """Return a kernel by name, and its constants and options.

    128 registers a thread let two programs share a multiprocessor, so that one loads while the
    other iterates. `most` is the number of tokens of the largest group that one program splits.
    """
    capacity = max(_LEAST_CAPACITY, triton.next_power_of_2(most))
    all_constants = {
        "STEP": _PROJECT_STEP if name == "project" else _STEP,
        "PROJECT_STEP": _PROJECT_STEP,
        "D": dim,
        "DP": max(_MIN_DOT, triton.next_power_of_2(dim)),
        "WIDE": wide,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK": min(_SMALL_BLOCK, capacity) if name == "split" else _PART_BLOCK,
        "SAMPLE": _SHIFT_SAMPLE,
        "BINS": _BINS,
        "CAPACITY": capacity if name == "split" else _MEMBERS,
        "CHUNKS": _CHUNKS,
        "STAGES": _STAGES.get(name, 1),
    }
    kernel: Any = KERNELS[name]  # Triton's types do not know that it takes a grid
    constants = {key: all_constants[key] for key in all_constants if key in kernel.arg_names}
    options: dict[str, Any] = {"num_warps": _WARPS.get(name, 8), "enable_fp_fusion": True}
    options["num_stages"] = _STAGES.get(name, 1)
    if name in ("moments", "split") and torch.version.hip is None:
        options["maxnreg"] = 128
    return kernel, {**constants, **options}


def takes(x: Tensor) -> bool:
    """Return whether the kernels take tokens [B, H, N, D] of this dtype and width."""
    return x.dtype in DTYPES and x.shape[3] <= MAX_DIM


def order_tokens(
    x: Tensor, order: Tensor, tokens: Tensor, *, tile: int, start: Tensor, iterations: int
) -> Tensor:
    """Order the tokens of all heads; as `group.pddp.pddp`.

    Waits for nothing. The plan of a row depends on nothing but the row.

    Args:
        x: [B, H, N, D] tokens, bfloat16, float16 or float32.
        order: [R, P] int32, the tokens of each of B * H rows, those that count first; P is N up to
            a multiple of the tile.
        tokens: [R] int32, how many count.
        tile: Tokens per tile.
        start: [D] float32, the direction from which power iteration starts.
        iterations: Power iterations per level.

    Returns:
        [R, P] int32.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    heads, dim = x.shape[1], x.shape[3]
    rows, places = order.shape
    num_tiles = places // tile
    width = max(_MIN_DOT, triton.next_power_of_2(dim))
    order, into = (order.clone(memory_format=torch.contiguous_format) for _ in range(2))
    shift = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    along = torch.empty(rows, places, dtype=torch.float32, device=x.device)
    strides = x.stride()[:3]
    wide = x.shape[2] * x.stride(2) >= _WIDE

    def launch(name: str, programs: int, *arguments: Tensor | int, most: int = _SMALL) -> None:
        kernel, options = configuration(name, dim, x.dtype, wide=wide, most=most)
        kernel[(programs,)](*arguments, **options)

    launch("shift", rows, x, order, tokens, shift, *strides, heads, places)
    largest = [-(-num_tiles >> depth) * tile for depth in range((num_tiles - 1).bit_length())]
    shared = [most for most in largest if most > _SMALL]
    scratch = _Scratch(rows, width, shared, x.device) if shared else None
    for depth, most in enumerate(largest):
        groups = rows << depth
        if scratch is None or depth >= len(shared):
            launch(
                "split",
                groups,
                *(x, order, into, along, tokens, shift, start),
                *(*strides, heads, places, tile, depth, iterations),
                most=most,
            )
        else:
            chunks, chunk = _moment_chunks(most, depth)
            launch(
                "moments",
                (rows << max(0, depth - 1)) * chunks,
                *(x, order, tokens, shift, scratch.moment, scratch.total),
                *(*strides, heads, places, tile, depth, chunks, chunk),
            )
            parent, whole = scratch.whole[depth % 2], scratch.whole[1 - depth % 2]
            axis, bins, number = scratch.axis, scratch.bins, scratch.number
            launch(
                "axis",
                groups,
                *(tokens, scratch.moment, scratch.total, parent, whole, start, axis, bins),
                *(scratch.histogram, number, tile, depth, chunks, iterations),
            )
            chunks = -(-most // _PROJECT_SPAN)
            launch(
                "project",
                groups * chunks,
                *(x, order, tokens, shift, axis, bins, scratch.histogram, along),
                *(*strides, heads, places, tile, depth, chunks, _PROJECT_SPAN),
            )
            chunks = -(-most // _PART_BLOCK)
            size = (places, tile, depth, chunks)
            launch(
                "gather",
                groups * chunks,
                *(along, tokens, bins, scratch.histogram),
                *(scratch.member, number, scratch.above, *size),
            )
            launch(
                "part",
                groups * chunks,
                *(order, into, along, tokens, scratch.member, number, scratch.above, *size),
            )
        order, into = into, order
    return order


class _Scratch:
    """Room for the levels whose groups many programs share; every level uses it anew.

    Attributes:
        moment: [programs, DP, DP] float32, of chunks; DP is the width.
        total: [programs, DP] float32.
        whole: Two of [groups, DP + 1, DP] float32: moments and sum of groups, and of their parents.
        axis: [groups, DP] float32.
        bins: [groups, 2] float32, where the bins of projections begin and how many are in a unit.
        histogram: [groups, BINS] int32.
        member: [groups, 2, MEMBERS] int32.
        number: [groups] int32, values in the bin that is cut.
        above: [groups, chunks] int32.
    """

    def __init__(self, rows: int, width: int, largest: list[int], device: torch.device) -> None:
        """Take the number of rows, and the tokens of each level's largest group."""
        groups = rows << (len(largest) - 1)
        programs = max(
            (rows << max(0, depth - 1)) * _moment_chunks(most, depth)[0]
            for depth, most in enumerate(largest)
        )
        chunks = max(-(-most // _PART_BLOCK) << depth for depth, most in enumerate(largest))

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def integers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        self.moment, self.total = floats(programs, width, width), floats(programs, width)
        self.whole = [floats(groups, width + 1, width) for _ in range(2)]
        self.axis, self.bins = floats(groups, width), floats(groups, 2)
        self.histogram, self.member = integers(groups, _BINS), integers(groups, 2, _MEMBERS)
        self.number, self.above = integers(groups), integers(rows * chunks)


def _moment_chunks(number: int, depth: int) -> tuple[int, int]:
    """Return into how many chunks the moments of a group are cut, and how many tokens are in one.

    Below the first level only half of the tokens are summed, by as many programs.
    """
    span = _MOMENT_SPAN if depth == 0 else _MOMENT_SPAN // 2
    chunks = max(1, number // span)
    return chunks, -(-number // (chunks * _STEP)) * _STEP
