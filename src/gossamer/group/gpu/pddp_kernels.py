"""Kernels of Fast PDDP: one level of all groups; `gpu.pddp` launches them."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- a kernel takes flat arguments; Triton's types

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.group.gpu.cut import greatest_of_rank, level_of_chunk
from gossamer.group.gpu.ranks import load_ordered, ordered

_PLAIN = ("heads", "depth", "chunks", "iterations")  # one compilation, whether they are 1 or 16


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
def _centred(moment, total, number):
    """Return the moments [DP, DP] around the mean of `number` tokens."""
    mean = total / tl.maximum(number, 1).to(tl.float32)
    return moment - total[:, None] * mean[None, :]


@triton.jit
def _principal(spread, start_ptr, iterations, D: tl.constexpr, DP: tl.constexpr):
    """Return the principal direction [DP] by power iteration, 0 where tokens are equal.

    Divided by its greatest element the matrix lengthens the direction by 1 to DP times, so that
    every fourth length is soon enough: each is a sum over all threads.
    """
    dim = tl.arange(0, DP)
    axis = tl.load(start_ptr + dim, mask=dim < D, other=0.0)
    size = tl.where(spread == spread, tl.abs(spread), 0.0)  # noqa: PLR0124 -- NaN
    greatest = tl.max(tl.max(size, 1), 0)
    spread = spread * (1.0 / tl.maximum(greatest, 1e-30))
    for number in range(iterations):
        axis = tl.sum(spread * axis[None, :], 1)
        if (number % 4 == 3) | (number == iterations - 1):
            axis = axis / tl.maximum(tl.sqrt(tl.sum(axis * axis, 0)), 1e-12)
    return axis


@triton.jit
def _bin(along, least, rate, BINS: tl.constexpr):
    """Return the bin of each value; no value has a lower bin than a lesser one.

    A difference and a product, which no compiler can fuse: every kernel finds the same bin.
    """
    at = (along - least) * rate
    at = tl.where(at == at, at, 0.0)  # noqa: PLR0124 -- NaN
    return tl.minimum(tl.maximum(at, 0.0), BINS - 1.0).to(tl.int32)


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
    histogram,  # of the group, [BINS]; not touched where there are no bins
    least,
    rate,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets inside a head need 64 bits
):
    """Write the negative projections of the tokens begin … end, and count them by bin.

    In float32 and with the same additions for every token, so that equal tokens tie exactly.
    """
    lane = tl.arange(0, STEP)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        mask = start + lane < end
        token = tl.load(order_row + start + lane, mask=mask, other=0)
        x = _load_tokens(x_row, token, mask, x_n, D, DP, WIDE).to(tl.float32)
        along = -tl.sum((x - shift[None, :]) * axis[None, :], 1)
        along = tl.where(along == along, along, float("-inf"))  # noqa: PLR0124 -- NaN
        tl.store(along_row + start + lane, along, mask=mask)
        if BINS > 0:
            at = histogram + _bin(along, least, rate, BINS)
            tl.atomic_add(at, 1, mask=mask, sem="relaxed")


@triton.jit
def _part(
    order_row,
    into_row,
    along_row,
    begin,
    first,
    stop,
    cut,
    level,
    above,
    listed,
    ties,
    BLOCK: tl.constexpr,
):
    """Put tokens first … stop of a group where they belong, each side in the order it had.

    The `cut` tokens of greatest value stand in front. `level` parts them: `above` values of the
    group are greater, `listed` of them before `first`, where `ties` are equal.
    """
    left = cut - above  # of the tokens that equal the level, the first so many
    step = tl.arange(0, BLOCK)
    for start in range(first, stop, BLOCK):
        at = start + step
        mask = at < stop
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
def shift_kernel(
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
def moments_kernel(
    x_ptr,
    order_ptr,
    tokens_ptr,
    shift_ptr,
    moment_ptr,  # [groups, chunks, DP, DP], a slot for each left group alone
    sum_ptr,  # [groups, chunks, DP]
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
    """Write the moments of one chunk of one left group; right ones are what is missing."""
    program = tl.program_id(0).to(tl.int64)
    group = program // chunks * tl.where(depth > 0, 2, 1)
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
def axis_kernel(
    tokens_ptr,
    moment_ptr,  # of chunks, as the moments kernel leaves them
    sum_ptr,
    parent_ptr,  # [groups / 2, DP + 1, DP], moments and sum of the groups that were split
    whole_ptr,  # [groups, DP + 1, DP], out: of these groups
    start_ptr,
    axis_ptr,  # [groups, DP], out
    range_ptr,  # [groups, 2], out: where the bins begin, and how many there are in a unit
    histogram_ptr,  # [groups, BINS], out: zeros
    number_ptr,  # [groups], out: zeros
    tile,
    depth,
    chunks,
    iterations,
    D: tl.constexpr,
    DP: tl.constexpr,
    BINS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the principal direction of one group, and bins for its projections."""
    group = tl.program_id(0).to(tl.int64)
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + (group >> depth)), tile)
    if num_tiles > 1:
        dim = tl.arange(0, DP)
        square = dim[:, None] * DP + dim[None, :]
        moment = tl.zeros([DP, DP], tl.float32)
        total = tl.zeros([DP], tl.float32)
        first = tl.where(depth > 0, group >> 1, group) * chunks
        for chunk in tl.range(0, chunks, num_stages=STAGES):
            at = (first + chunk) * DP
            moment += tl.load(moment_ptr + at * DP + square)
            total += tl.load(sum_ptr + at + dim)
        if (depth > 0) & (path % 2 == 1):
            parent = parent_ptr + (group >> 1) * (DP + 1) * DP
            moment = tl.load(parent + square) - moment
            total = tl.load(parent + DP * DP + dim) - total
        whole = whole_ptr + group * (DP + 1) * DP
        tl.store(whole + square, moment)
        tl.store(whole + DP * DP + dim, total)
        number = (end - begin).to(tl.float32)
        spread = _centred(moment, total, end - begin)
        axis = _principal(spread, start_ptr, iterations, D, DP)
        tl.store(axis_ptr + group * DP + dim, axis)
        # Bins from 4 standard deviations below the mean to 4 above it.
        mean = -tl.sum(total * axis, 0) / number
        variance = tl.sum(tl.sum(spread * axis[None, :], 1) * axis, 0) / number
        deviation = tl.sqrt(tl.maximum(variance, 1e-30))
        tl.store(range_ptr + group * 2, mean - 4.0 * deviation)
        tl.store(range_ptr + group * 2 + 1, (BINS / 8.0) / deviation)
        each = tl.arange(0, BINS)
        tl.store(histogram_ptr + group * BINS + each, tl.zeros([BINS], tl.int32))
        tl.store(number_ptr + group, 0)


