"""The harness on a fake pipeline: what it writes, what it skips, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.fake_pipeline import FakePipeline, topk
from gossamer.evaluation import compare as compare_module
from gossamer.evaluation import store as store_module
from gossamer.evaluation.compare import Comparison, compare
from gossamer.evaluation.variants import dense_variant
from gossamer.evaluation.video import read_video

WARM_UPS = 2  # one per variant

RUN_KEYS = {
    "prompt",
    "seed",
    "method",
    "density_asked",
    "density",
    "psnr_db",
    "ssim",
    "st_lpips",
    "flicker",
    "attention_ms",
    "plan_ms",
    "total_ms",
    "dense_steps",
    "kernel",
    "video",
    "records",
    "plan_share",
    "recipe",
    "reasons",
}


@pytest.fixture
def comparison(settings, variants) -> Comparison:
    return Comparison(prompts=["a cat", "a dog"], variants=variants, settings=settings)


def load(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".tmp" in path.name]


def test_the_document_has_the_fixed_format(pipe, comparison, tmp_path):
    document = compare(pipe, comparison, tmp_path)
    assert load(tmp_path) == document
    assert {"environment", "recipes", "runs", "settings", "plans"} <= set(document)
    assert document["settings"]["steps"] == 4
    assert set(document["recipes"]) == {"dense", "block-topk"}
    assert [(run["prompt"], run["method"]) for run in document["runs"]] == [
        ("a cat", "dense"),
        ("a cat", "block-topk"),
        ("a dog", "dense"),
        ("a dog", "block-topk"),
    ]
    for run in document["runs"]:
        assert set(run) == RUN_KEYS
        assert (tmp_path / run["video"]).is_file()


def test_dense_runs_are_the_yardstick(pipe, comparison, tmp_path):
    dense, sparse = compare(pipe, comparison, tmp_path)["runs"][:2]
    assert (dense["psnr_db"], dense["ssim"], dense["st_lpips"]) == (None, None, None)
    assert (dense["density"], dense["density_asked"], dense["dense_steps"]) == (1.0, 1.0, 4)
    assert dense["attention_ms"] > 0
    assert 0 < sparse["psnr_db"] < math.inf
    assert 0 < sparse["ssim"] <= 1
    assert sparse["density"] == pytest.approx(0.3, abs=0.05)
    assert (sparse["density_asked"], sparse["dense_steps"]) == (0.3, 0)


def test_times_add_up(pipe, comparison, tmp_path):
    for run in compare(pipe, comparison, tmp_path)["runs"]:
        assert 0 <= run["plan_ms"] <= run["attention_ms"] <= run["total_ms"]
        assert run["plan_share"] == pytest.approx(run["plan_ms"] / run["attention_ms"])


def test_records_and_plans_are_beside_the_results(pipe, comparison, tmp_path):
    document = compare(pipe, comparison, tmp_path)
    records = json.loads((tmp_path / document["runs"][1]["records"]).read_text())
    assert len(records) == 4 * 2 * 2  # steps, branches, layers
    keys = {"layer", "step", "branch", "path", "density", "plan_ms", "attention_ms", "rel_l2"}
    assert keys <= set(records[0])
    measured = [record for record in records if record["rel_l2"] is not None]
    assert {record["branch"] for record in measured} == {"cond"}
    assert len(measured) == 2 * 2  # two steps, all layers
    masks = json.loads((tmp_path / document["plans"]).read_text())["masks"]
    assert {mask["method"] for mask in masks} == {"block-topk"}  # dense has no plan to draw
    for mask in masks:
        assert (len(mask["mask"]), len(mask["mask"][0])) == (mask["rows"], mask["cols"])


def test_dense_attention_is_added_and_goes_first(settings, variants):
    comparison = Comparison(prompts=["x"], variants=variants[::-1], settings=settings)
    assert [variant.name for variant in comparison.ordered_variants()] == ["dense", "block-topk"]
    without = replace(comparison, variants=variants[1:])
    assert [variant.name for variant in without.ordered_variants()] == ["dense", "block-topk"]


def test_every_variant_is_warmed_up_before_it_is_timed(pipe, comparison, tmp_path):
    compare(pipe, comparison, tmp_path)
    assert [call["steps"] for call in pipe.calls] == [1, 4, 1, 4, 4, 4]


def test_the_same_command_twice_makes_nothing_again(pipe, comparison, tmp_path):
    first = compare(pipe, comparison, tmp_path)
    made = len(pipe.calls)
    assert compare(pipe, comparison, tmp_path)["runs"] == first["runs"]
    assert len(pipe.calls) == made


def test_no_resume_makes_everything_again(pipe, comparison, tmp_path):
    compare(pipe, comparison, tmp_path)
    made = len(pipe.calls)
    compare(pipe, comparison, tmp_path, resume=False)
    assert len(pipe.calls) == 2 * made


def test_a_new_method_is_compared_with_the_stored_dense_run(pipe, comparison, tmp_path):
    first = compare(pipe, comparison, tmp_path)
    pipe.calls.clear()
    more = replace(comparison, variants=[*comparison.variants, topk(0.6)])
    document = compare(pipe, more, tmp_path)
    assert [call["steps"] for call in pipe.calls] == [1, 4, 4]
    assert document["runs"][0] == first["runs"][0]
    assert set(document["recipes"]) == {"dense", "block-topk@0.3", "block-topk@0.6"}
    assert [run["recipe"] for run in document["runs"][:3]] == list(document["recipes"])
    assert [run["method"] for run in document["runs"][:3]] == ["dense", "block-topk", "block-topk"]


@pytest.mark.parametrize(
    "change", [{"steps": 5}, {"guidance_scale": 2.0}, {"height": 48}, {"model_digest": "other"}]
)
def test_a_changed_setting_is_not_mixed_with_old_runs(pipe, comparison, tmp_path, change):
    compare(pipe, comparison, tmp_path)
    made = len(pipe.calls)
    changed = replace(comparison, settings=replace(comparison.settings, **change))
    document = compare(pipe, changed, tmp_path)
    assert len(pipe.calls) == 2 * made
    assert len(document["runs"]) == 4
    # The old runs are still there, under the old settings.
    compare(pipe, comparison, tmp_path)
    assert len(pipe.calls) == 2 * made


def test_a_changed_recipe_is_not_mixed_with_old_runs(pipe, comparison, tmp_path):
    compare(pipe, comparison, tmp_path)
    pipe.calls.clear()
    later = topk(0.3, dense_steps=1)
    document = compare(pipe, replace(comparison, variants=[later]), tmp_path)
    assert [call["steps"] for call in pipe.calls] == [2, 4, 4]
    assert [run["dense_steps"] for run in document["runs"]] == [4, 1, 4, 1]


def test_lost_reference_frames_are_made_again(pipe, comparison, tmp_path):
    compare(pipe, comparison, tmp_path)
    for path in (tmp_path / "reference").iterdir():
        path.write_bytes(b"truncated")
    pipe.calls.clear()
    more = replace(comparison, variants=[topk(0.6)])
    document = compare(pipe, more, tmp_path)
    assert all(run["psnr_db"] is not None for run in document["runs"][1::2])


def test_ctrl_c_keeps_the_finished_runs_and_the_next_call_resumes(pipe, comparison, tmp_path):
    pipe.fail_at = {WARM_UPS + 1: KeyboardInterrupt()}  # inside the second timed run
    with pytest.raises(KeyboardInterrupt):
        compare(pipe, comparison, tmp_path)
    assert pipe.session is None  # the recipe was taken off
    assert [run["method"] for run in load(tmp_path)["runs"]] == ["dense"]
    assert not leftovers(tmp_path)
    pipe.calls.clear()
    assert len(compare(pipe, comparison, tmp_path)["runs"]) == 4
    assert [call["steps"] for call in pipe.calls] == [1, 4, 1, 4, 4]


def test_an_error_in_a_run_keeps_the_finished_ones(pipe, comparison, tmp_path):
    pipe.fail_at = {WARM_UPS + 1: ValueError("bad size")}
    with pytest.raises(ValueError, match="bad size"):
        compare(pipe, comparison, tmp_path)
    assert len(load(tmp_path)["runs"]) == 1


@pytest.mark.parametrize("name", ["write_video", "write_json"])
def test_a_full_disk_leaves_no_half_run(pipe, comparison, tmp_path, monkeypatch, name):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_module, name, fail)
        with pytest.raises(OSError, match="No space left"):
            compare(pipe, comparison, tmp_path)
    assert load(tmp_path)["runs"] == []
    assert not leftovers(tmp_path)
    assert len(compare(pipe, comparison, tmp_path)["runs"]) == 4


def test_nan_frames_name_the_run(pipe, comparison, tmp_path, monkeypatch):
    original = FakePipeline.__call__

    def broken(self, **arguments):
        result = original(self, **arguments)
        if len(self.calls) == WARM_UPS + 2:
            result.frames = result.frames * math.nan
        return result

    monkeypatch.setattr(FakePipeline, "__call__", broken)
    with pytest.raises(ValueError, match=r"block-topk@0\.3, seed 0: a cat: .*NaN"):
        compare(pipe, comparison, tmp_path)
    assert len(load(tmp_path)["runs"]) == 1


def test_shards_share_a_folder_and_each_has_its_dense_runs(pipe, comparison, tmp_path):
    first = compare(pipe, replace(comparison, shard=(0, 2)), tmp_path)
    assert {run["prompt"] for run in first["runs"]} == {"a cat"}
    made = len(pipe.calls)
    second = compare(pipe, replace(comparison, shard=(1, 2)), tmp_path)
    assert len(pipe.calls) == 2 * made
    assert [run["prompt"] for run in second["runs"]] == ["a cat", "a cat", "a dog", "a dog"]
    assert all(run["psnr_db"] is not None for run in second["runs"][1::2])
    compare(pipe, comparison, tmp_path)
    assert len(pipe.calls) == 2 * made


def test_a_run_that_another_shard_finishes_meanwhile_is_not_lost(
    pipe, comparison, tmp_path, monkeypatch
):
    compare(pipe, replace(comparison, shard=(0, 2)), tmp_path / "other")
    write = compare_module.write_json
    other_runs = [tmp_path / "other" / folder for folder in ("runs", "videos")]

    def write_while_the_other_finishes(path, value, **options):
        write(path, value, **options)
        for folder in other_runs:
            for file in list(folder.iterdir()) if folder.is_dir() else []:
                target = tmp_path / "mine" / folder.name / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                file.rename(target)

    monkeypatch.setattr(compare_module, "write_json", write_while_the_other_finishes)
    document = compare(pipe, replace(comparison, shard=(1, 2)), tmp_path / "mine")
    assert len(document["runs"]) == 4
    assert load(tmp_path / "mine") == document


def test_progress_counts_steps_and_runs(pipe, comparison, tmp_path):
    seen = []
    compare(pipe, comparison, tmp_path, on_progress=seen.append)
    assert {(event.steps_total, event.runs_total) for event in seen} == {(16, 4)}
    steps = [event.steps_done for event in seen]
    assert steps == sorted(steps)
    assert steps[-1] == 16
    assert [event.runs_done for event in seen][-1] == 3
    assert seen[-1].run == "block-topk@0.3, seed 0: a dog"


def test_the_videos_show_the_runs(pipe, comparison, tmp_path):
    run = compare(pipe, comparison, tmp_path)["runs"][1]
    assert read_video(tmp_path / run["video"]).shape == (4, 32, 32, 3)


def test_identical_videos_have_infinite_psnr_as_text(pipe, comparison, tmp_path):
    same = topk(1.0)
    document = compare(pipe, replace(comparison, variants=[same], prompts=["x"]), tmp_path)
    psnr = document["runs"][1]["psnr_db"]
    assert psnr == "inf" or psnr > 80  # another kernel may round differently
    json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)


def test_metrics_that_cannot_be_taken_are_null(pipe, comparison, tmp_path, monkeypatch):
    small = replace(comparison.settings, height=8, width=8)
    sparse = compare(pipe, replace(comparison, settings=small), tmp_path / "a")["runs"][1]
    assert (sparse["ssim"], sparse["st_lpips"]) == (None, None)
    assert sparse["psnr_db"] > 0
    monkeypatch.setattr(compare_module, "has_stlpips", lambda: False)
    sparse = compare(pipe, comparison, tmp_path / "b")["runs"][1]
    assert sparse["st_lpips"] is None
    assert sparse["ssim"] is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "needs prompts"),
        ({"variants": []}, "needs variants"),
        ({"seeds": []}, "needs seeds"),
        ({"prompts": ["x", "x"]}, "prompt 'x' is given 2 times"),
        ({"seeds": [1, 1]}, "seed 1 is given 2 times"),
        ({"variants": [dense_variant(), dense_variant()]}, "variant 'dense' is given 2 times"),
        ({"variants": [replace(topk(0.5), name="dense")]}, "for full attention, not block-topk"),
        ({"shard": (2, 2)}, "shard 3/2: the part must be between 1 and 2"),
        ({"shard": (-1, 2)}, "shard 0/2"),
        ({"shard": (0, 0)}, "shard 1/0"),
    ],
)
def test_ambiguous_comparisons_are_refused(comparison, change, message):
    with pytest.raises(ValueError, match=message):
        replace(comparison, **change)
