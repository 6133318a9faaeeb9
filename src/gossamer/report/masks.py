"""Draws plans as masks: PNG pictures in data URIs, coloured by the page."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib

import numpy as np
import numpy.typing as npt

from gossamer.report.document import Mask
from gossamer.report.fields import Field

# The accent of the light page; the dark page inverts the picture.
INK = (24, 78, 119)

_PNG = b"\x89PNG\r\n\x1a\n"


def mask_uri(mask: Mask) -> str:
    """Return the picture of a mask as a `data:` URI.

    The mask is stored as `png_base64`, a picture to show as it is, or as `mask`, rows of numbers
    0…1: the share of a cell's query–key pairs that is read. The latter is drawn one pixel per cell,
    clear where nothing is read, opaque where most is: cells of a scattered plan are read in part
    only, and would all be pale on a common scale.

    Raises:
        ReportError: naming the file and the key, if the mask is garbled.
    """
    field = mask.image
    if field.has("png_base64"):
        png = _decode(field.child("png_base64"))
        if not png.startswith(_PNG):
            raise field.child("png_base64").fail("not a PNG picture")
    else:
        cells = _cells(mask, field.child("mask"))
        png = encode_png(cells / (cells.max() or 1))
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def encode_png(opacity: npt.NDArray[np.float64], rgb: tuple[int, int, int] = INK) -> bytes:
    """Encode a picture of one colour.

    Args:
        opacity: [rows, columns], 0 clear … 1 opaque.
        rgb: The colour.

    Returns:
        An 8-bit RGBA PNG.
    """
    rows, columns = opacity.shape
    pixels = np.empty((rows, columns, 4), np.uint8)
    pixels[..., :3] = rgb
    pixels[..., 3] = np.rint(np.clip(opacity, 0, 1) * 255)
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)  # filter 0 before each line
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines, 9)), _chunk(b"IEND", b"")
    return _PNG + b"".join(body)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _decode(field: Field) -> bytes:
    try:
        return base64.b64decode(field.text(), validate=True)
    except binascii.Error as error:
        raise field.fail("not base64") from error


def _cells(mask: Mask, field: Field) -> npt.NDArray[np.float64]:
    lines = [[_cell(cell) for cell in line.items()] for line in field.items()]
    if len(lines) != mask.rows or not lines or {len(line) for line in lines} != {mask.cols}:
        raise field.fail(f"expected {mask.rows} rows of {mask.cols} cells")
    return np.array(lines, np.float64)


def _cell(field: Field) -> float:
    value = field.number()
    if value is None:
        raise field.fail("expected a number, got null")
    return value
