"""`gossamer bench`: what it refuses, what it asks of the harness, and what it shows."""

from __future__ import annotations

import json

import pytest
import torch

from gossamer.cli import bench as command
from gossamer.evaluation.bench.plan_cases import DEFAULT_CASES

TIMING = {"median_ms": 10.0, "spread_ms": 0.1, "peak_extra_bytes": 3 << 20}
KERNEL_ROW = {
    "case": "intra8-16384-causal",
    "stage": "scatter",
    "kernel": "triton",
    "num_tokens": 16_384,
    "density": 0.1,
    **TIMING,
    "prepare_ms": 0.0,
    "layers": 0,
    "dense_ms": 60.0,
    "dense_kernel": "cudnn",
    "efficiency": 0.6,
    "speedup": 6.0,
    "rel_error": 0.0025,
}
PLAN_ROW = {
    "case": "instagen-75600",
    "stage": "warm",
    **TIMING,
    "dense_ms": 50.0,
    "dense_kernel": "flash-attn-4",
    "dense_share": 0.2,
    "synchronisations": 3,
    "density": 0.16,
}
MODEL_ROW = {
    "case": "wan2.1-1.3b-480p",
    "recipe": "blocks-50-fixed",
    "layers": 30,
    "model_layers": 30,
    **TIMING,
    "attention_ms": 5.5,
    "attention_share": 0.55,
    "plan_ms": 0.1,
    "plan_share": 0.01,
    "density": 0.5,
    "kernel": "flash",
    "peak_bytes": 5 << 30,
    "shared_anchor_bytes": None,
    "rel_error": 0.002,
    "dense_ms": 13.0,
    "dense_kernel": "cudnn",
    "speedup": 1.3,
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["everything"], "cannot time 'everything': known are kernels, plans, model"),
        (["kernels", "--cases", "tokens-1"], "unknown case 'tokens-1': known are tokens-75600"),
        (["plans", "--cases", "x,svg2-75600"], "unknown case 'x': known are instagen-75600"),
        (["model", "--cases", "x"], "unknown case 'x': known are wan2.1-14b-720p"),
        (["kernels", "--densities", ".1,2"], "--densities takes numbers above 0, at most 1"),
        (["kernels", "--densities", "x"], "--densities takes numbers"),
        (["plans", "--densities", ".1"], "--densities is for bench kernels, and this is bench pl"),
        (["kernels", "--kernels", "triton,x"], "unknown kernel 'x': known are hopper"),
        (["model", "--kernels", "flash"], "--kernels is for bench kernels, and this is bench mod"),
        (["kernels", "--layers", "2"], "--layers is for bench model, and this is bench kernels"),
        (["model", "--layers", "31"], "--layers 31: wan2.1-1.3b-720p has 30"),
        (["plans", "--seconds", "soon"], "Invalid value for '--seconds'"),
        (["plans", "--seconds", "-1"], "Invalid value for '--seconds'"),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    result = run("bench", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["kernels", "plans", "model"])
def test_without_a_gpu_it_says_so(run, monkeypatch, what):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("bench", what)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"bench {what} needs a CUDA device, and torch finds none here" in result.stderr


@pytest.fixture
def asked(monkeypatch):
    """What the harness was asked for; it answers with one row of each kind."""
    asked: dict[str, object] = {}

    def answer(row):
        def measure(**arguments):
            asked.update(arguments)
            return {
                "environment": {"device": "some GPU"},
                "rows": [row],
                "failures": asked.get("failures", []),
                "missing": [],
            }

        return measure

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "bench_kernels", answer(KERNEL_ROW))
    monkeypatch.setattr(command, "bench_plans", answer(PLAN_ROW))
    monkeypatch.setattr(command, "bench_model", answer(MODEL_ROW))
    return asked


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("kernels", ["intra8-16384-causal scatter", "triton", "10.00 ms", "0.60", "6.00x"]),
        ("plans", ["instagen-75600", "warm", "20.0%", "3 MiB", "0.160"]),
        ("model", ["blocks-50-fixed", "10.0 ms", "55.0%", "1.0%", "1.30x", "5.0 GiB"]),
    ],
)
def test_rows_are_shown(run, asked, what, shown):
    result = run("bench", what)
    assert result.exit_code == 0
    assert all(text in result.stdout for text in shown), result.stdout
    assert asked["run"].seconds is None


def test_json_is_the_document(run, asked):
    result = run("bench", "plans", "--json")
    assert json.loads(result.stdout)["rows"] == [PLAN_ROW]


def test_options_reach_the_harness(run, asked, tmp_path):
    out = tmp_path / "kernels.json"
    arguments = ["--cases", "tokens-75600", "--densities", ".1", "--kernels", "triton"]
    result = run("bench", "kernels", *arguments, "--out", out, "--seconds", "90")
    assert result.exit_code == 0
    assert [case.name for case in asked["cases"]] == ["tokens-75600"]
    assert (asked["densities"], asked["kernels"]) == ([0.1], ["triton"])
    assert (asked["run"].out, asked["run"].seconds) == (out, 90)
    assert f"results: {out}" in result.stderr


def test_plans_run_at_the_large_size_unless_asked(run, asked):
    run("bench", "plans")
    assert asked["cases"] == list(DEFAULT_CASES)
    run("bench", "plans", "--cases", "svg2-32760,pddp-75600")
    assert [case.name for case in asked["cases"]] == ["pddp-75600", "svg2-32760"]


def test_a_model_of_fewer_layers_is_named_so(run, asked):
    run("bench", "model", "--cases", "wan2.1-14b-720p", "--layers", "4")
    (model,) = asked["models"]
    assert (model.name, model.run_layers) == ("wan2.1-14b-720p-4-of-40-layers", 4)
    run("bench", "model", "--cases", "wan2.1-14b-720p", "--layers", "40")
    assert asked["models"][0].name == "wan2.1-14b-720p"


def test_refused_figures_are_an_error(run, asked):
    asked["failures"] = [{"case": "x", "failure": "wrong"}]
    result = run("bench", "kernels")
    assert result.exit_code == 1
    assert "intra8-16384-causal" in result.stdout
