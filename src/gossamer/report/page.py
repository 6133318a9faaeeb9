"""Assembles the report: one HTML file that works offline."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from gossamer.errors import MissingExtraError
from gossamer.evaluation.files import write_text
from gossamer.report import formatting
from gossamer.report.clips import inline_clips
from gossamer.report.columns import COLUMNS, Cell, cells
from gossamer.report.document import (
    CallRecord,
    Mask,
    Results,
    read_masks,
    read_records,
    read_results,
)
from gossamer.report.embed import content_policy, embed_json, embed_script
from gossamer.report.figures import MEASURES, heat_figure, heat_grid, quality_figure
from gossamer.report.headline import headline
from gossamer.report.masks import mask_uri
from gossamer.report.palette import series_of
from gossamer.report.summary import Case, Row, Summary, case_of, row_of_run, summarise

_HERE = Path(__file__).parent
_SCRIPTS = ("videos.js", "table.js", "plots.js", "gallery.js", "report.js")
_FACTS = ("PSNR, dB", "SSIM", "ST-LPIPS", "Density realised", "Attention time", "Relative to dense")


def write_report(results_json: Path, out_html: Path) -> Path:
    """Write the report of a results document as one HTML file.

    The file needs nothing beside it: scripts, styles, pictures and videos are inside, and its
    content policy lets it load nothing else.

    Args:
        results_json: The `results.json` of `gossamer compare`; files it names are read beside it.
        out_html: The file to write, whole or not at all.

    Returns:
        `out_html`.

    Raises:
        ReportError: The document, or a file that it names, is missing or garbled.
        MissingExtraError: jinja2 or plotly is not installed.
        OSError: The report cannot be written.
    """
    write_text(out_html, render(read_results(results_json)))
    return out_html


def render(results: Results) -> str:
    """Return the report of a results document as HTML."""
    jinja2 = _load("jinja2")
    scripts = [
        embed_script(_load("plotly.offline", "plotly").get_plotlyjs()),
        embed_script(_own_script()),
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = _context(results)
    context.update(
        style=(_HERE / "assets/report.css").read_text(encoding="utf-8"),
        scripts=scripts,
        data=embed_json(context["data"]),
        policy=content_policy(scripts),
    )
    return environment.get_template("template.html.j2").render(context)


def _load(module: str, package: str = "") -> ModuleType:
    """Import a module of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError("report", package or module) from error


def _own_script() -> str:
    parts = [(_HERE / "assets" / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _context(results: Results) -> dict[str, Any]:
    """Gather what the template shows."""
    summary = summarise(results)
    looks = series_of(summary.methods)
    heat = _heat(summary)
    case_names = [_case_name(case, summary) for case in summary.cases]
    figures = {m.key: quality_figure(summary, looks, m) for m in MEASURES}
    return {
        "headline": headline(results, summary),
        "summary": summary,
        "series": [looks[method] for method in summary.methods],
        "looks": looks,
        "columns": COLUMNS,
        "rows": list(zip(summary.rows, cells(summary.rows), strict=True)),
        "single_runs": _single_runs(summary),
        "case_names": case_names,
        "measures": [measure for measure in MEASURES if figures[measure.key] is not None],
        "heat_names": [entry["name"] for entry in heat],
        "plans": _plans(results),
        "results": results,
        "missing": formatting.MISSING,
        "data": {
            "frames": results.settings.get("num_frames", ""),
            "cases": case_names,
            "variants": _variants(summary),
            "clips": _clips(summary),
            "quality": figures,
            "heat": heat,
        },
    }


def _variants(summary: Summary) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "series": summary.methods.index(row.variant.method),
            "dense": row.variant.is_dense,
        }
        for row in summary.rows
    ]


def _clips(summary: Summary) -> list[list[dict[str, Any]]]:
    """Return the video and the facts of every run, by case and by variant."""
    table = [[row.run_of(case) for row in summary.rows] for case in summary.cases]
    flat = [run for line in table for run in line]
    clips = inline_clips(None if run is None else run.video for run in flat)
    facts = [[] if run is None else _facts(row_of_run(run, run.method, summary)) for run in flat]
    entries = [
        {"uri": clip.uri, "note": clip.note, "facts": fact}
        for clip, fact in zip(clips, facts, strict=True)
    ]
    width = len(summary.rows)
    return [entries[start : start + width] for start in range(0, len(entries), width)]


def _facts(row: Row) -> list[tuple[str, str]]:
    chosen = [column for column in COLUMNS if column.title in _FACTS]
    return [(column.title, column.text(row)) for column in chosen]


def _heat(summary: Summary) -> list[dict[str, Any]]:
    """Return the heat maps of every sparse variant that kept records."""
    records: dict[str, list[CallRecord]] = {}
    for row in summary.sparse:
        kept = [call for run in row.runs if run.records for call in read_records(run.records)]
        if kept:
            records[row.name] = kept
    errors = {name: heat_grid(kept, "rel_l2") for name, kept in records.items()}
    highest = max(
        (value for grid in errors.values() for line in grid for value in line if value is not None),
        default=1.0,
    )
    return [
        {
            "name": name,
            "density": heat_figure(heat_grid(kept, "density"), "density", 1.0),
            "rel_l2": heat_figure(errors[name], "rel_l2", highest or 1.0),
        }
        for name, kept in records.items()
    ]


def _plans(results: Results) -> dict[str, list[tuple[Mask, str]]]:
    """Return the plans to draw and their pictures, by method."""
    plans: dict[str, list[tuple[Mask, str]]] = {}
    for mask in () if results.plans is None else read_masks(results.plans):
        plans.setdefault(mask.method, []).append((mask, mask_uri(mask)))
    return plans


def _single_runs(summary: Summary) -> list[tuple[Row, str, list[Cell]]]:
    """Return every run with its case, as a row of its own; nothing if the means say it all."""
    if len(summary.cases) == 1:
        return []
    runs = [run for row in summary.rows for run in row.runs]
    rows = [row_of_run(run, run.method, summary) for run in runs]
    names = [_case_name(case_of(run), summary) for run in runs]
    return list(zip(rows, names, cells(rows, mark_best=False), strict=True))


def _case_name(case: Case, summary: Summary) -> str:
    return f"{case.prompt} (seed {case.seed})" if len(summary.seeds) > 1 else case.prompt
