"""Checks for methods and kernels of other packages: the laws, and the yardsticks they use."""

from gossamer.testing.laws import (
    METHOD_LAWS,
    check_causal,
    check_full,
    check_left_padding,
    check_monotone,
    check_padding,
    check_valid,
    method_at,
    visible,
)
from gossamer.testing.shape import Shape
from gossamer.testing.yardstick import Tolerance, assert_matches, attention, tolerance

__all__ = [
    "METHOD_LAWS",
    "Shape",
    "Tolerance",
    "assert_matches",
    "attention",
    "check_causal",
    "check_full",
    "check_left_padding",
    "check_monotone",
    "check_padding",
    "check_valid",
    "method_at",
    "tolerance",
    "visible",
]
