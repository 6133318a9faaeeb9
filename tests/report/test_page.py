"""The page as text: complete, self-contained, and safe against what it is given."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from gossamer.errors import MissingExtraError
from gossamer.report import clips, write_report
from gossamer.report.embed import embed_json, embed_script
from report.synthetic import HOSTILE, METHODS, PROMPTS

LOADING = {"src", "href", "action", "formaction", "poster", "data", "srcset", "background"}


class _Reader(HTMLParser):
    """Collects what a browser would see of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
            self._in_script = True

    def handle_endtag(self, tag):
        self._in_script = self._in_script and tag != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def _read(path) -> _Reader:
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def page(report_html) -> _Reader:
    return _read(report_html)


def test_the_page_is_one_file_of_reasonable_size(report_html):
    assert [path.name for path in report_html.parent.iterdir()] == ["report.html"]
    assert report_html.stat().st_size < 6_000_000


def test_nothing_is_loaded_from_anywhere(page):
    for tag, attributes in page.tags:
        for name in LOADING & attributes.keys():
            assert (attributes[name] or "").startswith(("data:", "#")), (tag, attributes)
        assert tag not in {"link", "iframe", "object", "embed", "base"}
    own = "".join([*page.texts, page.scripts[2]])  # styles among the texts; script 1 is plotly's
    assert not re.search(r"url\((?![\"']?data:)|@import|https?://(?!www\.w3\.org/2000/svg)", own)


def test_the_policy_runs_exactly_the_scripts_of_the_page(page):
    policy = next(
        attributes["content"]
        for tag, attributes in page.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    code = [
        script
        for script, attributes in zip(
            page.scripts, (a for tag, a in page.tags if tag == "script"), strict=True
        )
        if attributes.get("type") != "application/json"
    ]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert len(digests) == 2


def test_every_part_is_there(page):
    text = " ".join(page.texts)
    for part in (*PROMPTS, *METHODS, "density 0.15", "Example CPU @ 2.60GHz", "dense_steps = 3"):
        assert part in text
    assert "Calls out of the ordinary, and why" in text
    assert page.texts.count("dense layer") == 2 * len(METHODS)
    assert page.count("img") == 16
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"videos", "table", "quality", "layers", "plans", "recipes", "reading"} <= set(ids)


def test_videos_are_inside(page, results):
    data = json.loads(page.scripts[0])
    uris = [clip["uri"] for line in data["clips"] for clip in line]
    assert len(uris) == 18
    first = base64.b64decode(uris[0].removeprefix("data:video/mp4;base64,"))
    assert first == results.runs[0].video.read_bytes()


def test_hostile_text_stays_text(changed, tmp_path):
    def edit(document):
        for run in document["runs"]:
            run["prompt"] = HOSTILE + run["prompt"]
            run["method"] = run["method"] if run["method"] == "dense" else HOSTILE
            run["kernel"] = HOSTILE
        document["recipes"] = {HOSTILE: HOSTILE}
        document["settings"]["model"] = HOSTILE
        document["environment"][HOSTILE] = HOSTILE

    path = changed(edit)
    plans = json.loads((path.parent / "plans.json").read_text(encoding="utf-8"))
    plans["masks"][0]["method"] = HOSTILE
    (path.parent / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    page = _read(write_report(path, tmp_path / "report.html"))
    assert page.count("script") == 3
    assert page.count("img") == 16
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert HOSTILE in page.texts
    assert json.loads(page.scripts[0])["variants"][1]["name"].startswith(HOSTILE)


def test_missing_parts_are_said_to_be_missing(changed, tmp_path):
    def edit(document):
        keep = ("prompt", "seed", "method")
        document["runs"] = [{key: run[key] for key in keep} for run in document["runs"][:2]]
        for key in ("settings", "environment", "recipes", "plans"):
            del document[key]

    page = _read(write_report(changed(edit), tmp_path / "report.html"))
    text = " ".join(page.texts)
    for note in (
        "not compared with dense",
        "No per-call records were kept.",
        "No plans were drawn.",
        "The results name no recipe.",
        "Nothing to draw",
    ):
        assert note in text
    data = json.loads(page.scripts[0])
    assert data["clips"][0][0]["note"] == "no video was kept"
    assert set(data["quality"].values()) == {None}


def test_dense_alone_has_a_page(changed, tmp_path):
    def edit(document):
        document["runs"] = document["runs"][:1]

    page = _read(write_report(changed(edit), tmp_path / "report.html"))
    assert "Full attention only: nothing to compare" in page.texts


def test_large_videos_are_left_out_with_a_note(results, monkeypatch):
    paths = [run.video for run in results.runs[:3]]
    sizes = [path.stat().st_size for path in paths]
    monkeypatch.setattr(clips, "MAX_TOTAL_BYTES", sum(sizes[:2]))
    assert [bool(clip.uri) for clip in clips.inline_clips(paths)] == [True, True, False]
    assert "the page is full" in clips.inline_clips(paths)[2].note
    monkeypatch.setattr(clips, "MAX_CLIP_BYTES", 10)
    assert "too large for a page" in clips.inline_clips(paths)[0].note


def test_other_files_are_not_taken_for_videos(results_json):
    (clip,) = clips.inline_clips([results_json])
    assert clip.note == "results.json is not a video that browsers play (.mp4, .m4v, .webm)"


def test_an_interrupted_write_leaves_the_old_report(changed, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("old", encoding="utf-8")
    path = changed(lambda document: document["runs"][0].update(seed="x"))
    with pytest.raises(ValueError, match="seed"):
        write_report(path, out)
    assert out.read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named_with_its_extra(results_json, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.offline", None)
    with pytest.raises(MissingExtraError, match=rf'needs {package}: pip install "gossamer\[report'):
        write_report(results_json, tmp_path / "report.html")


def test_json_cannot_end_its_block():
    text = embed_json({"a": "</script><!-- & "})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & "}


@pytest.mark.parametrize("mark", ["</SCRIPT>", "<!--"])
def test_scripts_that_would_end_their_block_are_refused(mark):
    with pytest.raises(ValueError, match="cannot stand in a page"):
        embed_script(f"'{mark}'")
