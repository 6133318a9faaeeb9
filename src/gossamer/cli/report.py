"""`gossamer report`: a results document as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.cli import options
from gossamer.cli.console import print_json, say
from gossamer.evaluation.files import check_file


def report(
    results: Annotated[Path, typer.Argument(help="A results.json of `gossamer compare`.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The page to write.", show_default="report.html beside the results"
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write the report of a comparison as one HTML file.

    Example: gossamer report out/red/results.json --out red.html
    """
    page = results.with_name("report.html") if out is None else out
    make_report(results, page)
    if json:
        print_json({"out": str(page)})
    else:
        say(f"report: {page}")


def make_report(results: Path, page: Path) -> None:
    """Write the report, importing its packages only now.

    Raises:
        ReportError: The results are missing or garbled.
        MissingExtraError: The packages of the extra `report` are not installed.
        ValueError: The page's name ends in something else than .html.
        OSError: The page cannot be written.
    """
    from gossamer.report import write_report

    check_file(page, (".html", ".htm"))
    write_report(results, page)
