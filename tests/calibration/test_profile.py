"""Profile files: what is in them, who may read them, and how they are written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import gossamer as gs
from calibration.profiles import (
    BLOCK,
    BUCKETS,
    GRID,
    HEADS,
    LAYERS,
    STEPS,
    make_profile,
    random_maps,
)
from gossamer.calibration import load_profile, shards
from gossamer.select.profile import FORMAT, METADATA_KEY, read_profile


def test_what_is_written_is_read(tmp_path: Path):
    profile = load_profile(make_profile(tmp_path / "p.safetensors", permute="axis"))
    assert (profile.num_layers, profile.num_heads, profile.grid) == (LAYERS, HEADS, GRID)
    assert (profile.num_buckets, profile.num_steps, profile.block) == (BUCKETS, STEPS, BLOCK)
    assert (profile.model, profile.permute) == ("toy", "axis")
    assert profile.metadata["prompts"] == ["a", "b"]
    for bucket in range(BUCKETS):
        for layer in range(LAYERS):
            got = profile.thresholds(bucket, layer, GRID)
            assert torch.equal(got, random_maps()[bucket, layer])


def test_the_same_profile_has_the_same_bytes(tmp_path: Path):
    files = [Path(make_profile(tmp_path / f"{i}.safetensors")) for i in range(4)]
    assert len({file.read_bytes() for file in files}) == 1


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"model": "other"}, "expected model='other', but the profile has 'toy'"),
        ({"num_layers": 30}, "expected num_layers=30, but the profile has 2"),
        ({"num_heads": 6}, "expected num_heads=6, but the profile has 4"),
        ({"num_layers": 30, "num_heads": 6}, "num_layers=30.*num_heads=6"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, wanted, words):
    path = make_profile(tmp_path / "p.safetensors")
    with pytest.raises(gs.ProfileMismatchError, match=words):
        load_profile(path, **wanted)
    right = {"model": "toy", "num_layers": LAYERS, "num_heads": HEADS}
    load_profile(path, **right)


def test_another_resolution_is_reported_and_not_refused(tmp_path: Path):
    path = make_profile(tmp_path / "p.safetensors")
    with pytest.warns(UserWarning, match=r"\(4, 4, 6\), this call has \(8, 4, 6\)"):
        profile = load_profile(path, grid=(8, 4, 6))
    assert profile.thresholds(0, 0, (8, 4, 6)).shape == (HEADS, 12, 12)


def rewritten(path: Path, **changes) -> str:
    """Write a copy of a profile with other metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    copy = path.with_name("copy.safetensors")
    save_file(tensors, copy, {METADATA_KEY: json.dumps(metadata | changes)})
    return str(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": FORMAT + 1}, f"format {FORMAT}, got 'scaling' of format {FORMAT + 1}"),
        ({"kind": "west"}, "expected a 'scaling' file"),
        ({"grid": [4, 4]}, r"expected grid to be three integers, got \[4, 4\]"),
        ({"grid": [4, 4, "6"]}, r"expected grid\[2\] to be an integer >= 1, got '6'"),
        ({"block": 0}, "expected block to be an integer >= 1, got 0"),
        ({"num_steps": None}, "expected num_steps to be an integer >= 1, got None"),
        ({"permute": "rows"}, "expected permute to be one of .*, got 'rows'"),
        ({"grid": [4, 4, 60]}, r"expected thresholds \(2, 2, 4, 60, 60\), got \(2, 2, 4, 6, 6\)"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, changes, words):
    copy = rewritten(Path(make_profile(tmp_path / "p.safetensors")), **changes)
    with pytest.raises(gs.ProfileMismatchError, match=words):
        read_profile(copy)


@pytest.mark.parametrize("name", ["order", "levels", "fidelity", "error", "thresholds"])
def test_tensors_that_do_not_fit_one_another_are_refused(tmp_path: Path, name: str):
    path = make_profile(tmp_path / "p.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors[name] = tensors[name].flatten()[:3].clone()
    save_file(tensors, path, metadata)
    with pytest.raises(gs.ProfileMismatchError, match=r"expected \w+ \("):
        read_profile(path)


def test_files_that_are_no_profile(tmp_path: Path):
    (tmp_path / "text").write_text("not safetensors")
    with pytest.raises(gs.ProfileMismatchError, match="expected a safetensors file"):
        read_profile(str(tmp_path / "text"))
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(gs.ProfileMismatchError, match="expected a 'scaling' file"):
        read_profile(str(tmp_path / "other"))
    with pytest.raises(gs.PlanError, match="no profile 'absent'"):
        read_profile("absent")


def test_nothing_is_unpickled(tmp_path: Path):
    torch.save({"x": torch.zeros(1)}, tmp_path / "pickle")
    with pytest.raises(gs.ProfileMismatchError):
        read_profile(str(tmp_path / "pickle"))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = Path(make_profile(tmp_path / "p.safetensors"))
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        make_profile(path, seed=5)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]


def test_shards_that_cannot_be_read_count_as_missing(tmp_path: Path):
    path = tmp_path / "west.safetensors"
    shards.save(path, "west", {"x": torch.arange(3)}, {"grid": [1, 1, 3]})
    tensors, metadata = shards.load(path, "west") or ({}, {})
    assert torch.equal(tensors["x"], torch.arange(3))
    assert metadata["grid"] == [1, 1, 3]
    assert shards.load(path, "fast") is None
    assert shards.load(tmp_path / "no", "west") is None
    path.write_bytes(path.read_bytes()[:-3])
    assert shards.load(path, "west") is None


def test_scratch_of_dead_processes_is_removed(tmp_path: Path):
    dead, alive, other = (
        tmp_path / f".west.safetensors.{name}.tmp" for name in (2**22 + 1, os.getpid(), "x")
    )
    for file in (dead, alive, other):
        file.touch()
    shards.remove_scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, other])


def test_the_shipped_profile_is_of_the_bundled_model():
    profile = load_profile("tiny-wan", model="tiny-wan", num_layers=8, num_heads=4)
    assert profile.grid == (8, 20, 26)
    assert os.stat(profile.path).st_size < 1.5 * 2**20
    assert profile.metadata["command"].startswith("gossamer calibrate ")
    assert (profile.fidelity[..., -1] == 1).all()
