"""`gossamer report`: a page from a results file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROMPT = "a red star moves"


@pytest.fixture
def results(run, pipe) -> Path:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    done = run("compare", PROMPT, "--methods", "block-topk@.5", "--out", "out")
    assert done.exit_code == 0, done.output
    return Path("out/results.json")


def test_a_page_beside_the_results(run, results):
    result = run("report", results)
    assert result.exit_code == 0, result.output
    assert (result.stdout, result.stderr) == ("", "report: out/report.html\n")
    assert "block-topk" in Path("out/report.html").read_text()


def test_a_page_elsewhere_and_json(run, results):
    result = run("report", results, "--out", "pages/a.html", "--json")
    assert json.loads(result.stdout) == {"out": "pages/a.html"}
    assert Path("pages/a.html").is_file()


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": []}', '{"runs": [{"prompt": 3}]}'])
def test_a_garbled_file_is_one_line_and_no_page(run, text):
    Path("results.json").write_text(text)
    result = run("report", "results.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: results.json")
    assert result.stderr.count("\n") == 1
    assert not Path("report.html").exists()
