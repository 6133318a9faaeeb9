"""`gossamer doctor`: complete, and true to pyproject.toml."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import gossamer as gs
from gossamer.cli import doctor as doctor_module

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_json(run):
    result = run("doctor", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["environment"]["gossamer"] == gs.__version__
    assert set(report["kernels"]) == set(gs.list_kernels())
    assert report["kernels"]["reference"] == []
    assert report["recipes"] == gs.list_recipes()
    assert "found" in report["models"]["tiny-wan"]


def test_text_names_what_is_missing_and_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(doctor_module, "package_version", lambda _: None)
    result = run("doctor")
    assert result.exit_code == 0
    assert "missing peft" in result.stdout
    assert 'pip install "gossamer[lora]"' in result.stdout
    for kernel in gs.list_kernels():
        assert kernel in result.stdout


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for bundle in ("docs", "dev", "all"):  # nothing that a feature waits for
        del project[bundle]
    names = {
        extra: [re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements]
        for extra, requirements in project.items()
    }
    assert names == {extra: list(packages) for extra, packages in doctor_module.EXTRAS.items()}
