"""The README's table and plot, and the script that keeps them fresh."""

from __future__ import annotations

import importlib.util
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gossamer.report import markdown_table, quality_plot_svg
from gossamer.report.document import read_results
from gossamer.report.tables import quality_plot
from report.synthetic import METHODS

SCRIPT = Path(__file__).parents[2] / "tools" / "make_readme_results.py"
README = (
    "# Title\n\n<!-- claim:begin -->\n<!-- claim:end -->\n\n"
    "<!-- results:begin -->\nold\n<!-- results:end -->\n\nRest\n"
)
SVG = "{http://www.w3.org/2000/svg}"


def test_the_table_has_a_line_per_variant_and_marks_the_best(results):
    lines = markdown_table(results).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 1 + 2 * len(METHODS)
    assert len({line.count("|") for line in table}) == 1
    assert table[3] == (
        "| instagen | 0.15 | 0.504 | **31.70** | **0.960** | **0.038** | **3.70 s** | **0.46×** "
        "| **13.2 s** | 2.0 % |"
    )
    assert lines[-1].startswith("Means over 2 prompts, 1 seed; model tiny-wan, video 96×96")


def test_names_cannot_break_the_table(changed):
    def edit(document):
        for run in document["runs"]:
            run["method"] = run["method"].replace("svg2", "a|b\n<img>[x](y)")

    text = markdown_table(read_results(changed(edit)))
    assert "| a\\|b &lt;img&gt;\\[x\\](y) | 0.15 |" in text


def test_the_plot_draws_every_point_inside_its_frame(results, tmp_path):
    path = quality_plot_svg(results, tmp_path / "images" / "plot.svg")
    assert path.stat().st_size < 8_000
    root = ET.parse(path).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    markers = [
        marker
        for marker in root.iter(f"{SVG}path")
        if marker.get("class") == "m" and "translate" in marker.attrib["transform"]
    ]
    assert len(markers) == 2 * len(METHODS) + len(METHODS)  # points, and the legend
    for marker in markers:
        place = marker.attrib["transform"].split("(")[1].split(")")[0]
        x, y = map(float, place.split())
        assert 0 < x < width
        assert 0 < y < height
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[-len(METHODS) :] == list(METHODS)  # named from the highest to the lowest line


def test_higher_psnr_is_drawn_higher(results):
    root = ET.fromstring(quality_plot(results))
    lines = [path.attrib["d"] for path in root.iter(f"{SVG}path") if path.get("class") == "l"]
    heights = [float(line.split("L")[0].split()[1]) for line in lines]
    assert heights == sorted(heights)


def test_a_plot_of_nothing_says_so(changed):
    path = changed(lambda document: document.update(runs=document["runs"][:1]))
    assert "no run with both density and PSNR" in quality_plot(read_results(path))


def test_a_plot_of_one_point_is_drawn(changed):
    path = changed(lambda document: document.update(runs=document["runs"][:2]))
    assert quality_plot(read_results(path)).count('class="m"') == 2


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("make_readme_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(results_json, tmp_path) -> Path:
    """A checkout with committed results and a README that is out of date."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    shutil.copy(results_json, results / "compare-tiny-wan.json")  # its videos are not committed
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    return tmp_path


def test_the_script_writes_the_readme_and_then_finds_it_fresh(script, checkout, capsys):
    check = ["--check", "--root", str(checkout)]
    assert script.main(check) == 1
    assert (checkout / "README.md").read_text(encoding="utf-8") == README
    assert script.main(["--root", str(checkout)]) == 0
    assert script.main(check) == 0
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(
        "# Title\n\n<!-- claim:begin -->\n\nInstagen at density 0.15: attention"
    )
    assert "<!-- results:begin -->\n\n![PSNR to dense against density](" in readme
    assert readme.endswith("<!-- results:end -->\n\nRest\n")
    assert "| instagen | 0.15 |" in readme
    assert (checkout / "docs/images/compare-tiny-wan.svg").is_file()
    assert "README.md: stale" in capsys.readouterr().out


def test_a_stale_plot_is_found(script, checkout):
    script.main(["--root", str(checkout)])
    (checkout / script.PLOT).write_text("old", encoding="utf-8")
    assert script.main(["--check", "--root", str(checkout)]) == 1


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("README.md", "# No markers\n", "README.md: expected one <!-- claim:begin -->"),
        ("benchmarks/results/compare-tiny-wan.json", "{", "compare-tiny-wan.json: not JSON"),
    ],
)
def test_the_script_says_what_is_wrong(script, checkout, capsys, file, content, message):
    (checkout / file).write_text(content, encoding="utf-8")
    assert script.main(["--root", str(checkout)]) == 1
    assert message in capsys.readouterr().err
