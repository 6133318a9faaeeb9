"""What happened in each attention call, and what it adds up to."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Stopwatch:
    """Times stretches of work on a device without synchronising it."""

    def __init__(self, device: torch.device) -> None:
        """Start the first stretch."""
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """End a stretch and begin the next one."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def elapsed_ms(self, stretch: int) -> float:
        """Return the milliseconds of a stretch; waits for the device where it is still running."""
        begin, end = self._marks[stretch], self._marks[stretch + 1]
        if self._cuda:
            end.synchronize()
            return begin.elapsed_time(end)
        return (end - begin) * 1e3


class Record:
    """What one attention call did.

    Times and density are read from the device when first asked for, so that recording does not
    synchronise.

    Attributes:
        layer: Index of the layer.
        num_layers: Layers in the model, or None.
        step: Index of the denoising step.
        num_steps: Steps of the generation, or None.
        branch: The guidance pass.
        path: "dense", "sparse" or "reuse".
        kernel: The kernel that ran.
        reason: Why this path, where it is not the recipe's ordinary one; else "".
        batch: B.
        num_heads: H, query heads.
        num_queries: N.
        num_keys: S.
    """

    def __init__(
        self,
        *,
        place: dict[str, Any],
        shape: tuple[int, int, int, int],
        path: str,
        kernel: str,
        reason: str,
        density: float | Tensor,
        watch: Stopwatch,
        plan_stretch: int | None,
    ) -> None:
        """Keep what is known; see the attributes."""
        self.layer: int = place["layer"]
        self.num_layers: int | None = place["num_layers"]
        self.step: int = place["step"]
        self.num_steps: int | None = place["num_steps"]
        self.branch: str = place["branch"]
        self.batch, self.num_heads, self.num_queries, self.num_keys = shape
        self.path = path
        self.kernel = kernel
        self.reason = reason
        self._density = density
        self._watch = watch
        self._plan_stretch = plan_stretch

    @property
    def density(self) -> float:
        """Share of visible pairs computed; 1.0 for a dense call."""
        self._density = float(self._density)
        return self._density

    @property
    def plan_ms(self) -> float:
        """Milliseconds of planning; 0.0 for a dense call."""
        if self._plan_stretch is None:
            return 0.0
        return self._watch.elapsed_ms(self._plan_stretch)

    @property
    def kernel_ms(self) -> float:
        """Milliseconds of the kernel alone."""
        return self._watch.elapsed_ms(0 if self._plan_stretch is None else self._plan_stretch + 1)

    @property
    def attention_ms(self) -> float:
        """Milliseconds of planning and kernel."""
        return self.plan_ms + self.kernel_ms

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        names = [name for name in vars(self) if not name.startswith("_")]
        names += ["density", "plan_ms", "kernel_ms", "attention_ms"]
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        """Return the facts in one line."""
        facts = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"Record({facts})"


def summarize(records: Iterable[Record]) -> dict[str, Any]:
    """Add up records.

    Returns:
        calls, dense_calls, sparse_calls, reuse_calls; density, the mean over all calls weighted by
        their pairs (dense steps and layers included; 1.0 for no call); attention_ms, plan_ms (part
        of it) and plan_share; kernels and reasons with their numbers of calls.
    """
    records = list(records)
    pairs = [r.batch * r.num_heads * r.num_queries * r.num_keys for r in records]
    computed = sum(n * r.density for n, r in zip(pairs, records, strict=True))
    attention_ms = sum(r.attention_ms for r in records)
    plan_ms = sum(r.plan_ms for r in records)
    paths = Counter(r.path for r in records)
    return {
        "calls": len(records),
        "dense_calls": paths["dense"],
        "sparse_calls": paths["sparse"],
        "reuse_calls": paths["reuse"],
        "density": computed / sum(pairs) if sum(pairs) else 1.0,
        "attention_ms": attention_ms,
        "plan_ms": plan_ms,
        "plan_share": plan_ms / attention_ms if attention_ms else 0.0,
        "kernels": dict(Counter(r.kernel for r in records)),
        "reasons": dict(Counter(r.reason for r in records if r.reason)),
    }
