"""Reads JSON values with their place, so that every complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gossamer.errors import GossamerError

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"


class ReportError(GossamerError, ValueError):
    """A results document, or a file that it names, is missing or garbled."""


@dataclass(frozen=True, slots=True)
class Field:
    """A JSON value and where it stands.

    Attributes:
        value: The parsed value.
        file: The file it was read from.
        key: Its place in that file, e.g. `runs[3].psnr_db`; empty for the whole document.
    """

    value: Json
    file: Path
    key: str = ""

    def fail(self, problem: str) -> ReportError:
        """Return the error that says what is wrong with this value, in one line."""
        place = f"{self.file}: {self.key}" if self.key else str(self.file)
        return ReportError(f"{place}: {problem}")

    def _wrong_type(self, wanted: str) -> ReportError:
        return self.fail(f"expected {wanted}, got {_show(self.value)}")

    def has(self, name: str) -> bool:
        """Tell whether this object has a member `name` that is not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def child(self, name: str) -> Field:
        """Return the member `name` of this object, null when absent."""
        if not isinstance(self.value, dict):
            raise self._wrong_type("an object")
        return Field(self.value.get(name), self.file, f"{self.key}.{name}" if self.key else name)

    def members(self) -> Iterator[tuple[str, Field]]:
        """Yield the names and members of this object; nothing for null."""
        if self.value is None:
            return
        if not isinstance(self.value, dict):
            raise self._wrong_type("an object")
        for name in self.value:
            yield name, self.child(name)

    def items(self) -> Iterator[Field]:
        """Yield the items of this list."""
        if not isinstance(self.value, list):
            raise self._wrong_type("a list")
        for position, item in enumerate(self.value):
            yield Field(item, self.file, f"{self.key}[{position}]")

    def text(self) -> str:
        """Return this value as text, which it must be."""
        if not isinstance(self.value, str):
            raise self._wrong_type("text")
        return self.value

    def integer(self) -> int:
        """Return this value as a whole number, which it must be."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self._wrong_type("a whole number")
        return self.value

    def number(self, *, infinite: bool = False) -> float | None:
        """Return this value as a number; None for null and for NaN, which is no measurement.

        Args:
            infinite: Whether it may be infinite, also written as text: JSON has no infinity.
        """
        value = self.value
        if isinstance(value, str) and value.lower() in {"inf", "infinity", "-inf", "-infinity"}:
            value = float(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type("a number or null")
        if math.isinf(value) and not infinite:
            raise self.fail("expected a finite number or null, got an infinite one")
        return None if math.isnan(value) else float(value)

    def words(self) -> str:
        """Return any value as short text: empty for null, lists and objects flattened."""
        value = self.value
        if value is None:
            return ""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{value:g}"
        if isinstance(value, list):
            return ", ".join(item.words() for item in self.items())
        if isinstance(value, dict):
            return ", ".join(f"{name} {field.words()}" for name, field in self.members())
        return str(value)

    def path(self) -> Path:
        """Return the existing file this value names, relative to the document's folder.

        Raises:
            ReportError: if the path leaves that folder or no file is there.
        """
        folder = self.file.parent.resolve()
        path = (folder / self.text()).resolve()
        if not path.is_relative_to(folder):
            raise self.fail(f"{self.text()!r} is outside the folder of the results")
        if not path.is_file():
            raise self.fail(f"no file {self.text()!r} beside the results")
        return path

    def optional_path(self) -> Path | None:
        """Return the existing file this value names, or None for null."""
        return None if self.value is None else self.path()


def read_json(path: Path) -> Field:
    """Read a JSON file.

    Raises:
        ReportError: if it cannot be read or is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not UTF-8 text (byte {error.start})") from error
    try:
        return Field(json.loads(text), path)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ReportError(f"{path}: not JSON ({error.msg} at {place})") from error
    except RecursionError as error:
        raise ReportError(f"{path}: not a results document (nested too deeply)") from error


def _show(value: Json) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
