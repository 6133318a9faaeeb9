"""`gossamer methods NAME --draw`: the picture shows what the plans say."""

from __future__ import annotations

import base64
import json
import struct
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.methods.intra import Intra
from gossamer.report import drawing, patterns

SVG = "{http://www.w3.org/2000/svg}"
DATA = "data:image/png;base64,"
INTRA_TITLES = [
    "Scatter 1-D",
    "Scatter 2-D",
    "Scatter 3-D",
    "Scatter with text",
    "Gather 0",
    "Gather 0, video",
    "Gather 1, segment",
    "Gather 1, cyclic",
    "Scatter, causal",
    "Gather 1, causal",
    "g2s4, global layer",
    "g2s4, window layer",
]
WHITE = (255, 255, 255)


@pytest.fixture(scope="module")
def panels():
    return {panel.title: panel for panel in patterns.method_panels("intra")}


def decode(png: bytes) -> np.ndarray:
    """Read an 8-bit RGB PNG without line filters."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    body, at = b"", 8
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        data = png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + data
        )
        if kind == b"IHDR":
            width, height = struct.unpack(">II", data[:8])
        body += data if kind == b"IDAT" else b""
        at += 12 + length
    lines = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def cells(panel: drawing.Panel, rows: int, columns: int) -> list[list[tuple[int, int, int]]]:
    """Return the colour at the centre of each cell of an image without gaps between frames."""
    step = panel.pixels.shape[0] // rows
    centre = panel.pixels[step // 2 :: step, step // 2 :: step]
    assert centre.shape[:2] == (rows, columns)
    return [[tuple(int(x) for x in colour) for colour in line] for line in centre]


def test_a_mask_has_a_colour_exactly_where_a_pair_is_read(panels):
    scatter = cells(panels["Scatter 1-D"], 64, 64)
    colours = scatter[0][0], *(scatter[i][i] for i in range(1, 8))
    assert len({*colours, WHITE}) == 9
    for i in range(64):
        for j in range(64):
            assert scatter[i][j] == (colours[i % 8] if i % 8 == j % 8 else WHITE)
    causal = cells(panels["Scatter, causal"], 64, 64)
    assert all(
        (causal[i][j] != WHITE) == (j <= i and i % 8 == j % 8) for i in range(64) for j in range(64)
    )


def test_a_grid_shows_groups_and_windows(panels):
    scatter = cells(panels["Scatter 2-D"], 16, 16)
    for r in range(16):
        for c in range(16):
            assert scatter[r][c] == scatter[r % 2][c % 4]
    assert len({colour for line in scatter for colour in line}) == 8
    gather = cells(panels["Gather 0"], 32, 32)
    corner = gather[31][0]  # alone in its patch: the last rows, the first columns
    assert all(gather[r][c] == corner for r in range(24, 32) for c in range(8))
    pale = gather[30][12]
    assert pale != corner
    assert {gather[r][c] for r in range(28, 32) for c in range(8, 16)} == {pale}
    assert gather[31][16] == gather[0][0], "the window ends there"


def test_a_large_plan_is_drawn_by_shares(panels):
    cell = cells(panels["g2s4, global layer"], 128, 128)
    read = np.array([[colour != WHITE for colour in line] for line in cell])
    u, v = np.ogrid[:128, :128]  # of 16 tokens; sixteen to a block
    assert (read == ((v <= u) & ((u // 16 - v // 16) % 2 == 0))).all()
    window = np.array(
        [[c != WHITE for c in line] for line in cells(panels["g2s4, window layer"], 128, 128)]
    )
    assert (window == ((v <= u) & ((u - v <= 36) | (v < 4)))).all()


def test_every_pattern_of_intra_is_drawn_with_its_density(panels, run):
    described = json.loads(run("methods", "intra", "--draw", "intra.svg", "--json").stdout)
    assert described["out"] == "intra.svg"
    assert [each["title"] for each in described["panels"]] == INTRA_TITLES
    assert {each["title"]: each["density"] for each in described["panels"]} == {
        title: panel.density for title, panel in panels.items()
    }


def test_an_svg_holds_titles_notes_and_the_images(panels, run):
    result = run("methods", "intra", "--draw", "intra.svg")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "picture: intra.svg" in result.stderr
    root = ElementTree.parse("intra.svg").getroot()
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    for panel in panels.values():
        assert panel.title in texts
        assert all(line in texts for line in panel.lines)
        assert panel.lines[-1].endswith(f"{panel.density:.3g}.")
        assert len(panel.lines) <= 3
    images = list(root.iter(f"{SVG}image"))
    for image, panel in zip(images, panels.values(), strict=True):
        uri = image.attrib["href"]
        assert uri.startswith(DATA)
        assert np.array_equal(decode(base64.b64decode(uri.removeprefix(DATA))), panel.pixels)
        x, y, wide, high = (float(image.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x + wide <= width
        assert y + high <= height


def test_a_png_shows_the_same_images(panels, run):
    image = pytest.importorskip("PIL.Image")
    assert run("methods", "intra", "--draw", "new/intra.png").exit_code == 0
    drawn = np.asarray(image.open("new/intra.png"))
    assert_shows(drawn, list(panels.values()))


def test_the_documented_picture_is_what_the_command_draws(panels):
    image = pytest.importorskip("PIL.Image")
    path = Path(__file__).parents[2] / "docs" / "images" / "intra.png"
    assert_shows(np.asarray(image.open(path)), list(panels.values()))


def assert_shows(picture: np.ndarray, panels: list[drawing.Panel]) -> None:
    layout = drawing._Layout.of(panels)
    assert picture.shape == (2 * layout.height, 2 * layout.width, 3)
    for index, panel in enumerate(panels):
        left, top = (2 * each for each in layout.corner(index))
        top += 2 * drawing._HEAD
        height, width = panel.pixels.shape[:2]
        assert max(height, width) <= drawing.MAX_PIXELS
        assert np.array_equal(picture[top : top + height, left : left + width], panel.pixels)
        title = picture[top - 2 * drawing._HEAD : top - 1, left : left + width]
        assert (title < 128).any(), f"no title above {panel.title}"


@pytest.mark.parametrize("name", gs.list_methods())
def test_any_method_is_drawn(run, name):
    before = torch.random.get_rng_state()
    described = json.loads(run("methods", name, "--draw", f"{name}.svg", "--json").stdout)
    assert torch.equal(torch.random.get_rng_state(), before)
    first = Path(f"{name}.svg").read_bytes()
    run("methods", name, "--draw", f"{name}.svg")
    assert Path(f"{name}.svg").read_bytes() == first, "the example is seeded"
    titles = [each["title"] for each in described["panels"]]
    if name != "intra":
        assert titles[:3] == [
            "Pairs read, head 0",
            "Pairs read, head 1",
            "Keys of one query, head 0",
        ]
        assert ("Causal, head 0" in titles) == (not gs.get_method(name).causal_reason)


def test_an_example_shows_pairs_and_the_keys_of_a_query():
    pairs, _, one, causal = patterns.example_panels("block-topk")
    method = gs.get_method("block-topk", density=patterns.EXAMPLE_DENSITY)
    q, k, v = patterns.example_tensors(patterns.EXAMPLE_GRID)
    plan = method.plan(q, k, v, gs.Call(grid=patterns.EXAMPLE_GRID))
    read = plan.weights()[0, 0, ::8, ::8].numpy() > 0  # blocks of 128: cells of 8 are whole
    drawn = np.array([[c != WHITE for c in line] for line in cells(pairs, 128, 128)])
    assert (drawn == read).all()
    assert pairs.density == plan.density
    assert (
        np.triu(np.array([[c != WHITE for c in line] for line in cells(causal, 128, 128)]), 1) == 0
    ).all()
    assert len(np.unique(one.pixels.reshape(-1, 3), axis=0)) == 4, "paper, not read, read, sharing"


def test_what_cannot_be_drawn_is_one_line(run, monkeypatch):
    for arguments, words in [
        (("--draw", "x.svg"), "name it"),
        (("intra", "--draw", "x.gif"), ".png or .svg"),
        (("intra", "--draw", "x"), ".png or .svg"),
        (("intro", "--draw", "x.svg"), "intra"),
    ]:
        result = run("methods", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    Path("file").write_text("")
    assert run("methods", "intra", "--draw", "file/x.svg").exit_code == 2
    for module in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, module, None)
    result = run("methods", "dense", "--draw", "x.png")
    assert "Pillow" in result.stderr
    assert 'pip install "gossamer[report]"' in result.stderr
    assert run("methods", "dense", "--draw", "x.svg").exit_code == 0
    assert [path.name for path in Path().iterdir() if path.suffix] == ["x.svg"]


def test_intra_is_registered():
    assert type(gs.get_method("intra")) is Intra
