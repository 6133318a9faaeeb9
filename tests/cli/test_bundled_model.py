"""The real pipeline, once, at its smallest sparse size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gossamer import models
from gossamer.evaluation.video import read_video

pytest.importorskip("diffusers")

SIZE = ("--height", 96, "--width", 96, "--steps", 1)  # 1152 tokens: just long enough to be sparse


@pytest.fixture(autouse=True)
def _needs_the_model():
    if not (models.tiny_wan_path() / "model_index.json").is_file():
        pytest.skip("the bundled model is not in this checkout")


def test_a_sparse_generation(run):
    prompt = models.example_prompts()[0]
    result = run("generate", prompt, "--method", "svg2", "--density", ".15", *SIZE, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["density"] == pytest.approx(0.15, abs=0.02)
    assert facts["sparse_calls"] == facts["calls"] > 0
    assert read_video(Path("out.mp4")).shape[1:] == (96, 96, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["an elephant"], "tiny-wan does not know 'an', 'elephant'"),
        (["a red star", "--height", 100], "height must be a multiple of 16 for this model"),
        (["a red star", "--num-frames", 28], "use 25 or 29"),
    ],
)
def test_what_it_cannot_do_is_one_line(run, arguments, message):
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
