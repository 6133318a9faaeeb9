"""Videos as data URIs, as long as they are small enough for a page."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_CLIP_BYTES = 8 << 20
MAX_TOTAL_BYTES = 96 << 20  # a third more as base64; browsers parse such a page in about a second

_TYPES = {".mp4": "video/mp4", ".m4v": "video/mp4", ".webm": "video/webm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """A video in the page.

    Attributes:
        uri: Its data URI; empty where it was left out.
        note: Why it was left out; empty otherwise.
    """

    uri: str = ""
    note: str = ""


def inline_clips(paths: Iterable[Path | None]) -> list[Clip]:
    """Turn video files into data URIs, in order, up to the limits of this module.

    Args:
        paths: The files; None where no video was kept.

    Raises:
        OSError: A file cannot be read.
    """
    clips: list[Clip] = []
    total = 0
    for path in paths:
        problem = _problem(path, total)
        if path is None or problem:
            clips.append(Clip(note=problem))
            continue
        body = path.read_bytes()
        total += len(body)
        encoded = base64.b64encode(body).decode("ascii")
        clips.append(Clip(uri=f"data:{_TYPES[path.suffix.lower()]};base64,{encoded}"))
    return clips


def _problem(path: Path | None, total: int) -> str:
    """Say why a file cannot be inlined; empty if it can."""
    if path is None:
        return "no video was kept"
    if path.suffix.lower() not in _TYPES:
        return f"{path.name} is not a video that browsers play ({', '.join(_TYPES)})"
    size = path.stat().st_size
    if size > MAX_CLIP_BYTES:
        return f"{path.name} is too large for a page ({size / 1e6:.1f} MB)"
    if total + size > MAX_TOTAL_BYTES:
        return f"{path.name} was left out: the page is full"
    return ""
