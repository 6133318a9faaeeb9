"""`tools/make_results_page.py`: the sections on what attention costs on a GPU."""

from __future__ import annotations

import importlib.util
import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "some GPU", "torch": "2.0", "triton": "3.6", "flash-attn-4": None}
TIMING = {"median_ms": 10.0, "spread_ms": 0.5, "peak_extra_bytes": 3 << 20}


def kernel_row(case, kernel, density, efficiency, **more):
    speed = {"dense_ms": 60.0, "efficiency": efficiency, "speedup": efficiency / density}
    return {
        "case": case,
        "kernel": kernel,
        "density": density,
        **TIMING,
        "dense_kernel": "cudnn",
        "rel_error": 0.002,
        **speed,
        **more,
    }


KERNELS = [
    kernel_row("tokens-75600", "cudnn", 1.0, 1.0, dense_kernel=None, median_ms=60.0),
    kernel_row("tokens-75600", "cudnn", 1.0, 1.0, dense_kernel=None, median_ms=62.0),
    kernel_row("tokens-75600", "hopper", 0.5, 0.9),
    kernel_row("tokens-75600", "hopper", 0.1, 0.8),
    kernel_row("tokens-32760", "hopper", 0.1, 0.6),
    kernel_row("intra8-16384-causal", "triton", 0.125, 0.4, stage="scatter", num_tokens=16_384),
    kernel_row("intra8-32768-causal", "triton", 0.125, 0.5, stage="scatter", num_tokens=32_768),
]
PLAN = {
    "case": "kmeans300-75600",
    "stage": "warm",
    **TIMING,
    "dense_ms": 50.0,
    "dense_kernel": "cudnn",
    "dense_share": 0.2,
    "synchronisations": 3,
    "density": None,
}
MODEL = {
    "case": "wan2.1-14b-720p-4-of-40-layers",
    "recipe": "instagen-8-8",
    "density": 0.16,
    "attention_share": 0.55,
    "plan_share": 0.01,
    "speedup": 1.3,
    "peak_bytes": 5 << 30,
    **TIMING,
}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The generator, on copies of the committed results without those of a GPU."""
    spec = importlib.util.spec_from_file_location(
        "make_results_page", ROOT / "tools" / "make_results_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    results = tmp_path / "benchmarks" / "results"
    shutil.copytree(module.RESULTS, results)
    for name in (module.KERNELS, module.PLANS, module.MODELS):
        (results / name).unlink(missing_ok=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", results)
    monkeypatch.setattr(module, "PAGE", tmp_path / "docs" / "results.md")
    monkeypatch.setattr(module, "IMAGES", tmp_path / "docs" / "images")
    return module


def write(page, name, rows, **more):
    document = {"environment": ENVIRONMENT, "rows": rows, **more}
    (page.RESULTS / name).write_text(json.dumps(document))


def test_sections_appear_where_their_files_do(page, capsys):
    assert page.main([]) == 0
    text = page.PAGE.read_text()
    assert not any(f"## {name}\n" in text for name in ("Kernels", "Planning", "Whole models"))
    assert not page.IMAGES.exists()
    write(page, page.PLANS, [PLAN])
    assert page.main(["--check"]) == 1
    assert "docs/results.md: stale, run tools/make_results_page.py" in capsys.readouterr().out
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0
    assert "## Planning\n" in page.PAGE.read_text()


def test_kernels_stand_beside_the_dense_kernel_of_their_run(page):
    write(page, page.KERNELS, KERNELS)
    page.main([])
    text = page.PAGE.read_text()
    assert "some GPU, torch 2.0, triton 3.6, `kernels-h200.json`" in text
    rows = [
        "| tokens-75600 | hopper | 0.10 | 10.00 | 0.50 | 60.00 | cudnn | 0.80 | 8.00× |",
        "| tokens-75600 | hopper | 0.50 | 10.00 | 0.50 | 60.00 | cudnn | 0.90 | 1.80× |",
        "| intra8-16384-causal scatter | triton | 0.12 | 10.00 | 0.50 | 60.00 | cudnn | 0.40 |",
    ]
    places = [text.index(row) for row in rows]
    assert places == sorted(places)
    assert "| tokens-75600 | 61.00 |" in text  # dense attention, the median of both


def test_plots_show_efficiency_against_density_and_length(page):
    write(page, page.KERNELS, KERNELS)
    page.main([])
    titles = {}
    for name in ("density", "length"):
        path = page.IMAGES / f"kernels-{name}.svg"
        assert f"(images/kernels-{name}.svg)" in page.PAGE.read_text()
        root = ET.parse(path).getroot()
        texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
        titles[name] = [text for text in texts if "class" not in text]
    assert "tokens-75600" in titles["density"]
    assert "tokens-32760" not in titles["density"]  # one density is no line
    assert "hopper" in titles["density"]
    assert {"tokens", "intra8-causal scatter", "hopper, 0.1"} <= set(titles["length"])
    assert "hopper, 0.5" not in titles["length"]  # one length is none either
    (page.IMAGES / "kernels-length.svg").write_text("old")
    assert page.main(["--check"]) == 1


def test_plots_of_nothing_say_so(page):
    write(page, page.KERNELS, KERNELS[:3])
    page.main([])
    assert "nothing was measured" in (page.IMAGES / "kernels-length.svg").read_text()


def test_planning_and_models(page):
    write(page, page.PLANS, [PLAN], failures=[{"case": "x", "failure": "wrong"}], missing=["y"])
    write(page, page.MODELS, [MODEL])
    page.main([])
    text = page.PAGE.read_text()
    assert "| kmeans300-75600 | warm | 10.00 | 0.50 | 20.0% | 3 | 3 | – |" in text
    assert "Refused, and not timed: x: wrong." in text
    assert "Not run: y." in text
    row = "| wan2.1-14b-720p-4-of-40-layers | instagen-8-8 | 0.16 | 10 |"
    assert row in text
    assert "| 55.0% | 1.0% | 1.30× | 5.0 |" in text
