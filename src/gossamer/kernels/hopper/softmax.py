"""Softmax in the registers of a consumer: 64 rows, each held by four threads.

Layouts are those of the tensor cores' results. Sums and maxima go as trees over a thread's own
columns; threads of a row hear of one another as seldom as they can.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false
# ruff: noqa: ANN001, ANN201, ANN202 -- its types are Gluon's

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gossamer.kernels.hopper.walk import HALF, STEP

# By how many powers of two a row's maximum may be out of date: weights are then up to 256.
_SLACK = 8.0


def _scaling(held: int) -> tuple[str, str]:
    """Return assembly that scales what a thread holds of [64, D], and its constraints.

    Registers come in pairs of one row, of two rows in turn. Where no row of a warp moves, the warp
    passes by.
    """
    rows = f"${2 * held}", f"${2 * held + 2}"
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, {rows[0]}, 0f3F800000;",
        f"setp.neu.or.f32 q, {rows[1]}, 0f3F800000, p;",
        "vote.sync.any.pred p, q, 0xffffffff;",
        "@!p bra DONE;",
        *(f"mul.f32 ${i}, ${i}, {rows[i // 2 % 2]};" for i in range(held)),
        "DONE: }",
    ]
    tied = ["=f"] * held + [str(i) for i in range(held)] + ["f"] * held
    return " ".join(lines), ",".join(tied)


def _raising() -> str:
    """Return assembly that raises what two rows are held against where a warp holds much more.

    Registers 0 and 1, 2 and 3 before, are what the rows are held against, 4 and 5 what they hold.
    """
    slack = f"0f{struct.pack('>f', _SLACK).hex()}"
    lines = [
        "{ .reg .pred p, q; .reg .f32 limit, other, s, t;",
        f"add.f32 limit, $2, {slack};",
        f"add.f32 other, $3, {slack};",
        "setp.gt.f32 p, $4, limit;",
        "setp.gt.or.f32 q, $5, other, p;",
        "vote.sync.any.pred p, q, 0xffffffff;",
        "@!p bra DONE;",
    ]
    for row, limit in ((0, "limit"), (1, "other")):
        lines += [
            f"shfl.sync.bfly.b32 s, ${4 + row}, 2, 31, 0xffffffff;",
            f"max.f32 s, s, ${4 + row};",
            "shfl.sync.bfly.b32 t, s, 1, 31, 0xffffffff;",
            "max.f32 s, s, t;",
            f"setp.gt.f32 p, s, {limit};",
            f"selp.f32 ${row}, s, ${row}, p;",
        ]
    return " ".join([*lines, "DONE: }"])


_RAISE = gl.constexpr(_raising())
_SCALE_64 = gl.constexpr(_scaling(32)[0])
_TIED_64 = gl.constexpr(_scaling(32)[1])
_SCALE_128 = gl.constexpr(_scaling(64)[0])
_TIED_128 = gl.constexpr(_scaling(64)[1])


@gluon.jit
def raise_top(top, most):
    """Return what rows are held against, [64, 4]: their maximum, or what is little less.

    Threads of a row hear of one another only where one of a warp holds much more than before: they
    wait for an exchange longer than for all their maxima, and it seldom changes anything.

    Args:
        top: The same before this step, one value per row in each of the 4 threads of a row.
        most: The greatest score that each of them holds.
    """
    return gl.inline_asm_elementwise(
        _RAISE, "=f,=f,0,1,f,f", [top, most], gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def scale_rows(acc, shrink, D: gl.constexpr):
    """Return acc [64, D] times shrink [64, 4], unless that is 1 for all rows of a warp."""
    text: gl.constexpr = _SCALE_128 if D == 128 else _SCALE_64
    tied: gl.constexpr = _TIED_128 if D == 128 else _TIED_64
    shrink = along(shrink, acc, D)
    return gl.inline_asm_elementwise(
        text, tied, [acc, shrink], gl.float32, is_pure=False, pack=D // 2
    )


@gluon.jit
def pack(weights, dtype: gl.constexpr):
    """Return [64, 128] float32 as pairs of halves [64, 64] int32.

    Across the loop's edge the compiler would keep halves in registers of their own, and repack them
    twice a step.
    """
    low, high = gl.split(gl.reshape(weights, [HALF, STEP // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pin(pairs):
    """Return the pairs, in registers that nothing between the products defines.

    Products would wait for one another if what they read were computed between them.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [pairs], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the halves [64, 128] of pairs: the same registers, named otherwise."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [HALF, STEP]), layout)


@gluon.jit
def _halves(x, width: gl.constexpr):
    """Return the left and right halves of [64, 2 * width]; one thread holds both of a pair."""
    return gl.split(gl.permute(gl.reshape(x, [HALF, 2, width]), (0, 2, 1)))


@gluon.jit
def fold_sum(x):
    """Return [64, 128] summed to the [64, 8] that threads hold, as a tree and not a chain."""
    left, right = _halves(x, 64)
    left, right = _halves(left + right, 32)
    left, right = _halves(left + right, 16)
    left, right = _halves(left + right, 8)
    return left + right


@gluon.jit
def fold_max(x):
    """Return the greatest of [64, 128] that each of the 4 threads of a row holds: [64, 4]."""
    left, right = _halves(x, 64)
    left, right = _halves(gl.maximum(left, right), 32)
    left, right = _halves(gl.maximum(left, right), 16)
    left, right = _halves(gl.maximum(left, right), 8)
    left, right = gl.split(gl.reshape(gl.maximum(left, right), [HALF, 4, 2]))
    return gl.maximum(left, right)


@gluon.jit
def _double(x, width: gl.constexpr):
    """Return [64, width] twice beside itself, in the same threads."""
    return gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), [HALF, 2 * width])


@gluon.jit
def along(row, other, width: gl.constexpr):
    """Return what threads hold per row, [64, 4], laid out beside another [64, width]."""
    x = gl.reshape(gl.join(row, row), [HALF, 8])
    if width > 8:
        x = _double(_double(_double(x, 8), 16), 32)
    if width > 64:
        x = _double(x, 64)
    return gl.convert_layout(x, other.type.layout, assert_trivial=True)
