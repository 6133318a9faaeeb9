"""`gossamer bench plans`: what planning costs, beside the fastest dense attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from gossamer.errors import PlanError
from gossamer.evaluation.bench.case import Tensors
from gossamer.evaluation.bench.dense import DenseTimes, fastest_dense
from gossamer.evaluation.bench.document import Row, Run, failure, run_cases
from gossamer.evaluation.bench.plan_case import PlanCase
from gossamer.evaluation.bench.plan_cases import DEFAULT_CASES
from gossamer.evaluation.bench.timing import count_synchronisations, time_call

_DENSE = "dense"


def bench_plans(
    *, cases: Sequence[PlanCase] = DEFAULT_CASES, run: Run | None = None
) -> dict[str, Any]:
    """Time planning alone on a CUDA device.

    Each result is checked before it is timed: plans by their own laws and the density asked for,
    clusters by their members, an anchor's output against float64.

    Args:
        cases: What to run.
        run: Device, file and time limit; None for the current CUDA device without either.

    Returns:
        The results document, see `run_cases`. A row has case, stage, the fields of `Timing`,
        `dense_ms` and `dense_kernel` of the same shape in the same run, `dense_share` (the stage's
        time over it), `synchronisations` of the host in one call, and `density` of the plan, None
        where there is none.
    """
    run = Run() if run is None else run
    dense_of: dict[tuple[int, ...], DenseTimes] = {}
    with torch.no_grad():
        return run_cases(cases, lambda case: _measure(case, dense_of, run), run)


def _measure(
    case: PlanCase, dense_of: dict[tuple[int, ...], DenseTimes], run: Run
) -> Iterator[Row]:
    """Yield the rows of a case; the first of a shape are those of dense attention."""
    tensors = case.tensors(run.device)
    shape = tuple(tensors[0].shape)
    if shape not in dense_of:
        dense_of[shape] = fastest_dense(*tensors)
        yield from _dense_rows(tensors, dense_of[shape])
    dense = dense_of[shape]
    for stage in case.stages(tensors, run.device):
        run.say(f"{case.name}, {stage.name}")
        try:
            density = stage.check(stage.call())
        except (ArithmeticError, PlanError) as wrong:
            yield failure(f"{case.name} {stage.name}", wrong)
            continue
        timing = time_call(stage.call)
        yield {
            "case": case.name,
            "stage": stage.name,
            **asdict(timing),
            "dense_ms": dense.timing.median_ms,
            "dense_kernel": dense.name,
            "dense_share": timing.median_ms / dense.timing.median_ms,
            "synchronisations": count_synchronisations(stage.call),
            "density": density,
        }


def _dense_rows(tensors: Tensors, dense: DenseTimes) -> Iterator[Row]:
    """Yield a row for every dense attention of a shape."""
    for name, timing in dense.each:
        yield {
            "case": f"{_DENSE}-{tensors[0].shape[2]}",
            "stage": name,
            **asdict(timing),
            "dense_ms": dense.timing.median_ms,
            "dense_kernel": dense.name,
            "dense_share": timing.median_ms / dense.timing.median_ms,
            "synchronisations": 0,
            "density": 1.0,
        }
