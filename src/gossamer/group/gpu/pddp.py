"""Fast PDDP on a GPU: the levels of `group.pddp` in a few launches each, for all heads and groups.

Power iteration by reading the tokens, as on a CPU, would read them 17 times a level: at 12 heads x
75,600 tokens x 128 in bfloat16 one read of 232 MB takes an H200 55 us, so ten levels 9 ms. Here a
level reads them twice. The first pass sums each group's second moments on the tensor cores (30
GFLOP a level), and the power iteration runs on these 128 x 128 numbers; the second pass projects. A
balanced split needs the value of one rank and no sort. Small groups do all of this in one program,
whose second read the cache serves.

Inside a tile tokens keep their order, where the CPU's stand by projection: what a tile holds is the
same. The moments are of tokens less a common shift, rounded to their dtype, so that directions
carry its rounding: tokens next to a cut may fall on its other side.
"""

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
from gossamer.group.gpu.ranks import level_in_registers, level_of_rank, load_ordered

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 128
_MIN_DOT = 16  # the least side of a matrix product on tensor cores
_WIDE = 1 << 31  # elements of a head from which offsets need 64 bits
_STEP = 32  # tokens per step: 64 take more registers than let two programs share a multiprocessor
_MOMENT_SPAN = 4096  # tokens per program of the moments: two programs a multiprocessor
_PROJECT_SPAN = 512
_SMALL = 4096  # tokens of a group that one program splits
_SMALL_BLOCK = 1024  # of them, reordered at once
_PLAIN = ("heads", "depth", "chunks", "iterations")  # one compilation, whether they are 1 or 16
_SHIFT_SAMPLE = 128  # tokens whose mean is taken from all


@triton.jit
def _group(path, depth, tokens, tile):
    """Return where the tokens of a group begin and end, and how many tiles they fill.

    The bits of `path` say from the first cut on whether the group lies left (0) or right (1); a
    group of one tile is its own left part, and its right part is empty.
    """
    first = 0
    stop = (tokens + tile - 1) // tile
    for level in range(depth):
        middle = first + (stop - first + 1) // 2
        is_right = (path >> (depth - 1 - level)) & 1
        first = tl.where(is_right != 0, middle, first)
        stop = tl.where(is_right != 0, stop, middle)
    return first * tile, tl.minimum(stop * tile, tokens), stop - first


