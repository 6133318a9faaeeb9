"""The report as a reader sees it, in a real browser: everything is drawn, and everything works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gossamer.report import write_report
from gossamer.report.masks import INK
from gossamer.report.palette import SERIES
from report.browser import Page, chromium, find_chromium
from report.synthetic import FRAMES, HOSTILE, LAYERS, METHODS, STEPS

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on PATH")

RED, STAIN = (226, 60, 48), (240, 210, 60)  # the circle, and the stain of every sparse video


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(str(PROGRAM), tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, report_html: Path) -> Iterator[Page]:
    """The report, freshly opened on a desktop; whatever a test does, the console stays silent."""
    browser.complaints.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    browser.open(report_html)
    yield browser
    assert browser.complaints == []


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def _share(pixels: np.ndarray, colour: tuple[int, ...], tolerance: int = 32) -> float:
    """Return the share of pixels that have a colour, or nearly so: videos are lossy."""
    return float((abs(pixels.astype(int) - colour).max(axis=-1) <= tolerance).mean())


def _colours(pixels: np.ndarray) -> int:
    return len(np.unique(pixels.reshape(-1, 3), axis=0))


def _column(page: Page, title: str) -> list[str]:
    """Return a column of the comparison as it stands."""
    return page.evaluate(
        f"""(() => {{
          const table = document.getElementById("comparison");
          const heads = [...table.tHead.rows[0].cells];
          const column = heads.findIndex((head) => head.textContent === "{title}");
          return [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim());
        }})()"""
    )


def _choose(page: Page, selector: str, value: str) -> None:
    page.evaluate(
        f"""(() => {{
          const choice = document.querySelector('{selector}');
          choice.value = "{value}";
          choice.dispatchEvent(new Event("change", {{ bubbles: true }}));
        }})()"""
    )
    page.settle()


def _click(page: Page, selector: str) -> None:
    page.evaluate(f"document.querySelector('{selector}').click()")
    page.settle()


def _press(page: Page, selector: str, key: str) -> None:
    page.evaluate(f"document.querySelector('{selector}').focus()")
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
    page.settle()


def test_the_page_asks_for_nothing_but_itself(page, report_html):
    outside = [url for url in page.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [report_html.resolve().as_uri()]


def test_everything_is_drawn(page):
    count = "document.querySelectorAll('{}').length".format
    assert page.evaluate(count("#comparison tbody tr")) == 1 + 2 * len(METHODS)
    assert page.evaluate(count("#quality-plot .points path")) == 2 * len(METHODS)
    assert page.evaluate(count("#quality-plot .legendtext")) == len(METHODS)
    assert page.evaluate(count(".heat .heatmaplayer image")) == 2
    assert page.evaluate(count("#reel video[src]")) == 1 + 2 * len(METHODS)
    assert page.evaluate("document.title").startswith("instagen at density 0.15: attention takes")


def test_the_pictures_are_not_blank(page):
    video = page.screenshot("#stage")
    assert _colours(video) > 500
    assert 0.05 < _share(video, RED) < 0.5
    plot = page.screenshot("#quality-plot")
    for look in SERIES[: len(METHODS)]:
        assert _share(plot, _rgb(look.light), tolerance=2) > 1e-4
    heat = page.screenshot("#heat-density")
    assert _share(heat, (0x18, 0x4E, 0x77), tolerance=3) > 0.1  # dense steps and the dense layer
    mask = page.screenshot("#plan-groups img")
    assert _share(mask, INK, tolerance=2) > 0.05
    assert _share(mask, (255, 255, 255), tolerance=2) > 0.3


def test_the_dividing_line_uncovers_the_sparse_video(page):
    middle = page.screenshot("#stage")
    assert _share(middle[:, : middle.shape[1] // 2 - 20], STAIN) == 0  # dense is left of the line
    _press(page, "#divider", "Home")
    assert page.evaluate("document.getElementById('divider').ariaValueNow") == "0"
    assert _share(page.screenshot("#stage"), STAIN) > 1e-3
    _press(page, "#divider", "End")
    assert _share(page.screenshot("#stage"), STAIN) == 0


def test_the_dividing_line_follows_the_pointer(page):
    box = page.evaluate(
        """(() => {
          document.getElementById("stage").scrollIntoView({ block: "center", behavior: "instant" });
          const box = document.getElementById("stage").getBoundingClientRect();
          return { x: box.x, y: box.y, width: box.width, height: box.height };
        })()"""
    )
    y = box["y"] + box["height"] / 2
    for kind, share in (("mousePressed", 0.5), ("mouseMoved", 0.25), ("mouseReleased", 0.25)):
        page.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=box["x"] + share * box["width"],
            y=y,
            button="left",
            buttons=1,
            clickCount=1,
        )
    assert page.evaluate("document.getElementById('divider').ariaValueNow") == "25"


def test_all_videos_play_and_stop_on_the_same_frame(page):
    _press(page, "#scrub", "ArrowRight")
    assert page.evaluate("document.getElementById('clock').textContent") == f"2 of {FRAMES}"
    page.evaluate(
        """new Promise((done) => {
          const clock = document.getElementById("clock");
          const start = clock.textContent;
          new MutationObserver((changes, observer) => {
            if (clock.textContent === start) return;
            observer.disconnect();
            document.getElementById("play").click();
            done(true);
          }).observe(clock, { childList: true });
          document.getElementById("play").click();
        })"""
    )
    page.settle()
    times = page.evaluate("[...document.querySelectorAll('video')].map((v) => v.currentTime)")
    assert len(times) == 3 + 2 * len(METHODS)
    assert len(set(times)) == 1
    assert page.evaluate("[...document.querySelectorAll('video')].every((v) => v.paused)")
    frame = int(page.evaluate("document.getElementById('clock').textContent").split()[0])
    assert int(times[0] * 8) + 1 == frame  # 8 frames a second


def test_prompt_and_method_can_be_chosen(page):
    _choose(page, "#case", "1")
    assert _share(page.screenshot("#stage"), RED) == 0  # the second prompt has a green square
    _click(page, "#reel .clip:nth-child(3)")
    assert page.evaluate("document.getElementById('sparse-tag').textContent") == "svg2 at 0.15"
    assert page.evaluate("document.getElementById('variant').value") == "2"
    facts = page.evaluate("document.getElementById('facts').innerText")
    assert re.search(r"PSNR, dB\s+–\s+29\.90", facts)


def test_the_table_sorts_and_keeps_missing_values_last(page):
    _click(page, "#comparison th:nth-child(4) button")
    values = _column(page, "PSNR, dB")
    numbers = [float(value.split()[0]) for value in values[:-1]]
    assert numbers == sorted(numbers)
    assert values[-1] == "–"
    _click(page, "#comparison th:nth-child(4) button")
    values = _column(page, "PSNR, dB")
    assert values[0] == "33.50 (best)"
    assert values[-1] == "–"
    assert page.evaluate("document.querySelector('#comparison th:nth-child(4)').ariaSort") == (
        "descending"
    )


def test_the_plot_can_show_each_measure(page):
    _click(page, "input[value=st_lpips]")
    assert page.evaluate("document.querySelectorAll('#quality-plot .points path').length") == 6
    _click(page, "input[value=attention_ratio]")
    title = page.evaluate("document.querySelector('#quality-plot .ytitle').textContent")
    assert title == "attention time relative to dense"
    assert page.evaluate("document.getElementById('quality-plot').innerText").count("dense") >= 1


def test_heat_maps_show_the_chosen_method(page):
    grid = "document.getElementById('heat-density').data[0].z"
    before = page.evaluate(grid)
    assert (len(before), len(before[0])) == (LAYERS, STEPS)
    _choose(page, "#heat-variant", "4")
    assert page.evaluate(f"{grid}[1][5]") > before[1][5] + 0.1  # density .30 instead of .15


def test_plans_can_be_filtered(page):
    _choose(page, "#mask-filters [data-key=method]", "svg2")
    _choose(page, "#mask-filters [data-key=head]", "1")
    shown = "[...document.querySelectorAll('#plans figure')].filter((f) => f.checkVisibility())"
    assert page.evaluate(f"{shown}.map((f) => f.dataset.method + f.dataset.head)") == ["svg21"] * 2
    assert page.evaluate(
        "[...document.querySelectorAll('#plans h3')].filter((h) => "
        "h.checkVisibility()).map((h) => h.textContent)"
    ) == ["svg2"]


def test_the_dark_theme_recolours_page_and_plots(page):
    light = page.screenshot("h1").mean()
    page.resize(1280, 900, dark=True)
    page.settle()
    assert page.screenshot("h1").mean() < light - 100
    plot = page.screenshot("#quality-plot")
    assert _share(plot, _rgb(SERIES[0].dark), tolerance=2) > 1e-4
    assert _share(plot, _rgb(SERIES[0].light), tolerance=2) == 0


def test_a_phone_needs_no_sideways_scrolling(page):
    page.resize(390, 800)
    page.settle()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.screenshot().shape[1] == 390


def test_hostile_text_runs_nowhere(browser, changed, tmp_path):
    def edit(document):
        for run in document["runs"]:
            run["prompt"] = HOSTILE
            run["method"] = "dense" if run["method"] == "dense" else HOSTILE

    browser.complaints.clear()
    browser.open(write_report(changed(edit), tmp_path / "report.html"))
    assert browser.evaluate("document.getElementById('prompt').textContent") == HOSTILE
    assert browser.evaluate("document.querySelectorAll('[onerror], img:not([alt])').length") == 0
    legend = browser.evaluate("document.querySelector('#quality-plot .legendtext').textContent")
    assert legend.startswith("</script><script>alert(1)")
    assert browser.complaints == []


def test_a_report_without_optional_parts_works(browser, changed, tmp_path):
    def edit(document):
        keep = ("prompt", "seed", "method")
        document["runs"] = [{key: run[key] for key in keep} for run in document["runs"][:2]]
        for key in ("settings", "environment", "recipes", "plans"):
            del document[key]

    browser.complaints.clear()
    browser.open(write_report(changed(edit), tmp_path / "report.html"))
    assert browser.evaluate("document.getElementById('stage-note').textContent") == (
        "no video was kept"
    )
    assert browser.complaints == []
