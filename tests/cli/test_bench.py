"""`gossamer bench`: what it refuses, and what it asks of the harness."""

from __future__ import annotations

import json

import pytest
import torch

from gossamer.cli import bench as command
from gossamer.evaluation.bench import kernels as harness
from gossamer.evaluation.bench.timing import Timing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plans"], "cannot time 'plans': known are kernels"),
        (["kernels", "--cases", "tokens-1"], "unknown case 'tokens-1': known are tokens-75600"),
        (["kernels", "--densities", ".1,2"], "--densities takes numbers above 0, at most 1"),
        (["kernels", "--densities", "x"], "--densities takes numbers"),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_without_a_gpu_it_says_so(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("bench", "kernels")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "timed on a CUDA device, and torch finds none" in result.stderr


def test_rows_are_shown_and_written(run, monkeypatch, tmp_path):
    row = {
        "case": "tokens-75600",
        "kernel": "triton",
        "density": 0.1,
        "median_ms": 10.0,
        "spread_ms": 0.1,
        "peak_extra_bytes": 0,
        "dense_ms": 60.0,
        "dense_kernel": "cudnn",
        "efficiency": 0.6,
        "speedup": 6.0,
        "rel_error": 0.0025,
    }
    asked = {}

    def measure(**arguments):
        asked.update(arguments)
        return {"environment": {"device": "some GPU"}, "rows": [row]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "bench_kernels", measure)
    out = tmp_path / "kernels.json"
    arguments = ["--cases", "tokens-75600", "--densities", ".1", "--kernels", "triton"]
    result = run("bench", "kernels", *arguments, "--out", str(out))
    assert result.exit_code == 0
    assert all(text in result.stdout for text in ("triton", "10.00 ms", "0.60", "6.00x", "2.5e-03"))
    assert [case.name for case in asked["cases"]] == ["tokens-75600"]
    assert (asked["densities"], asked["kernels"]) == ([0.1], ["triton"])
    assert json.loads(out.read_text())["rows"] == [row]


@pytest.mark.parametrize("installed", [False, True])
def test_the_fastest_dense_attention_is_the_yardstick(monkeypatch, installed):
    """flash-attn-4 counts where it runs, and takes its tensors with heads behind tokens."""
    asked = []
    monkeypatch.setattr(harness, "unavailable", lambda device: [] if installed else ["no"])
    monkeypatch.setattr(harness, "_flash_attention", lambda: lambda *x: asked.extend(x))
    times = iter([50.0, 80.0, 40.0])

    def time(call):
        if installed and not asked:
            call()
        return Timing(median_ms=next(times), spread_ms=0.0, peak_extra_bytes=0)

    monkeypatch.setattr(harness, "time_call", time)
    q = torch.randn(1, 2, 8, 4)
    monkeypatch.setattr(harness.functional, "scaled_dot_product_attention", lambda *x: None)
    timing, name, found = harness._fastest_dense(q, q, q)
    names = ["cudnn", "flash-2"] + ["flash-attn-4"] * installed
    assert [name for name, _ in found] == names
    assert (timing.median_ms, name) == ((40.0, "flash-attn-4") if installed else (50.0, "cudnn"))
    assert [x.shape for x in asked] == [(1, 8, 2, 4)] * 3 * installed
