"""Talking to the terminal: results on stdout, everything else on stderr."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# Narrower than this a table wraps its numbers; output that is piped has no width of its own.
_PIPED_WIDTH = 120


def say(text: str) -> None:
    """Write a line of text to stderr."""
    sys.stderr.write(text + "\n")


def print_json(value: object) -> None:
    """Write `value` to stdout as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None
) -> None:
    """Write a table to stdout; every column but the first is aligned like numbers if it holds them.

    Args:
        columns: The headings.
        rows: The cells, as text.
        title: A line above.
    """
    if title is not None:
        sys.stdout.write(title + "\n")
    table = Table()
    for index, column in enumerate(columns):
        is_number = all(_looks_like_number(row[index]) for row in rows)
        justify = "right" if is_number and rows else "left"
        # The first column holds names, which must stay whole to be read or copied.
        table.add_column(column, justify=justify, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False)
    console.print(table)


def print_facts(facts: Mapping[str, str]) -> None:
    """Write names and values to stdout, one a line, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        sys.stdout.write(f"{name.ljust(width)}  {value}\n")


class ProgressBar:
    """A bar with the time left on a terminal, a line per task elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps,"),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._is_terminal = console.is_terminal
        self._task: TaskID | None = None
        self._description = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, description: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps are done and what is under way."""
        if not self._is_terminal:
            if description != self._description:
                say(description)
        elif self._task is None:
            self._task = self._progress.add_task(description, total=total, completed=done)
        else:
            self._progress.update(self._task, description=description, completed=done, total=total)
        self._description = description


@contextmanager
def quiet_libraries() -> Generator[None, None, None]:
    """Keep third-party progress bars, warnings and prints from the terminal.

    Bars and log messages stay off for the process, the rest for the block alone.
    Whatever a library still prints goes to stderr: stdout holds the result and nothing else.
    """
    for library in ("diffusers", "transformers"):
        if importlib.util.find_spec(library) is not None:
            logging = importlib.import_module(f"{library}.utils.logging")
            logging.set_verbosity_error()
            logging.disable_progress_bar()
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        for module in ("diffusers", "transformers", "huggingface_hub", "torch", "accelerate"):
            warnings.filterwarnings("ignore", module=rf"{module}(\..*)?$")
        yield


def _looks_like_number(cell: str) -> bool:
    """Say whether a cell holds a number, or stands for a missing one."""
    return cell in ("", "-") or cell[:1].isdigit() or cell[:1] in ("-", "∞", ".")
