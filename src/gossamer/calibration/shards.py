"""Finished measurements on disk: one file each, whole or not there, so that any stop can resume."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.errors import ProfileMismatchError
from gossamer.select.profile import FORMAT, METADATA_KEY, read_metadata


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a name for a measurement: a hash of everything that would change its result."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def save(path: Path, kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a safetensors file that appears whole or not at all, also if the machine dies.

    The same tensors and metadata give the same bytes.

    Args:
        path: The file; folders above it are made.
        kind: What kind of file it is; readers refuse another.
        tensors: By name.
        metadata: JSON-able values.

    Raises:
        OSError: It cannot be written.
    """
    from safetensors.torch import save as to_bytes

    # One key: safetensors writes several in no fixed order.
    text = json.dumps({"kind": kind, "format": FORMAT, **metadata}, sort_keys=True)
    data = to_bytes(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, {METADATA_KEY: text}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def load(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return a file's tensors and metadata; None where it is missing or not readable as its kind.

    What cannot be read is measured again.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = read_metadata(file, str(path), kind)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 -- no mapping
    except (OSError, SafetensorError, ProfileMismatchError):
        return None


def remove_scratch(folder: Path, name: str = "*") -> None:
    """Remove what killed processes left half-written; files of running ones stay.

    Args:
        folder: Where `save` wrote.
        name: The files that it wrote, as a pattern.
    """
    for scratch in folder.glob(f".{name}.*.tmp"):
        number = scratch.name.split(".")[-2]
        if number.isdecimal() and not _is_running(int(number)):
            scratch.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Say whether a process of this machine is alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # alive, and another user's
        return True
    return True
