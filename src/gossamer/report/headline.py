"""Words the first lines of the report from what was measured, and only that."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossamer.report import formatting
from gossamer.report.document import Results
from gossamer.report.summary import Row, Spread, Summary

_FEATURED = ("instagen", "instagen-importance")  # the name alone means this sampler
_CONDITIONS = ("model", "device", "cpu", "threads", "gossamer", "torch", "diffusers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number worth a large type size, and what it is."""

    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The opening of the report.

    Attributes:
        claim: One sentence.
        basis: What the means of the claim were taken over.
        figures: The numbers behind the claim.
        remarks: What a fair reader must know beside the claim.
        conditions: Name and value of what it was measured with.
    """

    claim: str
    basis: str
    figures: tuple[Figure, ...]
    remarks: tuple[str, ...]
    conditions: tuple[tuple[str, str], ...]


def headline(results: Results, summary: Summary) -> Headline:
    """Word the opening of the report."""
    row = featured(summary)
    return Headline(
        claim="Full attention only: nothing to compare" if row is None else _claim(row),
        basis=_basis(summary),
        figures=_figures(row) if row is not None and row.ran_sparse else (),
        remarks=() if row is None else _remarks(row, summary, results.settings.get("steps", "")),
        conditions=_conditions(results),
    )


def featured(summary: Summary) -> Row | None:
    """Choose the row to open with: InstaGen at its lowest density, else the first sparse row.

    The choice looks at no result, so it cannot flatter; the remarks name whoever did better.
    """
    sparse = summary.sparse
    featured = [row for row in sparse if row.variant.method in _FEATURED]
    return next(iter([*featured, *sparse]), None)


def _claim(row: Row) -> str:
    variant = row.variant
    subject = variant.method
    if variant.density_asked is not None:
        subject += f" at density {formatting.density(variant.density_asked)}"
    if not row.ran_sparse:
        return f"{subject} never ran: every call used full attention"
    parts: list[str] = []
    ratio = row.attention_ratio
    if ratio is not None:
        slower = ", slower than dense" if ratio.mean > 1 else ""
        parts.append(f"attention takes {formatting.times(ratio.mean)} the dense time{slower}")
    if row.psnr_db is not None:
        parts.append(f"PSNR {formatting.fixed(row.psnr_db.mean, 1)} dB to the dense video")
    return f"{subject}: {'; '.join(parts) or 'not compared with dense'}"


def _basis(summary: Summary) -> str:
    prompts, seeds = len(summary.prompts), len(summary.seeds)
    over = f"{formatting.counted(prompts, 'prompt')}, {formatting.counted(seeds, 'seed')}"
    return f"One video each: {over}" if len(summary.cases) == 1 else f"Means over {over}"


def _figures(row: Row) -> tuple[Figure, ...]:
    asked = row.variant.density_asked
    figures = [
        Figure(
            value=formatting.times(
                None if row.attention_ratio is None else row.attention_ratio.mean
            ),
            meaning="dense attention time, planning included",
        ),
        Figure(
            value=formatting.times(None if row.total_ratio is None else row.total_ratio.mean),
            meaning="dense time for the whole video",
        ),
        Figure(
            value="–" if row.psnr_db is None else f"{formatting.fixed(row.psnr_db.mean, 1)} dB",
            meaning="PSNR to the dense video",
        ),
        Figure(
            value=formatting.density(None if row.density is None else row.density.mean),
            meaning="density realised over all calls"
            + ("" if asked is None else f", {formatting.density(asked)} asked"),
        ),
    ]
    return tuple(figures)


def _remarks(row: Row, summary: Summary, steps: str) -> tuple[str, ...]:
    if not row.ran_sparse:
        return tuple(f"{count} calls: {reason}" for reason, count in row.reasons.items())
    remarks: list[str] = []
    if row.attention_ratio is None:
        remarks.append("No dense run to compare the times with.")
    elif row.total_ratio is not None and row.attention_ratio.mean < 1 <= row.total_ratio.mean:
        remarks.append("The whole generation is not faster than dense, only attention is.")
    if row.variant.dense_steps not in {"", "0"} and row.density is not None:
        realised = formatting.density(row.density.mean)
        of_steps = f" of {steps}" if steps else ""
        remarks.append(
            f"Steps with full attention: {row.variant.dense_steps}{of_steps}. They count in every "
            f"time, and bring the density of the whole generation to {realised}."
        )
    rivals = [
        other
        for other in summary.sparse
        if other.ran_sparse and other.variant.density_asked == row.variant.density_asked
    ]
    remarks += _better(row, rivals)
    if len(summary.cases) == 1:
        remarks.append("One video: small differences between methods may not repeat.")
    return tuple(remarks)


def _better(row: Row, rivals: list[Row]) -> list[str]:
    """Name the rows that beat the featured one at the same density asked, itself among `rivals`."""
    found: list[str] = []
    closest = max(rivals, key=lambda rival: _mean(rival.psnr_db, missing=-math.inf))
    if _mean(closest.psnr_db, missing=-math.inf) > _mean(row.psnr_db, missing=math.inf):
        value = formatting.fixed(_mean(closest.psnr_db, missing=math.nan), 1)
        found.append(f"{closest.name} is closer to dense: {value} dB.")
    fastest = min(rivals, key=lambda rival: _mean(rival.attention_ratio, missing=math.inf))
    if _mean(fastest.attention_ratio, missing=math.inf) < _mean(
        row.attention_ratio, missing=-math.inf
    ):
        value = formatting.times(_mean(fastest.attention_ratio, missing=math.nan))
        found.append(f"{fastest.name} is faster: {value} the dense attention time.")
    return found


def _mean(spread: Spread | None, *, missing: float) -> float:
    return missing if spread is None else spread.mean


def _conditions(results: Results) -> tuple[tuple[str, str], ...]:
    settings, environment = results.settings, results.environment
    size = "×".join(settings[name] for name in ("width", "height") if settings.get(name))
    frames = settings.get("num_frames")
    video = ", ".join(part for part in (size, f"{frames} frames" if frames else "") if part)
    known = {**environment, **settings}
    pairs = [("video", video), ("steps", settings.get("steps", ""))]
    pairs += [(name, known.get(name, "")) for name in _CONDITIONS]
    pairs.sort(key=lambda pair: pair[0] != "model")
    return tuple((name, value) for name, value in pairs if value)
