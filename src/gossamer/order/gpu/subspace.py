"""Kernels of WaveAlign's subspace iteration with two columns, and of what its sorts need.

One iteration is two launches. `multiply` takes one or more tiles a program. `transpose` takes some
columns a program and every tile: it finds by itself how the products are centred and made
orthonormal, which costs it two passes over 8 bytes a tile and saves a launch and a wait. Both sum
in one fixed order, without atomics, so that the same mask gives the same bits on every run, and
tiles that read the same get the same bits.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- a kernel takes flat arguments, and its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.group.gpu.counter import absorb

_LONGEST = tl.constexpr((1 << 31) - 1)
_TURN = tl.constexpr(6.283185307179586)


@triton.jit(do_not_specialize=["salt"])
def start(
    right_ptr,  # [x, 2, P] float32, out
    salt,
    padded,  # P
    STEP: tl.constexpr,
):
    """Write `counter.uniform(salt, block, column)` - 1/2, the same for every line."""
    block = tl.program_id(0) * STEP + tl.arange(0, STEP)
    right = right_ptr + tl.program_id(1).to(tl.int64) * 2 * padded
    of_block = absorb(absorb(tl.zeros([STEP], tl.uint64), salt), block)
    for column in tl.static_range(2):
        state = absorb(of_block, tl.full([STEP], column, tl.int64))
        number = (state >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
        tl.store(right + column * padded + block, number.to(tl.float32) - 0.5, mask=block < padded)


@triton.jit(do_not_specialize=["num_tiles"])
def multiply(
    mask_ptr,  # [x, T, P] uint8, B
    right_ptr,  # [x, 2, P] float32
    product_ptr,  # [x, 2, T] float32, out
    num_tiles,
    padded,  # P
    TILES: tl.constexpr,
    STEP: tl.constexpr,  # columns per step
):
    """Write B right, not centred yet."""
    line = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    rows = mask_ptr + line * num_tiles * padded + tile[:, None] * padded
    right = right_ptr + line * 2 * padded
    first = tl.zeros([TILES], tl.float32)
    second = tl.zeros([TILES], tl.float32)
    for step in range(0, padded, STEP):
        column = step + tl.arange(0, STEP)
        inside = column < padded
        read = (tile < num_tiles)[:, None] & inside[None, :]
        entry = tl.load(rows + column[None, :], mask=read, other=0).to(tl.float32)
        by = tl.load(right + column, mask=inside, other=0.0)
        first += tl.sum(entry * by[None, :], 1)
        by = tl.load(right + padded + column, mask=inside, other=0.0)
        second += tl.sum(entry * by[None, :], 1)
    product = product_ptr + line * 2 * num_tiles + tile
    tl.store(product, first, mask=tile < num_tiles)
    tl.store(product + num_tiles, second, mask=tile < num_tiles)


@triton.jit
def _load(product, number, tile, num_tiles):
    """Return both products of some tiles as float64, and whether the tiles take part."""
    takes_part = tl.load(number + tile, mask=tile < num_tiles, other=0) > 0
    first = tl.load(product + tile, mask=takes_part, other=0.0).to(tl.float64)
    second = tl.load(product + num_tiles + tile, mask=takes_part, other=0.0).to(tl.float64)
    return first, second, takes_part


@triton.jit
def _basis(product, number, num_tiles, DEPENDENT: tl.constexpr, STEP: tl.constexpr):
    """Return what centres the products [2, T] of a line and makes them orthonormal.

    In float64: where all tiles that take part read the same, their sum, mean and hence the centred
    products are exact, 0. One pass of Gram-Schmidt leaves 1e-16 / DEPENDENT.

    Returns:
        Tiles that take part; both means; the factor of the first column, how much of the first
        orthonormal column the second one holds, the factor of what is left. Factors are 0 for
        columns that depend on those before.
    """
    lane = tl.arange(0, STEP)
    active = tl.zeros([STEP], tl.int32)
    first_sum = tl.zeros([STEP], tl.float64)
    second_sum = tl.zeros([STEP], tl.float64)
    for step in range(0, num_tiles, STEP):
        first, second, takes_part = _load(product, number, step + lane, num_tiles)
        active += takes_part.to(tl.int32)
        first_sum += first
        second_sum += second
    num_active = tl.sum(active, 0)
    first_mean = tl.sum(first_sum, 0) / tl.maximum(num_active, 1)
    second_mean = tl.sum(second_sum, 0) / tl.maximum(num_active, 1)

    first_square = tl.zeros([STEP], tl.float64)
    second_square = tl.zeros([STEP], tl.float64)
    both = tl.zeros([STEP], tl.float64)
    for step in range(0, num_tiles, STEP):
        first, second, takes_part = _load(product, number, step + lane, num_tiles)
        first = tl.where(takes_part, first - first_mean, 0.0)
        second = tl.where(takes_part, second - second_mean, 0.0)
        first_square += first * first
        second_square += second * second
        both += first * second
    length = tl.sum(first_square, 0)
    scale = tl.where(length > 0, 1 / tl.sqrt(tl.where(length > 0, length, 1.0)), 0.0)
    shared = tl.sum(both, 0) * scale
    length = tl.sum(second_square, 0)
    rest = length - shared * shared
    depends = rest <= DEPENDENT * DEPENDENT * length
    rest_scale = tl.where(depends, 0.0, 1 / tl.sqrt(tl.where(depends, 1.0, rest)))
    return num_active, first_mean, second_mean, scale, shared, rest_scale


@triton.jit
def _left(product, tile, num_tiles, means, scale, shared, rest_scale):
    """Return both orthonormal columns at some tiles, as float32; any numbers for those left out."""
    first = tl.load(product + tile, mask=tile < num_tiles, other=0.0).to(tl.float64)
    second = tl.load(product + num_tiles + tile, mask=tile < num_tiles, other=0.0).to(tl.float64)
    first = (first - means[0]) * scale
    second = (second - means[1] - first * shared) * rest_scale
    first = tl.where(scale > 0, first, 0.0)  # never -0, whose angle differs by a turn
    second = tl.where(rest_scale > 0, second, 0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit(do_not_specialize=["num_tiles"])
def transpose(
    mask_ptr,  # [x, T, P] uint8, B
    product_ptr,  # [x, 2, T] float32, as `multiply` writes it
    number_ptr,  # [x, T] int32; 0: the tile takes no part
    right_ptr,  # [x, 2, P] float32, out
    num_tiles,
    padded,  # P
    DEPENDENT: tl.constexpr,
    TILES: tl.constexpr,  # per step of the product
    COLUMNS: tl.constexpr,  # per program; P is a multiple of it
    STEP: tl.constexpr,  # tiles per step of the sums
):
    """Write B^T left, where left are the orthonormal columns of the centred products.

    Left is centred, up to its rounding, so that B needs no centring here; rows of tiles left out
    are 0.
    """
    line = tl.program_id(1).to(tl.int64)
    product = product_ptr + line * 2 * num_tiles
    number = number_ptr + line * num_tiles
    _, first_mean, second_mean, scale, shared, rest_scale = _basis(
        product, number, num_tiles, DEPENDENT, STEP
    )
    means = (first_mean, second_mean)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    columns = mask_ptr + line * num_tiles * padded + column[None, :]
    first_sum = tl.zeros([TILES, COLUMNS], tl.float32)
    second_sum = tl.zeros([TILES, COLUMNS], tl.float32)
    for step in range(0, num_tiles, TILES):
        tile = step + tl.arange(0, TILES)
        inside = (tile < num_tiles)[:, None]
        entry = tl.load(columns + tile[:, None] * padded, mask=inside, other=0).to(tl.float32)
        first, second = _left(product, tile, num_tiles, means, scale, shared, rest_scale)
        first_sum += entry * first[:, None]
        second_sum += entry * second[:, None]
    right = right_ptr + line * 2 * padded + column
    tl.store(right, tl.sum(first_sum, 0))
    tl.store(right + padded, tl.sum(second_sum, 0))


@triton.jit(do_not_specialize=["num_tiles"])
def place(
    product_ptr,  # [x, 2, T] float32
    number_ptr,  # [x, T] int32
    point_ptr,  # [2, x, T] float32, out
    num_tiles,
    DEPENDENT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the points of tiles; all 0, which keeps their order, where fewer than 3 take part."""
    line = tl.program_id(1).to(tl.int64)
    product = product_ptr + line * 2 * num_tiles
    number = number_ptr + line * num_tiles
    active, first_mean, second_mean, scale, shared, rest_scale = _basis(
        product, number, num_tiles, DEPENDENT, STEP
    )
    scale = tl.where(active < 3, 0.0, scale)
    rest_scale = tl.where(active < 3, 0.0, rest_scale)
    means = (first_mean, second_mean)
    tile = tl.program_id(0) * STEP + tl.arange(0, STEP)
    first, second = _left(product, tile, num_tiles, means, scale, shared, rest_scale)
    point = point_ptr + line * num_tiles + tile
    tl.store(point, first, mask=tile < num_tiles)
    next_axis = tl.num_programs(1).to(tl.int64) * num_tiles
    tl.store(point + next_axis, second, mask=tile < num_tiles)


