"""A results folder and its report, made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.report import write_report
from gossamer.report.document import Results, read_results
from gossamer.report.summary import Summary, summarise
from report.synthetic import write_results


@pytest.fixture(scope="session")
def results_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results.json of a complete folder; not to be changed."""
    return write_results(tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="session")
def results(results_json: Path) -> Results:
    return read_results(results_json)


@pytest.fixture(scope="session")
def summary(results: Results) -> Summary:
    return summarise(results)


@pytest.fixture(scope="session")
def report_html(results_json: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(results_json, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def changed(results_json: Path, tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """Copy the folder, change its document in place, return the copy's results.json."""

    def change(edit: Callable[[Any], None]) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(results_json.parent, folder)
        path = folder / results_json.name
        document = json.loads(path.read_text(encoding="utf-8"))
        edit(document)
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    return change
