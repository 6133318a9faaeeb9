"""The table that `gossamer compare` prints: a line per method, mean over prompts and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gossamer.cli.console import print_table

Run: TypeAlias = Mapping[str, Any]


def print_results(document: Mapping[str, Any]) -> None:
    """Write the table of a results document to stdout."""
    groups: dict[str, list[Run]] = {}
    for run in document["runs"]:
        groups.setdefault(run["recipe"], []).append(run)
    dense = groups.get("dense", [])
    print_table(
        (
            "method",
            "runs",
            "density",
            "PSNR dB",
            "SSIM",
            "ST-LPIPS",
            "attn s",
            "plan",
            "total s",
            "speed-up",
            "kernel",
        ),
        [_row(name, runs, dense) for name, runs in groups.items()],
    )


def _row(name: str, runs: Sequence[Run], dense: Sequence[Run]) -> tuple[str, ...]:
    attention, planning = _mean(runs, "attention_ms"), _mean(runs, "plan_ms")
    base = _mean(dense, "attention_ms")
    return (
        name,
        str(len(runs)),
        _format(_mean(runs, "density"), "{:.3f}"),
        _format(_mean(runs, "psnr_db"), "{:.2f}"),
        _format(_mean(runs, "ssim"), "{:.4f}"),
        _format(_mean(runs, "st_lpips"), "{:.4f}"),
        _format(attention, "{:.2f}", lambda value: value / 1e3),
        _format(planning / attention if attention and planning is not None else None, "{:.0%}"),
        _format(_mean(runs, "total_ms"), "{:.2f}", lambda value: value / 1e3),
        # Attention alone, planning included: what a method can change.
        _format(base / attention if base and attention else None, "{:.2f}x"),
        ", ".join(dict.fromkeys(str(run["kernel"]) for run in runs)),
    )


def _mean(runs: Sequence[Run], key: str) -> float | None:
    """Return the mean of a measurement over the runs that have it; "inf" counts as infinity."""
    values = [float(run[key]) for run in runs if run[key] is not None]
    return sum(values) / len(values) if values else None


def _format(
    value: float | None, pattern: str, convert: Callable[[float], float] = lambda value: value
) -> str:
    if value is None:
        return "-"
    return "∞" if math.isinf(value) else pattern.format(convert(value))