@triton.jit(do_not_specialize=["num_tiles", "wave"])
def arrange(
    angle_ptr,  # [x, T] float32, ascending; tiles that take no part last
    by_ptr,  # [x, T] int64, the tiles in this order
    number_ptr,  # [x, T] int32, by tile
    tile_ptr,  # [x, T] int32, out: the tiles by angle, from the widest gap on
    key_ptr,  # [x, T] int64, out: what sorts these by wave and descending number
    num_tiles,
    wave,  # tiles
    STEP: tl.constexpr,
):
    """Cut a head's circle of angles at its widest gap, and say what sorts its waves."""
    line = tl.program_id(0).to(tl.int64)
    angles = angle_ptr + line * num_tiles
    by = by_ptr + line * num_tiles
    number = number_ptr + line * num_tiles
    lane = tl.arange(0, STEP)
    active = tl.zeros([STEP], tl.int32)
    for step in range(0, num_tiles, STEP):
        tile = step + lane
        active += (tl.load(number + tile, mask=tile < num_tiles, other=0) > 0).to(tl.int32)
    num_active = tl.sum(active, 0)

    widest = float("-inf")
    cut = 0
    last = tl.load(angles + tl.maximum(num_active - 1, 0))
    for step in range(0, num_active, STEP):
        at = step + lane
        inside = at < num_active
        angle = tl.load(angles + at, mask=inside, other=0.0)
        previous = tl.load(angles + at - 1, mask=inside & (at > 0), other=0.0)
        previous = tl.where(at == 0, last - _TURN, previous)
        gap = tl.where(inside, angle - previous, float("-inf"))
        here = tl.max(gap, 0)
        leads = tl.min(tl.where(gap == here, at, _LONGEST), 0)
        cut = tl.where(here > widest, leads, cut)
        widest = tl.maximum(widest, here)

    for step in range(0, num_tiles, STEP):
        at = step + lane
        inside = at < num_tiles
        takes_part = at < num_active
        source = tl.where(takes_part, (at + cut) % tl.maximum(num_active, 1), at)
        tile = tl.load(by + source, mask=inside, other=0).to(tl.int32)
        listed = tl.load(number + tile, mask=inside, other=0)
        # Tiles that take no part form a last wave, and fewer than 3 keep their order.
        group = tl.where(takes_part, at // wave, num_tiles).to(tl.int64)
        key = (group << 32) + tl.where(takes_part, _LONGEST - listed, 0)
        key = tl.where(num_active < 3, at.to(tl.int64), key)
        tl.store(tile_ptr + line * num_tiles + at, tile, mask=inside)
        tl.store(key_ptr + line * num_tiles + at, key, mask=inside)
