"""Timing work on a GPU: medians over repetitions, and the memory that a call takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_WARM_UP = 3
_BUDGET_MS = 400.0  # of repetitions per figure
_MOST, _LEAST = 100, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long a call takes.

    Attributes:
        median_ms: Median over the repetitions.
        spread_ms: From the first to the third quartile.
        peak_extra_bytes: Most memory held during one call, beyond what was held before it.
    """

    median_ms: float
    spread_ms: float
    peak_extra_bytes: int


def time_call(call: Callable[[], object]) -> Timing:
    """Time a call on the current CUDA device; warm-up calls are not counted."""
    for _ in range(_WARM_UP - 1):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = _once(call)
    peak = torch.cuda.max_memory_allocated() - before
    repetitions = int(min(_MOST, max(_LEAST, _BUDGET_MS / max(first, 1e-3))))
    times = sorted(_once(call) for _ in range(repetitions))
    quartiles = statistics.quantiles(times, n=4)
    return Timing(
        median_ms=statistics.median(times),
        spread_ms=quartiles[2] - quartiles[0],
        peak_extra_bytes=peak,
    )


def _once(call: Callable[[], object]) -> float:
    """Return the milliseconds of one call, as the device counts them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
