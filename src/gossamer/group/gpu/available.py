"""Whether Triton kernels run on a tensor; needs torch alone."""

from __future__ import annotations

import functools
import importlib.util
import os

from torch import Tensor

# The kernels that plan pass their tests in Triton's interpreter and compile for Hopper, but no GPU
# has run them yet: there they wait for this variable to be 1, and torch plans without it.
SWITCH = "GOSSAMER_PLANNING_KERNELS"


def runs_triton(x: Tensor) -> bool:
    """Return whether our Triton kernels run where a tensor lies, whatever its dtype.

    On a CPU they do where Triton interprets (TRITON_INTERPRET=1), which is for tests.
    """
    switch = SWITCH if x.device.type == "cuda" else "TRITON_INTERPRET"
    return os.environ.get(switch) == "1" and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None
