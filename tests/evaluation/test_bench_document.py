"""The results document of `gossamer bench`: what a run keeps, whatever ends it."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from gossamer.errors import PlanError
from gossamer.evaluation.bench import document as module
from gossamer.evaluation.bench import timing
from gossamer.evaluation.bench.document import Run, run_cases
from gossamer.evaluation.bench.timing import count_synchronisations, time_call

CPU = torch.device("cpu")
CASES = [SimpleNamespace(name=name) for name in "abc"]


def rows_of(case):
    yield {"case": case.name, "row": 1}
    yield {"case": case.name, "row": 2}


def test_every_row_and_where_it_was_made(tmp_path):
    out = tmp_path / "new" / "rows.json"
    document = run_cases(CASES, rows_of, Run(device=CPU, out=out))
    assert [row["case"] for row in document["rows"]] == list("aabbcc")
    assert (document["failures"], document["missing"]) == ([], [])
    assert {"device", "torch", "commit", "triton", "flash-attn-4"} <= set(document["environment"])
    assert json.loads(out.read_text()) == document


def test_a_killed_run_keeps_its_rows(tmp_path):
    out = tmp_path / "rows.json"

    def measure(case):
        yield {"case": case.name}
        if case.name == "b":
            raise KeyboardInterrupt
        yield {"case": case.name}

    with pytest.raises(KeyboardInterrupt):
        run_cases(CASES, measure, Run(device=CPU, out=out))
    kept = json.loads(out.read_text())
    assert [row["case"] for row in kept["rows"]] == ["a", "a", "b"]
    assert kept["missing"] == ["b", "c"]


def test_time_ends_a_run_between_two_cases(monkeypatch):
    now = iter([0.0, 0.0, 4.0, 11.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    said = []
    document = run_cases(CASES, rows_of, Run(device=CPU, seconds=10, say=said.append))
    assert [row["case"] for row in document["rows"]] == list("aabb")
    assert document["missing"] == ["c"]
    assert said == ["a", "b", "10 s are over, missing: c"]


@pytest.mark.parametrize(
    "error", [ArithmeticError, PlanError, RuntimeError, torch.OutOfMemoryError]
)
def test_a_case_that_fails_does_not_end_the_run(error):
    def measure(case):
        yield {"case": case.name}
        if case.name == "b":
            raise error("too\nbad")

    said = []
    document = run_cases(CASES, measure, Run(device=CPU, say=said.append))
    assert [row["case"] for row in document["rows"]] == list("abc")
    assert document["failures"] == [{"case": "b", "failure": "too bad"}]
    assert document["missing"] == []
    assert said[-1] == "refused: b: too bad"


def test_faults_of_the_program_are_not_hidden():
    def measure(case):
        yield {}
        raise KeyError(case.name)

    with pytest.raises(KeyError):
        run_cases(CASES, measure, Run(device=CPU))


def test_a_refused_row_is_no_row():
    def measure(case):
        yield {"case": case.name, "failure": "wrong"}
        yield {"case": case.name}

    document = run_cases(CASES[:1], measure, Run(device=CPU))
    assert document["rows"] == [{"case": "a"}]
    assert document["failures"] == [{"case": "a", "failure": "wrong"}]


class FakeEvent:
    """A CUDA event on a clock that a call moves on."""

    now = 0.0

    def __init__(self, *, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


class OtherWork:
    """What the device does before each repetition; it counts for nothing."""

    def __init__(self, device):
        assert device == 0

    def zero_(self):
        FakeEvent.now += 50.0


@pytest.fixture
def cuda(monkeypatch):
    modes = [0]
    for name, value in {
        "Event": FakeEvent,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 175,
        "get_sync_debug_mode": lambda: modes[-1],
        "set_sync_debug_mode": modes.append,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(timing, "_other_work", OtherWork)
    return modes


def test_timing_takes_the_median_and_leaves_warm_up_out(cuda):
    calls = []

    def call():
        calls.append(1)
        FakeEvent.now += 1000.0 if len(calls) == 1 else 200.0 + len(calls)

    found = time_call(call, warm_up=2, least=3)
    assert len(calls) == 5
    assert found.median_ms == 204.0
    assert found.peak_extra_bytes == 75


def test_synchronisations_are_torchs_warnings(cuda):
    def call():
        assert cuda[-1] == "warn"
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (somewhere)", stacklevel=1)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    assert count_synchronisations(call) == 3
    assert cuda[-1] == 0
