"""The tests' yardsticks, which are public: `gossamer.testing`."""

from gossamer.testing import Tolerance, assert_matches, attention, tolerance

__all__ = ["Tolerance", "assert_matches", "attention", "tolerance"]
