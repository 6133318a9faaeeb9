"""`gossamer fidelity`: captures, measurements and the plot from the command line."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from evaluation.fake_pipeline import GRID, HEADS, LAYERS, TOKENS
from gossamer.cli import fidelity as cli
from gossamer.cli.app import OneLineErrors
from gossamer.evaluation.captures import Capture
from gossamer.report.fidelity import _spread, fidelity_plot, write_fidelity_plot

app = typer.Typer(cls=OneLineErrors, pretty_exceptions_enable=False, rich_markup_mode=None)
app.callback()(lambda: None)
app.command()(cli.fidelity)

FAST = ("--method", "svg2", "--density", ".5", "--seeds", "2", "--grid", "2,4,8")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def invoke(*arguments):
        return CliRunner().invoke(app, ["fidelity", *map(str, arguments)])

    return invoke


def check_error(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_results_and_a_table_per_input(run):
    result = run(*FAST, "--out", "out")
    assert result.exit_code == 0, result.output
    document = json.loads(Path("out/fidelity.json").read_text())
    assert [row["input"] for row in document["rows"]] == ["high-entropy", "low-entropy"]
    for word in ("high-entropy: 64 tokens", "low-entropy: 64 tokens", "svg2@0.5", "Hellinger"):
        assert word in result.stdout
    assert "[2/2] svg2@0.5 on low-entropy" in result.stderr
    assert "results: out/fidelity.json" in result.stderr


def test_json_is_the_document(run):
    result = run(*FAST, "--json", "--out", "out")
    assert json.loads(result.stdout) == json.loads(Path("out/fidelity.json").read_text())


def test_help_has_an_example(run):
    result = run("--help")
    assert result.exit_code == 0
    assert "Example: gossamer fidelity" in result.stdout
    assert "--json" in result.stdout


def test_lists_are_repeated_or_have_commas(run):
    result = run(
        *("--input", "low-entropy", "--grid", "2,4,8", "--seeds", 1, "--json"),
        *("--method", "svg2,block-topk@.3", "--method", "instagen", "--density", ".5,.6"),
        *("--density", ".7"),
    )
    rows = json.loads(result.stdout)["rows"]
    asked = [(row["method"], row["density_asked"]) for row in rows]
    assert asked == [
        *(("svg2", density) for density in (0.5, 0.6, 0.7)),
        ("block-topk", 0.3),
        *(("instagen", density) for density in (0.5, 0.6, 0.7)),
    ]


def test_a_capture_is_kept_measured_and_read_again(run, pipe):
    options = ("--method", "svg2@.5", "--seeds", 1, "--json", "--out", "out")
    result = run("--capture", "tiny-wan", *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (source,) = document["inputs"]
    assert source["input"] == "tiny-wan-capture"
    assert (source["model"], source["grid"]) == ("tiny-wan", list(GRID))
    assert source["steps"] == [1]  # the middle one of three
    assert len(source["heads"]) == LAYERS * HEADS
    assert pipe.calls[0]["prompt"] == "a red star moves"
    again = run("--input", "out/tiny-wan-capture.safetensors", *options)
    assert json.loads(again.stdout)["rows"] == document["rows"]
    assert "svg2@0.5 on" not in again.stderr  # the cell was found finished


def test_only_the_chosen_calls_are_kept(run, pipe):
    result = run(
        *("--capture", "tiny-wan", "--only-capture", "--out", "out", "--steps", 5, "--seed", 3),
        *("--capture-steps", "1-2,4", "--capture-layers", 1, "--capture-heads", 1),
        *("--capture-branch", "uncond", "--capture-dtype", "bfloat16", "--json"),
        *("--prompt", "a blue ring moves"),
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["steps"] == [1, 2, 4]
    assert (facts["layers"], facts["heads"], facts["tokens"]) == ([1], [1], TOKENS)
    capture = Capture.open(Path(facts["out"]))
    assert capture.keys == tuple((step, 1, "uncond") for step in (1, 2, 4))
    assert capture.read(capture.keys[0]).q.shape[0] == 1
    assert str(capture.read(capture.keys[0]).q.dtype) == "torch.bfloat16"
    assert pipe.calls == [{"prompt": "a blue ring moves", "steps": 5, "scale": 3.0}]
    assert not Path("out/fidelity.json").exists()


def test_what_a_capture_holds_is_said(run, pipe):
    result = run("--capture", "tiny-wan", "--only-capture", "--out", "out")
    assert result.exit_code == 0, result.output
    assert re.search(r"^grid +4, 8, 8$", result.stdout, re.MULTILINE)


def test_ctrl_c_says_how_to_resume_and_the_next_call_does(run, monkeypatch):
    measure, calls = cli.measure, []

    def interrupted(fidelity, out, *, resume, on_progress):
        def stop(progress):
            on_progress(progress)
            if progress.cells_done:
                raise KeyboardInterrupt

        return measure(fidelity, out, resume=resume, on_progress=stop)

    monkeypatch.setattr(cli, "measure", interrupted)
    result = run(*FAST, "--out", "out")
    assert result.exit_code == 130
    last = "interrupted: 1 of 2 cells are finished; the same command resumes from out"
    assert result.stderr.splitlines()[-1] == last
    monkeypatch.setattr(
        cli,
        "measure",
        lambda *given, on_progress, **more: measure(*given, on_progress=calls.append, **more),
    )
    assert run(*FAST, "--out", "out").exit_code == 0
    assert {progress.cell for progress in calls} == {"svg2@0.5 on low-entropy"}
    calls.clear()
    assert run(*FAST, "--out", "out", "--no-resume").exit_code == 0
    assert len({progress.cell for progress in calls}) == 2


def test_skipped_cells_are_said(run, monkeypatch):
    measure = cli.measure

    def with_skipped(*given, **more):
        skipped = {"input": "x", "method": "svg2", "density_asked": 0.5, "reason": "too odd"}
        return measure(*given, **more) | {"skipped": [skipped]}

    monkeypatch.setattr(cli, "measure", with_skipped)
    assert "skipped: svg2@0.5 on x: too odd" in run(*FAST, "--out", "out").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--input", "hi-entropy"), ("unknown input", "did you mean 'high-entropy'")),
        (("--input", "here.safetensors"), ("no such file",)),
        (("--input", "low-entropy", "--input", "low-entropy"), ("two inputs", "low-entropy")),
        (("--method", "block-topc"), ("did you mean 'block-topk'",)),
        (("--method", "svg2,svg2"), ("given 2 times",)),
        (("--density", "1.5"), ("above 0 and at most 1",)),
        (("--density", "half"), ("--density", "half")),
        (("--grid", "8x20x26"), ("--grid", "8,20,26")),
        (("--grid", "8,20,2600"), ("100000 tokens",)),
        (("--seeds", "0"), ("--seeds",)),
        (("--only-capture",), ("--capture MODEL",)),
        (("--capture-steps", "3"), ("--capture MODEL",)),
        (("--num-frames", "9"), ("--capture MODEL",)),
        (("--capture", "nowhere"), ("unknown model 'nowhere'",)),
        (("--out", "file"), ("file",)),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    Path("file").write_text("")
    check_error(run("--seeds", "1", *arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capture-dtype", "int8"), ("unknown dtype 'int8'", "float16")),
        (("--capture-steps", "5-3"), ("--capture-steps", "backwards")),
        (("--capture-steps", "77"), ("nothing was captured", "steps=77")),
        (("--capture-heads", "9"), ("heads 0 to 1",)),
        (("--prompt", "a green star"), ("green",)),
    ],
)
def test_a_bad_capture_is_one_line(run, pipe, arguments, words):
    result = run("--capture", "tiny-wan", "--only-capture", "--out", "out", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: ")
    for word in words:
        assert word in result.stderr.splitlines()[-1]
    assert not list(Path().rglob("*.safetensors*"))


# The plot.


def document_of(methods, inputs=("high-entropy", "low-entropy", "tiny-wan")):
    densities = (0.12, 0.24, 0.48)
    return {
        "inputs": [
            {"input": name, "tokens": 4160, "heads": ["h"] * 4, "calls": 1, "entropy": 0.5}
            for name in inputs
        ],
        "rows": [
            {
                "input": name,
                "method": method,
                "density": density * (1 + 0.01 * index),
                "rel_l2": 0.1 / density / (1 + index % 7),
            }
            for name in inputs
            for index, method in enumerate(methods)
            for density in densities
        ],
    }


MANY = ["instagen-importance", "mc-sparse", *(f"method-{index}" for index in range(23))]


def test_the_plot_shows_every_point_and_every_name_inside_the_picture(tmp_path):
    path = write_fidelity_plot(document_of(MANY), tmp_path / "plot.svg")
    root = ET.parse(path).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 3
    for panel in panels:
        left, top = map(float, panel.attrib["transform"][10:-1].split())
        markers = [x for x in panel.iter() if x.get("class") == "m"]
        assert len(markers) == 3 * len(MANY)
        assert all(marker.find(f"{SVG}title") is not None for marker in markers)
        names = [x for x in panel.iter(f"{SVG}text") if x.get("class") == "n"]
        assert sorted(name.text for name in names) == sorted(MANY)
        places = sorted(float(name.attrib["y"]) for name in names)
        assert min(b - a for a, b in itertools.pairwise(places)) > 14
        assert 0 < top + places[0] < top + places[-1] < height
        assert all(left + float(name.attrib["x"]) < width - 100 for name in names)


def test_the_systems_stand_out_among_many_and_few_are_all_coloured():
    def classes(methods):
        root = ET.fromstring(fidelity_plot(document_of(methods, ["x"])))
        groups = [x for x in root.iter(f"{SVG}g") if x.find(f"{SVG}text[@class='n']") is not None]
        return {group.find(f"{SVG}text").text: group.attrib["class"] for group in groups}

    many = classes(MANY)
    assert {name for name, kind in many.items() if kind != "o"} == set(MANY[:2])
    assert "o" not in classes(MANY[:8]).values()


def test_names_in_the_plot_cannot_break_it():
    document = document_of(["a<b>&c"], ["<x>"])
    root = ET.fromstring(fidelity_plot(document))
    assert "a<b>&c" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_plot_of_nothing_says_so():
    document = document_of(["dense"], ["x"])
    assert "nothing was measured" in fidelity_plot(document)


def test_labels_move_no_further_than_they_must():
    assert _spread([10, 50, 90], 10, (0, 100)) == [10, 50, 90]
    assert _spread([50, 50, 50], 10, (0, 100)) == [40, 50, 60]
    assert _spread([0, 1], 10, (0, 100)) == [0, 10]
    assert _spread([99, 100], 10, (0, 100)) == [90, 100]
    assert _spread([5, 6, 7, 8], 50, (0, 90)) == [0, 30, 60, 90]


def test_the_plot_from_the_command(run):
    result = run(*FAST, "--plot", "--out", "out")
    assert "plot: out/fidelity.svg" in result.stderr
    ET.parse("out/fidelity.svg")
