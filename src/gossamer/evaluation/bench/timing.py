"""Timing work on a GPU: medians over repetitions, memory, and how often the host waits.

In a model the host is ahead of the device, and other layers have been through its caches. So before
each repetition the device has something else to do, while the host launches what is timed.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_WARM_UP = 3
_BUDGET_MS = 400.0  # of repetitions per figure
_MOST, _LEAST = 100, 5
_CLEARED = 2 << 30  # bytes before each repetition: half a millisecond on an H200
_SYNCHRONISES = "called a synchronizing CUDA operation"  # torch's warning


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


def time_call(
    call: Callable[[], object], *, warm_up: int = _WARM_UP, least: int = _LEAST
) -> Timing:
    """Time a call on the current CUDA device; warm-up calls are not counted.

    Nor is the host, while it launches the call in less time than the device is given other work.

    Args:
        call: What to time.
        warm_up: Calls before, at least 1; the last one measures the memory.
        least: Repetitions, at least 2; more where they are short.
    """
    for _ in range(warm_up - 1):
        _once(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = _once(call)
    peak = torch.cuda.max_memory_allocated() - before
    repetitions = int(min(_MOST, max(least, _BUDGET_MS / max(first, 1e-3))))
    times = sorted(_once(call) for _ in range(repetitions))
    quartiles = statistics.quantiles(times, n=4)
    return Timing(
        median_ms=statistics.median(times),
        spread_ms=quartiles[2] - quartiles[0],
        peak_extra_bytes=peak,
    )


def count_synchronisations(call: Callable[[], object]) -> int:
    """Return how often a call makes the host wait for the current CUDA device.

    As torch's own debug mode counts: what it does not know to wait (`Event.synchronize`, libraries
    of others) is not in it.
    """
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(_SYNCHRONISES in str(entry.message) for entry in caught)


def _once(call: Callable[[], object]) -> float:
    """Return the milliseconds of one call, as the device counts them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _other_work(torch.cuda.current_device()).zero_()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@functools.cache
def _other_work(device: int) -> Tensor:
    """Return memory for the device to clear."""
    return torch.empty(_CLEARED, dtype=torch.uint8, device=torch.device("cuda", device))