@triton.jit(do_not_specialize=_PLAIN)
def project_kernel(
    x_ptr,
    order_ptr,
    tokens_ptr,
    shift_ptr,
    axis_ptr,
    range_ptr,
    histogram_ptr,  # [groups, BINS] int32, zeros; out
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
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
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
        at = row * places
        _project(
            x_row,
            order_ptr + at,
            along_ptr + at,
            tl.load(shift_ptr + row * DP + dim),
            tl.load(axis_ptr + group * DP + dim),
            begin,
            end,
            x_n,
            histogram_ptr + group * BINS,
            tl.load(range_ptr + group * 2),
            tl.load(range_ptr + group * 2 + 1),
            BINS,
            STEP,
            STAGES,
            D,
            DP,
            WIDE,
        )


@triton.jit(do_not_specialize=_PLAIN)
def gather_kernel(
    along_ptr,
    tokens_ptr,
    range_ptr,
    histogram_ptr,
    member_ptr,  # [groups, 2, CAPACITY] int32, out: ordered values in the bin, and their places
    number_ptr,  # [groups] int32, zeros; out: values in the bin, even those that find no room
    above_ptr,  # [groups, chunks] int32, out: values in higher bins
    places,
    tile,
    depth,
    chunks,
    BINS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the values of one chunk of one group that share a bin with the value that parts it.

    Programs list theirs in any order: what is made of the list does not depend on it.
    """
    program = tl.program_id(0).to(tl.int64)
    group = program // chunks
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    if num_tiles > 1:
        cut = (num_tiles + 1) // 2 * tile
        counts = tl.load(histogram_ptr + group * BINS + tl.arange(0, BINS))
        higher = end - begin - tl.cumsum(counts, 0)
        wanted = tl.sum((higher >= cut).to(tl.int32), 0)
        at = (program % chunks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        mask = at < end - begin
        along = tl.load(along_ptr + row * places + begin + at, mask=mask, other=0.0)
        least = tl.load(range_ptr + group * 2)
        own = _bin(along, least, tl.load(range_ptr + group * 2 + 1), BINS)
        tl.store(above_ptr + program, tl.sum((mask & (own > wanted)).to(tl.int32), 0))
        is_in = (mask & (own == wanted)).to(tl.int32)
        scan = tl.cumsum(is_in, 0)
        place = tl.atomic_add(number_ptr + group, tl.max(scan, 0), sem="relaxed") + scan - 1
        member = member_ptr + group * 2 * CAPACITY + place
        keep = (is_in != 0) & (place < CAPACITY)
        tl.store(member, ordered(along), mask=keep)
        tl.store(member + CAPACITY, at, mask=keep)


@triton.jit(do_not_specialize=_PLAIN)
def part_kernel(
    order_ptr,
    into_ptr,
    along_ptr,
    tokens_ptr,
    member_ptr,
    number_ptr,
    above_ptr,
    places,
    tile,
    depth,
    chunks,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Split one chunk of one group by its projections."""
    program = tl.program_id(0).to(tl.int64)
    group = program // chunks
    chunk = (program % chunks).to(tl.int32)
    row = group >> depth
    path = (group & ((1 << depth) - 1)).to(tl.int32)
    begin, end, num_tiles = _group(path, depth, tl.load(tokens_ptr + row), tile)
    at = row * places
    first = chunk * BLOCK
    stop = tl.minimum(first + BLOCK, end - begin)
    if num_tiles > 1:
        if first < stop:
            cut = (num_tiles + 1) // 2 * tile
            along_row = along_ptr + at
            level, above, listed, ties = level_of_chunk(
                along_row + begin,
                end - begin,
                cut,
                member_ptr + group * 2 * CAPACITY,
                tl.load(number_ptr + group),
                above_ptr + group * chunks,
                chunk,
                chunks,
                CAPACITY,
                BLOCK,
                CHUNKS,
            )
            _part(
                order_ptr + at,
                into_ptr + at,
                along_row,
                begin,
                first,
                stop,
                cut,
                level,
                above,
                listed,
                ties,
                BLOCK,
            )
    else:
        _copy(order_ptr + at, into_ptr + at, begin + first, begin + stop, BLOCK)


@triton.jit(do_not_specialize=_PLAIN)
def split_kernel(
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
    PROJECT_STEP: tl.constexpr,
    STAGES: tl.constexpr,
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
        spread = _centred(moment, total, end - begin)
        axis = _principal(spread, start_ptr, iterations, D, DP)
        along_row = along_ptr + at
        _project(
            x_row,
            order_row,
            along_row,
            shift,
            axis,
            begin,
            end,
            x_n,
            tokens_ptr,
            0.0,
            0.0,
            0,
            PROJECT_STEP,
            STAGES,
            D,
            DP,
            WIDE,
        )
        tl.debug_barrier()  # other threads wrote what this one reads
        cut = (num_tiles + 1) // 2 * tile
        lane = tl.arange(0, CAPACITY)
        key = load_ordered(along_row + begin, lane, lane < end - begin)
        level = greatest_of_rank(key, lane < end - begin, cut)
        above = tl.sum((key > level).to(tl.int32), 0)
        none = tl.full([], 0, tl.int32)
        _part(
            order_row,
            into_ptr + at,
            along_row,
            begin,
            none,
            end - begin,
            cut,
            level,
            above,
            none,
            none,
            BLOCK,
        )
    else:
        _copy(order_row, into_ptr + at, begin, end, BLOCK)