@triton.jit
def _load_tokens(x_row, token, mask, x_n, D: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of D elements, 0 where masked."""
    dim = tl.arange(0, DP)
    if WIDE:
        token = token.to(tl.int64)
    at = x_row + token[:, None] * x_n + dim[None, :]
    if D != DP:
        return tl.load(at, mask=mask[:, None] & (dim < D)[None, :], other=0.0)
    else:
        return tl.load(at, mask=mask[:, None], other=0.0)


@triton.jit
def _add_moments(
    x_row,
    order_row,
    shift,
    begin,
    end,
    x_n,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the second moments [DP, DP] and the sum [DP] of the shifted tokens begin … end."""
    lane = tl.arange(0, STEP)
    moment = tl.zeros([DP, DP], tl.float32)
    # Sums are a product too: 16 equal columns take fewer registers than a sum of each row.
    ones = tl.full([STEP, 16], 1.0, x_row.dtype.element_ty)
    total = tl.zeros([DP, 16], tl.float32)
    for start in range(begin, end, STEP):
        mask = start + lane < end
        token = tl.load(order_row + start + lane, mask=mask, other=0)
        x = _load_tokens(x_row, token, mask, x_n, D, DP, WIDE)
        near = tl.where(mask[:, None], x.to(tl.float32) - shift[None, :], 0.0).to(x.dtype)
        moment = tl.dot(tl.trans(near), near, moment, input_precision=PRECISION)
        total = tl.dot(tl.trans(near), ones, total, input_precision=PRECISION)
    return moment, tl.sum(total, 1) / 16


@triton.jit
def _principal(moment, total, number, start_ptr, iterations, D: tl.constexpr, DP: tl.constexpr):
    """Return the principal direction [DP] by power iteration, 0 where tokens are equal."""
    dim = tl.arange(0, DP)
    axis = tl.load(start_ptr + dim, mask=dim < D, other=0.0)
    mean = total / tl.maximum(number, 1).to(tl.float32)
    for _ in range(iterations):
        product = tl.sum(moment * axis[None, :], 1) - total * tl.sum(mean * axis, 0)
        length = tl.sqrt(tl.sum(product * product, 0))
        axis = product / tl.maximum(length, 1e-12)
    return axis


@triton.jit
def _project(
    x_row,
    order_row,
    along_row,
    shift,
    axis,
    begin,
    end,
    x_n,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
):
    """Write the negative projections of the tokens begin … end.

    In float32 and with the same additions for every token, so that equal tokens tie exactly.
    """
    lane = tl.arange(0, STEP)
    for start in range(begin, end, STEP):
        mask = start + lane < end
        token = tl.load(order_row + start + lane, mask=mask, other=0)
        x = _load_tokens(x_row, token, mask, x_n, D, DP, WIDE).to(tl.float32)
        along = tl.sum((x - shift[None, :]) * axis[None, :], 1)
        tl.store(along_row + start + lane, -along, mask=mask)


@triton.jit
def _part(order_row, into_row, along_row, begin, end, cut, level, above, BLOCK: tl.constexpr):
    """Put the `cut` tokens of least projection in front, each side in the order it had.

    `level` parts them, of whose negative projections `above` are greater.
    """
    number = end - begin
    left = cut - above  # of the tokens that equal the level, the first so many
    step = tl.arange(0, BLOCK)
    listed = 0
    ties = 0
    for start in range(0, number, BLOCK):
        at = start + step
        mask = at < number
        key = load_ordered(along_row + begin, at, mask)
        token = tl.load(order_row + begin + at, mask=mask, other=0)
        is_above = mask & (key > level)
        is_tie = mask & (key == level)
        scan = tl.cumsum(is_above.to(tl.int32) + (is_tie.to(tl.int32) << 16), 0)
        tie = ties + (scan >> 16)
        keep = is_above | (is_tie & (tie <= left))
        kept = listed + (scan & 0xFFFF) + tl.minimum(tie, left)  # up to here, this one included
        place = tl.where(keep, kept - 1, cut + at - kept)
        tl.store(into_row + begin + place, token, mask=mask)
        total = tl.max(scan, 0)  # the last one, as neither half ever falls
        listed += total & 0xFFFF
        ties += total >> 16


@triton.jit
def _copy(order_row, into_row, begin, end, BLOCK: tl.constexpr):
    """Copy the order of tokens that are not split."""
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(order_row + at, mask=at < end, other=0)
        tl.store(into_row + at, token, mask=at < end)


@triton.jit(do_not_specialize=_PLAIN)
def _shift_kernel(
    x_ptr,
    order_ptr,
    tokens_ptr,
    shift_ptr,
    x_b,
    x_h,
    x_n,
    heads,
    places,
    SAMPLE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
):
    """Write the mean of some tokens of each row, evenly spaced: what is taken from all of them."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.load(tokens_ptr + row)
    lane = tl.arange(0, SAMPLE)
    at = (lane.to(tl.int64) * tokens // SAMPLE).to(tl.int32)
    mask = at < tokens
    token = tl.load(order_ptr + row * places + at, mask=mask, other=0)
    x_row = x_ptr + row // heads * x_b + row % heads * x_h
    x = _load_tokens(x_row, token, mask, x_n, D, DP, WIDE).to(tl.float32)
    dim = tl.arange(0, DP)
    tl.store(shift_ptr + row * DP + dim, tl.sum(x, 0) / SAMPLE)


@triton.jit(do_not_specialize=_PLAIN)
def _moments_kernel(
    x_ptr,
    order_ptr,
    tokens_ptr,
    shift_ptr,
    moment_ptr,
    sum_ptr,
    x_b,
    x_h,
    x_n,
    heads,
    places,
    tile,
    depth,
    chunks,
    chunk,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the moments of one chunk of one group."""
    program = tl.program_id(0).to(tl.int64)
    group = program // chunks
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    if num_tiles > 1:
        begin += (program % chunks).to(tl.int32) * chunk
        end = tl.minimum(end, begin + chunk)
        dim = tl.arange(0, DP)
        x_row = x_ptr + row // heads * x_b + row % heads * x_h
        shift = tl.load(shift_ptr + row * DP + dim)
        moment, total = _add_moments(
            x_row, order_ptr + row * places, shift, begin, end, x_n, STEP, D, DP, WIDE, PRECISION
        )
        at = program * DP + dim
        tl.store(moment_ptr + at[:, None] * DP + dim[None, :], moment)
        tl.store(sum_ptr + at, total)


@triton.jit(do_not_specialize=_PLAIN)
def _axis_kernel(
    tokens_ptr,
    moment_ptr,
    sum_ptr,
    start_ptr,
    axis_ptr,
    tile,
    depth,
    chunks,
    iterations,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Write the principal direction of one group."""
    group = tl.program_id(0).to(tl.int64)
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + (group >> depth)), tile)
    if num_tiles > 1:
        dim = tl.arange(0, DP)
        moment = tl.zeros([DP, DP], tl.float32)
        total = tl.zeros([DP], tl.float32)
        for chunk in range(chunks):
            at = (group * chunks + chunk) * DP + dim
            moment += tl.load(moment_ptr + at[:, None] * DP + dim[None, :])
            total += tl.load(sum_ptr + at)
        axis = _principal(moment, total, end - begin, start_ptr, iterations, D, DP)
        tl.store(axis_ptr + group * DP + dim, axis)


@triton.jit(do_not_specialize=_PLAIN)
def _project_kernel(
    x_ptr,
    order_ptr,
    tokens_ptr,
    shift_ptr,
    axis_ptr,
    along_ptr,
    x_b,
    x_h,
    x_n,
    heads,
    places,
    tile,
    depth,
    chunks,
    chunk,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
):
    """Project one chunk of one group, the last ones first: the cache may still hold them."""
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    group = program // chunks
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    if num_tiles > 1:
        begin += (program % chunks).to(tl.int32) * chunk
        end = tl.minimum(end, begin + chunk)
        dim = tl.arange(0, DP)
        x_row = x_ptr + row // heads * x_b + row % heads * x_h
        shift = tl.load(shift_ptr + row * DP + dim)
        axis = tl.load(axis_ptr + group * DP + dim)
        at = row * places
        _project(
            x_row, order_ptr + at, along_ptr + at, shift, axis, begin, end, x_n, STEP, D, DP, WIDE
        )


@triton.jit(do_not_specialize=_PLAIN)
def _part_kernel(
    order_ptr,
    into_ptr,
    along_ptr,
    tokens_ptr,
    scratch_ptr,
    places,
    tile,
    depth,
    BLOCK: tl.constexpr,
    SAMPLE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Split one group by its projections."""
    group = tl.program_id(0).to(tl.int64)
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    at = row * places
    if num_tiles > 1:
        cut = (num_tiles + 1) // 2 * tile
        along_row = along_ptr + at
        scratch = scratch_ptr + group * CAPACITY
        level, above = level_of_rank(
            along_row + begin, end - begin, cut, scratch, BLOCK, SAMPLE, CAPACITY
        )
        _part(order_ptr + at, into_ptr + at, along_row, begin, end, cut, level, above, BLOCK)
    else:
        _copy(order_ptr + at, into_ptr + at, begin, end, BLOCK)


@triton.jit(do_not_specialize=_PLAIN)
def _split_kernel(
    x_ptr,
    order_ptr,
    into_ptr,
    along_ptr,
    tokens_ptr,
    shift_ptr,
    start_ptr,
    x_b,
    x_h,
    x_n,
    heads,
    places,
    tile,
    depth,
    iterations,
    STEP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Split one group that fits CAPACITY tokens: moments, direction, projections and order."""
    group = tl.program_id(0).to(tl.int64)
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    at = row * places
    order_row = order_ptr + at
    if num_tiles > 1:
        x_row = x_ptr + row // heads * x_b + row % heads * x_h
        shift = tl.load(shift_ptr + row * DP + tl.arange(0, DP))
        moment, total = _add_moments(
            x_row, order_row, shift, begin, end, x_n, STEP, D, DP, WIDE, PRECISION
        )
        axis = _principal(moment, total, end - begin, start_ptr, iterations, D, DP)
        along_row = along_ptr + at
        _project(x_row, order_row, along_row, shift, axis, begin, end, x_n, STEP, D, DP, WIDE)
        tl.debug_barrier()  # other threads wrote what this one reads
        cut = (num_tiles + 1) // 2 * tile
        level, above = level_in_registers(along_row + begin, end - begin, cut, CAPACITY)
        _part(order_row, into_ptr + at, along_row, begin, end, cut, level, above, BLOCK)
    else:
        _copy(order_row, into_ptr + at, begin, end, BLOCK)


_WARPS = {"shift": 4, "project": 4, "part": 16}  # 8 elsewhere
KERNELS = {
    "shift": _shift_kernel,
    "moments": _moments_kernel,
    "axis": _axis_kernel,
    "project": _project_kernel,
    "part": _part_kernel,
    "split": _split_kernel,
}


def configuration(
    name: str, dim: int, dtype: torch.dtype, *, wide: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Return a kernel by name, and its constants and options.

    128 registers a thread let two programs share a multiprocessor, so that one loads while the
    other iterates.
    """
    all_constants = {
        "STEP": _STEP,
        "D": dim,
        "DP": max(_MIN_DOT, triton.next_power_of_2(dim)),
        "WIDE": wide,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK": _SMALL_BLOCK if name == "split" else ranks.BLOCK,
        "SAMPLE": _SHIFT_SAMPLE if name == "shift" else ranks.SAMPLE,
        "CAPACITY": _SMALL if name == "split" else ranks.CAPACITY,
    }
    kernel: Any = KERNELS[name]  # Triton's types do not know that it takes a grid
    constants = {key: all_constants[key] for key in all_constants if key in kernel.arg_names}
    options: dict[str, Any] = {"num_warps": _WARPS.get(name, 8), "enable_fp_fusion": True}
    options["num_stages"] = 2 if name == "split" else 3  # a third would spill
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
    device = x.device
    num_tiles = places // tile
    width = max(_MIN_DOT, triton.next_power_of_2(dim))
    order, into = order.contiguous(), order.clone(memory_format=torch.contiguous_format)
    as_float: dict[str, Any] = {"dtype": torch.float32, "device": device}
    shift = torch.empty(rows, width, **as_float)
    along = torch.empty(rows, places, **as_float)
    strides = x.stride()[:3]
    wide = x.shape[2] * x.stride(2) >= _WIDE

    def launch(name: str, programs: int, *arguments: Tensor | int) -> None:
        kernel, options = configuration(name, dim, x.dtype, wide=wide)
        kernel[(programs,)](*arguments, **options)

    launch("shift", rows, x, order, tokens, shift, *strides, heads, places)
    for depth in range((num_tiles - 1).bit_length()):
        groups = rows << depth
        most = -(-num_tiles >> depth) * tile  # tokens of the largest group
        if most <= _SMALL:
            launch(
                "split",
                groups,
                *(x, order, into, along, tokens, shift, start),
                *(*strides, heads, places, tile, depth, iterations),
            )
        else:
            chunks, chunk = _chunks(most, _MOMENT_SPAN)
            moment = torch.empty(groups * chunks, width, width, **as_float)
            total = torch.empty(groups * chunks, width, **as_float)
            axis = torch.empty(groups, width, **as_float)
            size = (tile, depth, chunks)
            launch(
                "moments",
                groups * chunks,
                *(x, order, tokens, shift, moment, total, *strides, heads, places, *size, chunk),
            )
            launch("axis", groups, tokens, moment, total, start, axis, *size, iterations)
            chunks, chunk = _chunks(most, _PROJECT_SPAN)
            launch(
                "project",
                groups * chunks,
                *(x, order, tokens, shift, axis, along, *strides, heads, places),
                *(tile, depth, chunks, chunk),
            )
            scratch = torch.empty(groups * ranks.CAPACITY, dtype=torch.int32, device=device)
            launch("part", groups, order, into, along, tokens, scratch, places, tile, depth)
        order, into = into, order
    return order


def _chunks(number: int, span: int) -> tuple[int, int]:
    """Return into how many chunks some tokens are cut, and how many are in one: about a span."""
    chunks = max(1, round(number / span))
    steps = -(-number // (chunks * _STEP))
    return chunks, steps * _STEP
