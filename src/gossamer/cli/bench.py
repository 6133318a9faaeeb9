"""`gossamer bench`: kernels on a GPU, checked and then timed beside the fastest dense attention."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gossamer.cli.console import print_json, print_table, say
from gossamer.cli.errors import UsageError
from gossamer.cli.options import Json
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.kernels import DENSITIES, bench_kernels
from gossamer.evaluation.files import check_writable, write_json

_WHAT = ("kernels",)


def bench(
    what: Annotated[str, typer.Argument(help="What to time: kernels.")] = "kernels",
    *,
    cases: Annotated[
        str | None,
        typer.Option("--cases", help="Names with commas.", show_default="all of them"),
    ] = None,
    densities: Annotated[
        str, typer.Option("--densities", help="Shares of the keys, with commas.")
    ] = ",".join(f"{density:g}" for density in DENSITIES),
    kernels: Annotated[
        str | None,
        typer.Option("--kernels", help="Names with commas.", show_default="all that run here"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the results to this JSON file.")
    ] = None,
    json: Json = False,
) -> None:
    """Time kernels on this GPU: every one checked against float64, then beside dense attention.

    Efficiency is the fastest dense time over the sparse time, times the density: 1 is the ideal.

    Example: gossamer bench kernels --cases tokens-75600,blocks-75600 --densities .1,.5
    """
    if what not in _WHAT:
        raise UsageError(f"cannot time {what!r}: known are {', '.join(_WHAT)}")
    chosen = [case for case in CASES if cases is None or case.name in cases.split(",")]
    unknown = set((cases or "").split(",")) - {case.name for case in CASES} - {""}
    if unknown or not chosen:
        known = ", ".join(case.name for case in CASES)
        raise UsageError(f"unknown case {', '.join(sorted(unknown)) or cases!r}: known are {known}")
    shares = _parse_densities(densities)
    if not torch.cuda.is_available():
        raise UsageError("kernels are timed on a CUDA device, and torch finds none here")
    if out is not None:
        check_writable(out.parent)
    names = None if kernels is None else kernels.split(",")
    document = bench_kernels(cases=chosen, densities=shares, kernels=names, on_case=say)
    if out is not None:
        write_json(out, document)
        say(f"results: {out}")
    if json:
        print_json(document)
    else:
        print_table(
            ("case", "kernel", "density", "median", "spread", "efficiency", "speed-up", "error"),
            [_cells(row) for row in document["rows"]],
            title=str(document["environment"]["device"]),
        )


def _parse_densities(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"--densities takes numbers above 0, at most 1, with commas; got {text!r}")
    return shares


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row as text."""
    error = "" if row["rel_error"] is None else f"{row['rel_error']:.1e}"
    return (
        row["case"],
        row["kernel"],
        f"{row['density']:.2f}",
        f"{row['median_ms']:.2f} ms",
        f"{row['spread_ms']:.2f} ms",
        f"{row['efficiency']:.2f}",
        f"{row['speedup']:.2f}x",
        error,
    )
