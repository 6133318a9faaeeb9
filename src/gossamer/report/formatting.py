"""Numbers as readers see them: a dash for what was not measured, ∞ for identical videos."""

from __future__ import annotations

import math

MISSING = "–"


def fixed(value: float | None, digits: int) -> str:
    """Write a number with a fixed count of decimals; `–` for None, `∞` for infinity."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}".replace("-", "−")


def share(value: float | None) -> str:
    """Write a share of one as a percentage, `3.4 %`."""
    return MISSING if value is None else f"{fixed(100 * value, 1)} %"


def times(value: float | None) -> str:
    """Write a ratio to dense, `0.54×`."""
    return MISSING if value is None else f"{fixed(value, 2)}×"


def density(value: float | None) -> str:
    """Write a density with as many decimals as it needs, at least two and at most three."""
    if value is None:
        return MISSING
    return fixed(value, 3).removesuffix("0")


def milliseconds(value: float | None) -> str:
    """Write a time in the unit that suits it: `840 ms`, `12.3 s`, `4.2 min`."""
    if value is None:
        return MISSING
    if value < 1000:
        return f"{fixed(value, 0 if value >= 10 else 1)} ms"
    if value < 600_000:
        return f"{fixed(value / 1000, 1 if value >= 10_000 else 2)} s"
    return f"{fixed(value / 60_000, 1)} min"


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: `1 prompt`, `2 prompts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
