"""The columns of the comparison: one list serves the page and the README."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gossamer.report import formatting
from gossamer.report.summary import Row, Spread, best_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: Head of the column.
        note: What it holds, for readers who wonder.
        get: Takes the column's value from a row.
        show: Writes a number of this column as text.
        highest_is_best: Whether more is better; None where no value is better than another.
    """

    title: str
    note: str
    get: Callable[[Row], Spread | float | str | None]
    show: Callable[[float | None], str] = formatting.density
    highest_is_best: bool | None = None

    def value(self, row: Row) -> float | str | None:
        """Return what a row is sorted and ranked by."""
        value = self.get(row)
        return value.mean if isinstance(value, Spread) else value

    def text(self, row: Row) -> str:
        """Return a row's cell as text."""
        value = self.value(row)
        if isinstance(value, str):
            return value or formatting.MISSING
        return self.show(value)

    def span(self, row: Row) -> str:
        """Return the range behind a mean of unequal values; empty where there is none."""
        value = self.get(row)
        if not isinstance(value, Spread) or value.low == value.high:
            return ""
        return f"{self.show(value.low)} to {self.show(value.high)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell, ready to show.

    Attributes:
        text: What the reader sees.
        sort: What the column is sorted by; empty sorts last.
        span: The range behind a mean of several runs; empty otherwise.
        best: Whether no row at the same density asked does better.
        is_number: Whether it is aligned as a number.
    """

    text: str
    sort: str
    span: str
    best: bool
    is_number: bool


COLUMNS = (
    Column(title="Method", note="as named in the results", get=lambda row: row.variant.method),
    Column(
        title="Density asked",
        note="the share of query–key pairs a sparse call was asked to compute",
        get=lambda row: row.variant.density_asked,
    ),
    Column(
        title="Density realised",
        note="over all calls, full attention in dense steps and layers included",
        get=lambda row: row.density,
    ),
    Column(
        title="PSNR, dB",
        note="to the dense video, higher is closer",
        get=lambda row: row.psnr_db,
        show=partial(formatting.fixed, digits=2),
        highest_is_best=True,
    ),
    Column(
        title="SSIM",
        note="to the dense video, higher is closer",
        get=lambda row: row.ssim,
        show=partial(formatting.fixed, digits=3),
        highest_is_best=True,
    ),
    Column(
        title="ST-LPIPS",
        note="to the dense video, lower is closer",
        get=lambda row: row.st_lpips,
        show=partial(formatting.fixed, digits=3),
        highest_is_best=False,
    ),
    Column(
        title="Flicker",
        note="change of the difference to the dense video from frame to frame, of 255 levels",
        get=lambda row: row.flicker,
        show=partial(formatting.fixed, digits=2),
        highest_is_best=False,
    ),
    Column(
        title="Attention time",
        note="sum over the generation, planning included",
        get=lambda row: row.attention_ms,
        show=formatting.milliseconds,
        highest_is_best=False,
    ),
    Column(
        title="Relative to dense",
        note="attention time over dense attention time of the same videos",
        get=lambda row: row.attention_ratio,
        show=formatting.times,
        highest_is_best=False,
    ),
    Column(
        title="Total time",
        note="the whole generation",
        get=lambda row: row.total_ms,
        show=formatting.milliseconds,
        highest_is_best=False,
    ),
    Column(
        title="Plan share",
        note="planning's share of the attention time",
        get=lambda row: row.plan_share,
        show=formatting.share,
    ),
    Column(
        title="Dense steps",
        note="denoising steps with full attention",
        get=lambda row: row.variant.dense_steps,
    ),
    Column(title="Kernel", note="what computed the attention", get=lambda row: row.variant.kernel),
)


def cells(
    rows: Sequence[Row], columns: Sequence[Column] = COLUMNS, *, mark_best: bool = True
) -> list[list[Cell]]:
    """Fill the columns for each row, and mark the best values unless told not to."""
    best = [_best(column, rows) if mark_best else frozenset[str]() for column in columns]
    return [
        [_cell(column, row, names) for column, names in zip(columns, best, strict=True)]
        for row in rows
    ]


def _best(column: Column, rows: Sequence[Row]) -> frozenset[str]:
    """Name the rows that hold the column's best values."""
    if column.highest_is_best is None:
        return frozenset()
    sign = 1 if column.highest_is_best else -1
    scores = {
        row.name: sign * value
        for row in rows
        if isinstance(value := column.value(row), float | int)
    }
    return best_rows(rows, scores)


def _sort_key(value: float | str | None) -> str:
    """Write a value as the page's script reads it."""
    if value is None:
        return ""
    return "Infinity" if value == math.inf else str(value)


def _cell(column: Column, row: Row, best: frozenset[str]) -> Cell:
    value = column.value(row)
    return Cell(
        text=column.text(row),
        sort=_sort_key(value),
        span=column.span(row),
        best=row.name in best,
        is_number=not isinstance(value, str),
    )
