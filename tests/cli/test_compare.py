"""`gossamer compare`: the harness from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROMPT = "a red star moves"
METHODS = ("--methods", "dense,block-topk@.5,instagen-uniform@.3")
NAMES = ["dense", "block-topk", "instagen-uniform"]


def test_results_videos_and_a_table(run, pipe):
    result = run("compare", PROMPT, *METHODS, "--out", "out")
    assert result.exit_code == 0, result.output
    document = json.loads(Path("out/results.json").read_text())
    assert [entry["method"] for entry in document["runs"]] == NAMES
    assert document["settings"]["model"] == "tiny-wan"
    assert all((Path("out") / entry["video"]).is_file() for entry in document["runs"])
    for word in (*NAMES, "PSNR", "speed-up", "kernel"):
        assert word in result.stdout
    assert "[3/3] instagen-uniform@0.3, seed 0" in result.stderr


def test_json_is_the_document(run, pipe):
    result = run("compare", PROMPT, *METHODS, "--out", "out", "--json")
    assert json.loads(result.stdout) == json.loads(Path("out/results.json").read_text())


def test_prompts_from_a_file_seeds_and_recipes(run, pipe):
    Path("prompts.txt").write_text("a red star moves\n\na blue ring moves\n")
    result = run(
        *("compare", "--prompts-file", "prompts.txt", "--recipe", "block-topk", "--seeds", "1,2"),
        *("--out", "out", "--json"),
    )
    runs = json.loads(result.stdout)["runs"]
    assert len(runs) == 2 * 2 * 2
    assert {entry["method"] for entry in runs} == {"dense", "block-topk"}
    assert {entry["seed"] for entry in runs} == {1, 2}


def test_ctrl_c_says_how_to_resume_and_the_next_call_does(run, pipe):
    pipe.fail_at = {3: KeyboardInterrupt()}  # two warm-ups and the dense run are done
    result = run("compare", PROMPT, *METHODS, "--out", "out")
    assert result.exit_code == 130
    last = "interrupted: 1 of 3 runs are finished; the same command resumes from out"
    assert result.stderr.splitlines()[-1] == last
    assert result.stdout == ""
    pipe.calls.clear()
    assert run("compare", PROMPT, *METHODS, "--out", "out").exit_code == 0
    assert [call["steps"] for call in pipe.calls] == [1, 3, 1, 3]


def test_resume_and_no_resume(run, pipe):
    for expected, option in ((6, "--resume"), (0, "--resume"), (6, "--no-resume")):
        pipe.calls.clear()
        assert run("compare", PROMPT, *METHODS, "--out", "out", option).exit_code == 0
        assert len(pipe.calls) == expected


def test_shards_fill_one_folder(run, pipe):
    prompts = (PROMPT, "a blue ring moves")
    for shard, expected in (("1/2", 3), ("2/2", 6)):
        result = run("compare", *prompts, *METHODS, "--out", "out", "--shard", shard, "--json")
        assert len(json.loads(result.stdout)["runs"]) == expected


def test_the_schedule_goes_to_every_method(run, pipe):
    result = run("compare", PROMPT, *METHODS, "--dense-steps", ".3", "--out", "out", "--json")
    recipes = json.loads(result.stdout)["recipes"]
    assert "dense_steps = 0.3" in recipes["block-topk"]
    assert "dense_steps" not in recipes["dense"]


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_the_demo(run, pipe, extra):
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    result = run("compare", "--demo", "--out", "out/demo", *extra)
    assert result.exit_code == 0, result.output
    document = json.loads(Path("out/demo/results.json").read_text())
    runs = [(entry["method"], entry["density_asked"]) for entry in document["runs"]]
    assert runs == [("dense", 1.0), ("instagen", 0.15), ("svg2", 0.15)]
    assert {entry["prompt"] for entry in document["runs"]} == {PROMPT}
    for name in ("dense.mp4", "instagen.mp4", "svg2.mp4", "report.html"):
        assert (Path("out/demo") / name).stat().st_size > 0
    if extra:
        assert json.loads(result.stdout) == document
