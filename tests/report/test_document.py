"""The document model: what it reads, and what it says about what it cannot read."""

from __future__ import annotations

import math

import pytest

from gossamer.errors import GossamerError
from gossamer.report import ReportError, write_report
from gossamer.report.document import read_masks, read_records, read_results
from report.synthetic import FRAMES, LAYERS, METHODS, PROMPTS, STEPS


def test_every_part_is_read(results):
    assert len(results.runs) == 18
    dense, instagen = results.runs[0], results.runs[1]
    assert dense.is_dense
    assert dense.psnr_db is None
    assert (instagen.prompt, instagen.method, instagen.density_asked) == (
        PROMPTS[0],
        "instagen",
        0.15,
    )
    assert instagen.video is not None
    assert instagen.video.is_file()
    assert results.settings["num_frames"] == str(FRAMES)
    assert results.environment["commit"] == ""
    assert results.recipes["svg2"].startswith("dense_steps = 3\n")


def test_records_and_masks_are_read(results):
    records = read_records(results.runs[1].records)
    assert len(records) == LAYERS * STEPS
    assert {record.rel_l2 is None for record in records} == {True, False}
    masks = read_masks(results.plans)
    assert {mask.method for mask in masks} == set(METHODS)


def test_absent_measurements_are_none_and_infinity_is_kept(changed):
    def edit(document):
        run = document["runs"][1]
        run["psnr_db"] = "inf"
        run["ssim"] = float("nan")
        del run["st_lpips"], run["video"], run["records"], run["kernel"]
        document["runs"][2]["psnr_db"] = math.inf
        del document["settings"], document["plans"], document["recipes"], document["environment"]

    results = read_results(changed(edit))
    run = results.runs[1]
    assert run.psnr_db == math.inf == results.runs[2].psnr_db
    assert (run.ssim, run.st_lpips, run.video, run.records, run.kernel) == (None,) * 4 + ("",)
    assert (results.settings, results.recipes, results.plans) == ({}, {}, None)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("runs"), "runs: expected a list, got null"),
        (lambda d: d.update(runs=[]), "runs: no run to report on"),
        (lambda d: d["runs"][3].pop("prompt"), "runs[3].prompt: expected text, got null"),
        (lambda d: d["runs"][3].update(seed=0.5), "runs[3].seed: expected a whole number, got 0.5"),
        (
            lambda d: d["runs"][3].update(psnr_db="good"),
            'runs[3].psnr_db: expected a number or null, got "good"',
        ),
        (
            lambda d: d["runs"][3].update(density=True),
            "runs[3].density: expected a number or null, got true",
        ),
        (lambda d: d.update(runs={"a": 1}), 'runs: expected a list, got {"a": 1}'),
        (lambda d: d["runs"].insert(0, 7), "runs[0]: expected an object, got 7"),
        (
            lambda d: d["runs"][3].update(reasons={"short": "many"}),
            'runs[3].reasons.short: expected a whole number, got "many"',
        ),
        (
            lambda d: d["runs"][3].update(attention_ms=math.inf),
            "runs[3].attention_ms: expected a finite number or null, got an infinite one",
        ),
        (
            lambda d: d["runs"][3].update(video="videos/gone.mp4"),
            "runs[3].video: no file 'videos/gone.mp4' beside the results",
        ),
        (
            lambda d: d["runs"][3].update(video="../../secret.mp4"),
            "runs[3].video: '../../secret.mp4' is outside the folder of the results",
        ),
        (
            lambda d: d.update(plans="/etc/hostname"),
            "plans: '/etc/hostname' is outside the folder of the results",
        ),
        (
            lambda d: d["recipes"].update(svg2=["x"]),
            'recipes.svg2: expected text, got ["x"]',
        ),
    ],
)
def test_garbled_documents_are_refused_in_one_line(changed, edit, message):
    path = changed(edit)
    with pytest.raises(ReportError) as caught:
        read_results(path)
    assert str(caught.value) == f"{path}: {message}"
    assert isinstance(caught.value, GossamerError | ValueError)


def test_a_document_can_be_read_without_its_files(changed):
    path = changed(lambda document: document["runs"][0].update(video="videos/gone.mp4"))
    results = read_results(path, with_files=False)
    assert (results.runs[0].video, results.runs[0].records, results.plans) == (None, None, None)
    assert len(results.runs) == 18


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"{", "not JSON (Expecting property name enclosed in double quotes at line 1, column 2)"),
        (b"\xff\xfe", "not UTF-8 text (byte 0)"),
        (b"[" * 100_000, "not a results document (nested too deeply)"),
        (b"[]", "expected an object, got []"),
    ],
)
def test_unreadable_files_are_named(tmp_path, content, message):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReportError) as caught:
        read_results(path)
    assert str(caught.value).removeprefix(f"{path}: ") == message


def test_files_that_the_document_names_are_named_in_errors(changed, tmp_path):
    path = changed(lambda _: None)
    plans = path.parent / "plans.json"
    plans.write_text('{"masks": [{"method": "svg2", "layer": "first"}]}', encoding="utf-8")
    out = tmp_path / "report.html"
    with pytest.raises(ReportError, match=r"plans\.json: masks\[0\]\.layer: expected a whole"):
        write_report(path, out)
    assert not out.exists()
