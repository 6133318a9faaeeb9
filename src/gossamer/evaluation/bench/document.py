"""The results document: written after every row, stopped by the clock between two cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from gossamer.errors import GossamerError
from gossamer.evaluation.environment import environment, package_version
from gossamer.evaluation.files import write_json

Row = dict[str, Any]
_PACKAGES = ("triton", "flash-attn-4", "flash-kmeans")


class Named(Protocol):
    """What a run is made of."""

    @property
    def name(self) -> str:
        """As results name it."""
        ...


CaseT = TypeVar("CaseT", bound=Named)


def _silent(_text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How a benchmark runs, whatever it times.

    Attributes:
        device: Where it runs.
        out: The JSON file that holds the rows so far, whole at any time; None writes none.
        seconds: No case begins later than this; None for no limit.
        say: Told what runs next, and what was missed.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    out: Path | None = None
    seconds: float | None = None
    say: Callable[[str], None] = _silent


def run_cases(
    cases: Sequence[CaseT], measure: Callable[[CaseT], Iterable[Row]], run: Run
) -> dict[str, Any]:
    """Measure cases one after another, and keep what is measured at once.

    A case whose results are wrong, or which does not fit the device, is left at its failure, and
    the next one begins: a figure that the gate refused is never among the rows.

    Args:
        cases: What to measure, in this order.
        measure: Yields the rows of a case; a row with the key "failure" holds what went wrong.
        run: Device, file and time.

    Returns:
        The document: `environment`; `rows`; `failures`, one {"case", "failure"} each; `missing`,
        the names of the cases that the time did not suffice for.
    """
    versions = {name: package_version(name) for name in _PACKAGES}
    rows: list[Row] = []
    failures: list[Row] = []
    document: dict[str, Any] = {
        "environment": {**environment(run.device), **versions},
        "rows": rows,
        "failures": failures,
        "missing": [case.name for case in cases],
    }
    begin = time.monotonic()
    for index, case in enumerate(cases):
        if run.seconds is not None and time.monotonic() - begin >= run.seconds:
            break
        run.say(case.name)
        try:
            for row in measure(case):
                (failures if "failure" in row else rows).append(row)
                _write(document, run)
        except (ArithmeticError, GossamerError, RuntimeError) as error:
            # RuntimeError: what torch raises where memory ends or a kernel is missing.
            failures.append(failure(case.name, error))
        document["missing"] = [left.name for left in cases[index + 1 :]]
        _write(document, run)
        _give_memory_back(run.device)
    for row in failures:
        run.say(f"refused: {row['case']}: {row['failure']}")
    if document["missing"]:
        run.say(f"{run.seconds:g} s are over, missing: {', '.join(document['missing'])}")
    return document


def failure(case: str, error: Exception) -> Row:
    """Return the row of what could not be timed."""
    text = " ".join(str(error).split()) or type(error).__name__
    return {"case": case, "failure": text}


def _write(document: dict[str, Any], run: Run) -> None:
    if run.out is not None:
        write_json(run.out, document)


def _give_memory_back(device: torch.device) -> None:
    """Free what the last case held, so that the next one's shapes find whole pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
