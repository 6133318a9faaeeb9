"""`gossamer bench`: kernels, planning and models on a GPU, beside the fastest dense attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer

import gossamer as gs
from gossamer.cli.console import print_json, print_table, say
from gossamer.cli.errors import UsageError
from gossamer.cli.options import Json
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.document import Named, Row, Run
from gossamer.evaluation.bench.external import EXTERNAL
from gossamer.evaluation.bench.kernels import DENSITIES, bench_kernels
from gossamer.evaluation.bench.model import bench_model
from gossamer.evaluation.bench.plan_cases import DEFAULT_CASES, PLAN_CASES
from gossamer.evaluation.bench.plans import bench_plans
from gossamer.evaluation.bench.wan import MODELS
from gossamer.evaluation.files import check_file

CaseT = TypeVar("CaseT", bound=Named)
_REFUSED = 1  # exit code where some figure was refused


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """How the rows of a document are shown.

    Attributes:
        columns: The headings.
        cells: Makes the cells of a row.
    """

    columns: Sequence[str]
    cells: Callable[[Row], tuple[str, ...]]


def bench(
    what: Annotated[str, typer.Argument(help="What to time: kernels, plans or model.")] = "kernels",
    *,
    cases: Annotated[
        str | None,
        typer.Option("--cases", help="Names with commas.", show_default="all; of plans, at 720p"),
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(
            "--densities",
            help="Kernels: shares of the keys, with commas.",
            show_default=",".join(f"{density:g}" for density in DENSITIES),
        ),
    ] = None,
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels", help="Kernels: names with commas.", show_default="all that run here"
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=1,
            help="Model: run the first so many layers only; the rows are named so.",
            show_default="all",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=0, help="Begin no case later than this.", show_default="no limit"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Also write the results to this JSON file, row by row."),
    ] = None,
    json: Json = False,
) -> None:
    """Time kernels, planning or whole models on this GPU, each checked before it is timed.

    Dense attention is timed in the same run, and everything is measured against the fastest.
    Efficiency is its time over the sparse time, times the density: 1 is the ideal.

    Example: gossamer bench kernels --cases tokens-75600,blocks-75600 --densities .1,.5
    """
    makers = {"kernels": _kernels, "plans": _plans, "model": _model}
    if what not in makers:
        raise UsageError(f"cannot time {what!r}: known are {', '.join(makers)}")
    _refuse_foreign(what, "kernels", {"--densities": densities, "--kernels": kernels})
    _refuse_foreign(what, "model", {"--layers": layers})
    options = {"densities": densities, "kernels": kernels, "layers": layers}
    measure, table = makers[what](cases, options)
    if out is not None:
        check_file(out, (".json",))
    if not torch.cuda.is_available():
        raise UsageError(f"bench {what} needs a CUDA device, and torch finds none here")
    document = measure(Run(out=out, seconds=seconds, say=say))
    if out is not None:
        say(f"results: {out}")
    if json:
        print_json(document)
    else:
        rows = [table.cells(row) for row in document["rows"]]
        print_table(table.columns, rows, title=str(document["environment"]["device"]))
    if document["failures"]:
        raise typer.Exit(_REFUSED)


_Measure = Callable[[Run], dict[str, Any]]


def _kernels(cases: str | None, options: Mapping[str, Any]) -> tuple[_Measure, _Table]:
    """Return what times kernels, and how it is shown."""
    chosen = _chosen(cases, CASES, CASES)
    asked, names = options["densities"], options["kernels"]
    shares = DENSITIES if asked is None else _parse_densities(asked)
    kernels = None if names is None else _known_kernels(names)

    def measure(run: Run) -> dict[str, Any]:
        return bench_kernels(cases=chosen, densities=shares, kernels=kernels, run=run)

    columns = ("case", "kernel", "density", "median", "spread", "efficiency", "speed-up", "error")
    return measure, _Table(columns=columns, cells=_kernel_cells)


def _plans(cases: str | None, _options: Mapping[str, Any]) -> tuple[_Measure, _Table]:
    """Return what times planning, and how it is shown."""
    chosen = _chosen(cases, PLAN_CASES, DEFAULT_CASES)
    columns = ("case", "stage", "median", "spread", "of dense", "extra memory", "waits", "density")
    return lambda run: bench_plans(cases=chosen, run=run), _Table(
        columns=columns, cells=_plan_cells
    )


def _model(cases: str | None, options: Mapping[str, Any]) -> tuple[_Measure, _Table]:
    """Return what times forwards, and how it is shown."""
    chosen, layers = _chosen(cases, MODELS, MODELS), options["layers"]
    if layers is not None:
        for model in chosen:
            if layers > model.num_layers:
                raise UsageError(f"--layers {layers}: {model.name} has {model.num_layers}")
        chosen = [
            model if layers == model.num_layers else model.with_layers(layers) for model in chosen
        ]
    columns = ("case", "recipe", "median", "spread", "attention", "plan", "speed-up", "memory")
    return lambda run: bench_model(models=chosen, run=run), _Table(
        columns=columns, cells=_model_cells
    )


def _refuse_foreign(what: str, owner: str, options: Mapping[str, object]) -> None:
    """Refuse options of another benchmark, which would be ignored."""
    for name, value in options.items():
        if what != owner and value is not None:
            raise UsageError(f"{name} is for bench {owner}, and this is bench {what}")


def _chosen(cases: str | None, known: Sequence[CaseT], default: Sequence[CaseT]) -> list[CaseT]:
    """Return the cases asked for, in their own order."""
    if cases is None:
        return list(default)
    asked = cases.split(",")
    chosen = [case for case in known if case.name in asked]
    unknown = set(asked) - {case.name for case in known} - {""}
    if unknown or not chosen:
        names = ", ".join(case.name for case in known)
        raise UsageError(f"unknown case {', '.join(sorted(unknown)) or cases!r}: known are {names}")
    return chosen


def _known_kernels(text: str) -> list[str]:
    names = text.split(",")
    known_names = [*gs.list_kernels(), *EXTERNAL]
    unknown = sorted(set(names) - set(known_names))
    if unknown:
        known = ", ".join(known_names)
        raise UsageError(f"unknown kernel {', '.join(unknown)!r}: known are {known}")
    return names


def _parse_densities(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"--densities takes numbers above 0, at most 1, with commas; got {text!r}")
    return shares


def _kernel_cells(row: Row) -> tuple[str, ...]:
    """Return a row of `bench kernels` as text."""
    return (
        " ".join(part for part in (row["case"], row["stage"]) if part),
        row["kernel"],
        f"{row['density']:.2f}",
        f"{row['median_ms']:.2f} ms",
        f"{row['spread_ms']:.2f} ms",
        f"{row['efficiency']:.2f}",
        f"{row['speedup']:.2f}x",
        "" if row["rel_error"] is None else f"{row['rel_error']:.1e}",
    )


def _plan_cells(row: Row) -> tuple[str, ...]:
    """Return a row of `bench plans` as text."""
    return (
        row["case"],
        row["stage"],
        f"{row['median_ms']:.2f} ms",
        f"{row['spread_ms']:.2f} ms",
        f"{row['dense_share']:.1%}",
        f"{row['peak_extra_bytes'] / 2**20:.0f} MiB",
        str(row["synchronisations"]),
        "" if row["density"] is None else f"{row['density']:.3f}",
    )


def _model_cells(row: Row) -> tuple[str, ...]:
    """Return a row of `bench model` as text."""
    return (
        row["case"],
        row["recipe"],
        f"{row['median_ms']:.1f} ms",
        f"{row['spread_ms']:.1f} ms",
        f"{row['attention_share']:.1%}",
        f"{row['plan_share']:.1%}",
        f"{row['speedup']:.2f}x",
        f"{row['peak_bytes'] / 2**30:.1f} GiB",
    )
