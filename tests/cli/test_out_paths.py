"""Every path that a command writes at its end is checked before anything is loaded or run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gossamer.cli import model as model_module
from gossamer.evaluation.video import FORMATS, read_video

PROMPT = "a red star moves"


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, pipe):
    """Fail where a model is loaded or a device is asked for."""

    def refuse(*_, **__):
        raise AssertionError("the path was not checked first")

    monkeypatch.setattr(model_module, "load_pipeline", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)


def commands(out: str) -> dict[str, list[str]]:
    """Return every command that writes one file, by what it would take for a name."""
    return {
        "generate": ["generate", PROMPT, "--device", "cpu", "--out", out],
        "calibrate": ["calibrate", PROMPT, "--device", "cpu", "--out", out],
        "kernels": ["bench", "kernels", "--out", out],
        "plans": ["bench", "plans", "--out", out],
        "model": ["bench", "model", "--out", out],
        "methods": ["methods", "dense", "--draw", out],
        "report": ["report", "results.json", "--out", out],
    }


SUFFIXES = {
    "generate": ".mp4 or .m4v or .mov or .mkv",
    "calibrate": ".safetensors",
    "kernels": ".json",
    "plans": ".json",
    "model": ".json",
    "methods": ".png or .svg",
    "report": ".html or .htm",
}


def refused(run, arguments, *words):
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert not [path for path in Path.cwd().rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_folder_in_the_place_of_a_file(run, name):
    Path("here.mp4").mkdir()
    for out in (".", "here.mp4"):
        advice = f"{out}: is a directory; name a file, not a folder"
        refused(run, commands(out)[name], advice)


@pytest.mark.parametrize("out", ["x.gif", "x", "x.tar.xyz"])
@pytest.mark.parametrize("name", SUFFIXES)
def test_a_suffix_that_is_not_written(run, name, out):
    refused(run, commands(out)[name], f"{out}: the name must end in {SUFFIXES[name]}")


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_file_in_the_way_of_a_folder(run, tmp_path, name):
    (tmp_path / "file").touch()
    suffix = SUFFIXES[name].split(" or ")[0]
    out = str(tmp_path / "file" / f"a{suffix}")
    refused(run, commands(out)[name], "not a directory; a part of the path is a file")


@pytest.mark.parametrize("arguments", [["compare", PROMPT], ["fidelity", "--input", "low-entropy"]])
def test_a_file_in_the_place_of_a_folder(run, tmp_path, arguments):
    (tmp_path / "file").touch()
    refused(run, [*arguments, "--device", "cpu", "--out", str(tmp_path / "file")], "not a dir")


@pytest.mark.parametrize("suffix", [*FORMATS, ".MP4"])
def test_a_video_is_what_its_suffix_says(run, pipe, monkeypatch, suffix):
    pytest.importorskip("av")
    monkeypatch.setattr(model_module, "load_pipeline", lambda *_, **__: pipe)
    arguments = ["--method", "dense", "--device", "cpu", "--out", f"new/a{suffix}"]
    result = run("generate", PROMPT, *arguments)
    assert result.exit_code == 0, result.output
    data = Path(f"new/a{suffix}").read_bytes()
    matroska = data.startswith(b"\x1aE\xdf\xa3")
    assert matroska == (suffix == ".mkv")
    assert (data[4:12] == b"ftypqt  ") == (suffix == ".mov")
    assert read_video(Path(f"new/a{suffix}")).shape == (4, 32, 32, 3)
