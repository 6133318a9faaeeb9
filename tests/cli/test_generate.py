"""`gossamer generate`: a video file and what it cost."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from gossamer.cli import generate as generate_module
from gossamer.evaluation.video import read_video

PROMPT = "a red star moves"


def test_a_video_is_written_and_described(run, pipe):
    result = run("generate", PROMPT, "--method", "svg2", "--density", ".15", "--out", "a/b.mp4")
    assert result.exit_code == 0, result.output
    assert read_video(Path("a/b.mp4")).shape == (4, 32, 32, 3)
    assert [path.name for path in Path("a").iterdir()] == ["b.mp4"]
    for word in ("a/b.mp4", "svg2@0.15", "density", "attention", "kernel"):
        assert word in result.stdout
    assert "short: 256 tokens" in result.stdout  # why the fake model's calls ran dense


def test_json_is_all_there_is_on_stdout(run, pipe):
    result = run("generate", PROMPT, "--density", ".15", "--json")
    facts = json.loads(result.stdout)
    assert facts["out"] == "out.mp4"
    assert (facts["method"], facts["density_asked"]) == ("instagen", 0.15)
    assert {"density", "attention_ms", "plan_ms", "total_ms", "kernel", "dense_steps"} <= set(facts)


def test_the_models_defaults_apply_unless_given(run, pipe):
    assert run("generate", PROMPT).exit_code == 0
    assert run("generate", PROMPT, "--steps", 2, "--guidance-scale", 0).exit_code == 0
    assert [call["steps"] for call in pipe.calls] == [3, 2]
    assert [call["scale"] for call in pipe.calls] == [3.0, 0.0]


def test_a_folder_without_defaults_takes_the_pipelines(run, pipe, folder):
    (folder / "prompts.json").unlink()
    result = run("generate", "any words", "--model", folder, "--out", "x.mp4")
    assert result.exit_code == 0, result.output
    assert [call["steps"] for call in pipe.calls] == [4]


def test_recipes_by_name_and_by_file(run, pipe, tmp_path):
    (tmp_path / "mine.toml").write_text('dense_steps = 1\n[method]\nname = "block-topk"\n')
    for recipe, name in (("block-topk", "block-topk"), (tmp_path / "mine.toml", "mine")):
        result = run("generate", PROMPT, "--recipe", recipe, "--json")
        assert json.loads(result.stdout)["method"] == name


def test_a_full_disk_at_the_end_leaves_the_old_video(run, pipe, monkeypatch):
    Path("a.mp4").write_bytes(b"old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate_module, "write_video", full)
    result = run("generate", PROMPT, "--out", "a.mp4")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: no space left on device; free")
    assert Path("a.mp4").read_bytes() == b"old"


def test_ctrl_c_writes_nothing(run, pipe):
    pipe.fail_at = {0: KeyboardInterrupt()}
    result = run("generate", PROMPT)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted: nothing half-written is left"
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_command_gives_the_same_frames(run, pipe, monkeypatch, seed):
    videos = []  # of frames: x264 does not promise the same bytes twice
    monkeypatch.setattr(
        generate_module, "write_video", lambda _, frames, **__: videos.append(frames)
    )
    for _ in range(2):
        assert run("generate", PROMPT, "--seed", seed).exit_code == 0
    assert torch.equal(*videos)
