"""Writing files whole or not at all, and reading JSON back with errors that name the file."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Generator[Path, None, None]:
    """Give a scratch path that becomes `path` when the block ends without an error.

    The scratch file lies in the same folder, so that the final rename is atomic; readers see the
    old file or the new one, never a part. On any error, Ctrl-C included, it is removed.

    Args:
        path: The file to write; missing folders above it are made.

    Yields:
        The scratch path, with the same suffix as `path`.

    Raises:
        OSError: The folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8."""
    with atomic_path(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object, *, compact: bool = False) -> None:
    """Write `value` to `path` atomically as JSON.

    Args:
        path: The file to write.
        value: What to write.
        compact: Without line breaks, for files of many numbers that nobody reads.

    Raises:
        ValueError: `value` holds NaN or an infinity, which JSON does not have.
    """
    indent = None if compact else 1
    write_text(path, json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at `path`.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, or no object; the message names it and the place.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        # The file's content is the wrong value, not the caller's argument of the wrong type.
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")  # noqa: TRY004
    return value


def check_file(path: Path, suffixes: Collection[str] = ()) -> None:
    """Refuse a file that could not be written at the end of a long job.

    Args:
        path: The file to write; missing folders above it will be made.
        suffixes: What its name may end in, in lower case; empty for anything.

    Raises:
        ValueError: The name ends in something else; the message lists what it may end in.
        OSError: A folder has the name, or the folder above it cannot be made or written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path}: the name must end in {' or '.join(suffixes)}")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, so that a long job does not fail at its end.

    Nothing is left behind: where `folder` does not exist, the nearest folder above it is tried.

    Raises:
        OSError: The folder cannot be made or written.
    """
    present = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not present.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(present))
    with tempfile.TemporaryFile(dir=present):
        pass
