"""Pictures of plans: panels with a title and a note each, as one SVG or PNG file."""

from __future__ import annotations

import base64
import importlib
import io
import math
import struct
import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gossamer.errors import MissingExtraError
from gossamer.evaluation.files import atomic_path
from gossamer.report.fields import ReportError
from gossamer.report.masks import _PNG, _chunk

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""[height, width, 3], 8-bit RGB."""

SUFFIXES = (".png", ".svg")
_SCALE = 2  # pixels per unit of the layout: sharp on dense screens
_COLUMNS = 4
MAX_PIXELS = 416  # sides of an image, at most
_SIDE = MAX_PIXELS // _SCALE
_GAP = 30  # between panels
_TOP = 64  # above the first row: the picture's title
_HEAD = 26  # above an image: its title
_LINE = 15  # of a note
_LETTERS = 38  # of a note's line, at most: what fits the width of an image
_INK, _GREY, _PAPER, _FRAME = "#1f2733", "#5a6472", "#ffffff", "#d5dae1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One plan, drawn.

    Attributes:
        title: What it is, in a few words.
        note: What to see in it, in one or two lines.
        pixels: The image, `MAX_PIXELS` at most a side.
        density: The plan's density.
    """

    title: str
    note: str
    pixels: Pixels
    density: float

    @property
    def lines(self) -> list[str]:
        """The note and the density, cut to lines."""
        return textwrap.wrap(f"{self.note} Density {self.density:.3g}.", _LETTERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where panels stand, in layout units."""

    columns: int
    width: int
    height: int
    row_height: int

    @classmethod
    def of(cls, panels: Sequence[Panel]) -> _Layout:
        """Lay panels out in rows of equal height, four to a row at most."""
        columns = min(_COLUMNS, len(panels))
        rows = math.ceil(len(panels) / columns)
        row_height = _HEAD + _SIDE + _LINE * max(len(panel.lines) for panel in panels) + _GAP
        return cls(
            columns=columns,
            width=_GAP + columns * (_SIDE + _GAP),
            height=_TOP + rows * row_height,
            row_height=row_height,
        )

    def corner(self, index: int) -> tuple[int, int]:
        """Return the left and top of a panel."""
        row, column = divmod(index, self.columns)
        return _GAP + column * (_SIDE + _GAP), _TOP + row * self.row_height


def write_picture(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Write panels as one picture; the suffix of `path` says in which format.

    Args:
        panels: At least one.
        title: Stands above them.
        path: A .png or .svg file.

    Raises:
        ReportError: Another suffix.
        MissingExtraError: A .png is wanted and Pillow, which draws its letters, is not installed.
        OSError: The file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ReportError(f"{path}: the name must end in {' or '.join(SUFFIXES)}")
    draw = _svg if path.suffix.lower() == ".svg" else _png
    picture = draw(panels, title, _Layout.of(panels))
    with atomic_path(path) as scratch:
        scratch.write_bytes(picture)


def _svg(panels: Sequence[Panel], title: str, layout: _Layout) -> bytes:
    """Draw with text as text and images embedded."""
    width, height = layout.width, layout.height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"',
        f'height="{height}" font-family="system-ui, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>',
        _svg_text(_GAP, 38, 20, _INK, title, bold=True),
    ]
    for index, panel in enumerate(panels):
        left, top = layout.corner(index)
        parts.append(_svg_text(left, top + 16, 14, _INK, panel.title, bold=True))
        high, wide = (side / _SCALE for side in panel.pixels.shape[:2])
        uri = base64.b64encode(_encode(panel.pixels)).decode("ascii")
        parts.append(
            f'<image x="{left}" y="{top + _HEAD}" width="{wide:g}" height="{high:g}" '
            f'href="data:image/png;base64,{uri}"/>'
        )
        parts.append(
            f'<rect x="{left - 0.5}" y="{top + _HEAD - 0.5}" width="{wide + 1:g}" '
            f'height="{high + 1:g}" fill="none" stroke="{_FRAME}"/>'
        )
        for number, line in enumerate(panel.lines, 1):
            at = top + _HEAD + _SIDE + 2 + number * _LINE
            parts.append(_svg_text(left, at, 11, _GREY, line))
    return ("\n".join([*parts, "</svg>"]) + "\n").encode()


def _svg_text(x: int, y: int, size: int, colour: str, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'


def _png(panels: Sequence[Panel], title: str, layout: _Layout) -> bytes:
    """Draw pixels, letters too."""
    try:
        image_module, draw_module, font_module = (
            importlib.import_module(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont")
        )
    except ImportError as error:
        raise MissingExtraError("report", "Pillow for a .png (a .svg needs nothing)") from error
    size = (layout.width * _SCALE, layout.height * _SCALE)
    picture: Any = image_module.new("RGB", size, _PAPER)
    pen: Any = draw_module.Draw(picture)

    def write(x: int, y: int, points: int, colour: str, text: str, *, bold: bool = False) -> None:
        pen.text(
            (x * _SCALE, y * _SCALE),
            text,
            fill=colour,
            font=font_module.load_default(points * _SCALE),
            anchor="ls",
            stroke_width=0.6 if bold else 0,
            stroke_fill=colour,
        )

    write(_GAP, 38, 20, _INK, title, bold=True)
    for index, panel in enumerate(panels):
        left, top = layout.corner(index)
        write(left, top + 16, 14, _INK, panel.title, bold=True)
        height, width = panel.pixels.shape[:2]
        corner = (left * _SCALE, (top + _HEAD) * _SCALE)
        picture.paste(image_module.fromarray(panel.pixels), corner)
        frame = (corner[0] - 1, corner[1] - 1, corner[0] + width, corner[1] + height)
        pen.rectangle(frame, outline=_FRAME)
        for number, line in enumerate(panel.lines, 1):
            write(left, top + _HEAD + _SIDE + 2 + number * _LINE, 11, _GREY, line)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _encode(pixels: Pixels) -> bytes:
    """Encode an image as an 8-bit RGB PNG."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # filter 0 before each line
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 9)), _chunk(b"IEND", b"")
    return _PNG + b"".join(body)
