"""The random numbers of `gossamer.counter` inside kernels: the same bits on every device."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202 -- the types of a kernel are Triton's

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Scramble 64 bits as `gossamer.counter` does."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def absorb(state, key):
    """Return the counter's state after one more key."""
    word = _mix(key.to(tl.uint64) + 0x9E3779B97F4A7C15)
    return _mix((state ^ word) + 0x9E3779B97F4A7C15)
