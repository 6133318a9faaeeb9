"""The command line in-process, on a fake model folder and the fake pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import gossamer as gs
from evaluation.fake_pipeline import FakePipeline, apply_fake
from gossamer import models
from gossamer.cli import model as model_module
from gossamer.cli.app import app

DEFAULTS = {"height": 32, "width": 32, "num_frames": 4, "num_inference_steps": 3}
HELD_OUT = ["a red star moves", "a blue ring moves"]
WORDS = sorted({word for prompt in HELD_OUT for word in prompt.split()})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the bundled model's."""
    path = tmp_path / "model"
    (path / "tokenizer").mkdir(parents=True)
    defaults = {**DEFAULTS, "guidance_scale": 3.0, "fps": 12}
    prompts = {"defaults": defaults, "held_out": HELD_OUT}
    (path / "prompts.json").write_text(json.dumps(prompts))
    vocabulary = {"model": {"vocab": {word: index for index, word in enumerate(WORDS)}}}
    (path / "tokenizer" / "tokenizer.json").write_text(json.dumps(vocabulary))
    return path


@pytest.fixture
def pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    """The fake pipeline, which every model folder loads as, the bundled one's too."""
    pipe = FakePipeline()
    monkeypatch.setattr(gs, "apply", apply_fake)
    monkeypatch.setattr(models, "tiny_wan_path", lambda: folder)
    monkeypatch.setattr(model_module, "load_pipeline", lambda *_, **__: pipe)
    return pipe


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command in an empty folder: `run("compare", "x", "--json")`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tensors of a few kilobytes are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
