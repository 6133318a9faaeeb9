"""Whether Triton kernels run on a tensor; needs torch alone."""

from __future__ import annotations

import functools
import importlib.util
import os

from torch import Tensor


def runs_triton(x: Tensor) -> bool:
    """Return whether our Triton kernels run where a tensor lies, whatever its dtype.

    On a CPU they do where Triton interprets (TRITON_INTERPRET=1), which is for tests.
    """
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return (x.device.type == "cuda" or interprets) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None
