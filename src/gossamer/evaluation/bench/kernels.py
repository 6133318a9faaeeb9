"""`gossamer bench kernels`: every kernel on the same plans, beside the fastest dense attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.bench.case import Case, Stage
from gossamer.evaluation.bench.cases import CASES
from gossamer.evaluation.bench.check import check_kernel, error_bound
from gossamer.evaluation.bench.dense import DenseTimes, fastest_dense
from gossamer.evaluation.bench.document import Row, Run, failure, run_cases
from gossamer.evaluation.bench.external import EXTERNAL, external_kernels
from gossamer.evaluation.bench.timing import Timing, time_call

DENSITIES = (0.1, 0.2, 0.5)


def bench_kernels(
    *,
    cases: Sequence[Case] = CASES,
    densities: Sequence[float] = DENSITIES,
    kernels: Sequence[str] | None = None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Time kernels on a CUDA device.

    Each row is checked against `kernel="reference"` before it is timed, and dense attention is
    timed in the same run: efficiency = fastest dense time / sparse time * density. Causal plans are
    measured against causal dense attention.

    Args:
        cases: What to run.
        densities: Shares of the keys per row, for the cases that have none of their own.
        kernels: Names of Gossamer's kernels, and of those of `external.EXTERNAL`; None for all but
            the reference that run here.
        run: Device, file and time limit; None for the current CUDA device without either.

    Returns:
        The results document, see `run_cases`. A kernel that is further from the reference than
        twice dense attention is among its failures and has no time.
    """
    run = Run() if run is None else run
    with torch.no_grad():
        return run_cases(cases, lambda case: _measure(case, densities, kernels, run), run)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """One kernel on one plan.

    Attributes:
        stage: Whose plan it was.
        kernel: The kernel's name.
        timing: Kernel and preparation together.
    """

    stage: Stage
    kernel: str
    timing: Timing


def _measure(
    case: Case, densities: Sequence[float], kernels: Sequence[str] | None, run: Run
) -> Iterator[Row]:
    """Yield the rows of a case: dense attention, every kernel on every plan, sums over layers."""
    q, k, v = case.tensors(run.device)
    dense = fastest_dense(q, k, v, causal=case.causal)
    for name, timing in dense.each:
        yield {**_named(case, "", name, q.shape[2]), **_dense_row(timing)}
    bound = error_bound(q, k, v)
    of_layers: list[_Measured] = []
    kinds: set[str] = set()
    for stage in case.stages(densities, (q, k, v), run.device):
        kinds |= {stage.name} if stage.layers else set()
        prepared = None if stage.prepare is None else time_call(stage.prepare)
        for kernel in _runnable(q, k, v, stage.plan, kernels):
            what = " ".join(part for part in (case.name, stage.name) if part)
            run.say(f"{what} at {stage.plan.density:.3g}, {kernel}")
            try:
                error = check_kernel(kernel, q, k, v, stage.plan, bound)
            except ArithmeticError as wrong:
                yield failure(what, wrong)
                continue
            timing = time_call(partial(gs.attend, q, k, v, stage.plan, kernel=kernel))
            row = _row(stage, timing, prepared, dense)
            yield {**_named(case, stage.name, kernel, q.shape[2]), **row, "rel_error": error}
            if stage.layers:
                of_layers.append(_Measured(stage=stage, kernel=kernel, timing=timing))
        if prepared is None:
            yield from _external(case, stage, (q, k, v), dense, kernels, bound, run)
    if kinds and kinds == {one.stage.name for one in of_layers}:
        row = _over_layers(of_layers, dense)
        stage_name, kernel = row.pop("stage"), row.pop("kernel")
        yield {**_named(case, stage_name, kernel, q.shape[2]), **row}


def _external(
    case: Case,
    stage: Stage,
    tensors: tuple[Tensor, Tensor, Tensor],
    dense: DenseTimes,
    kernels: Sequence[str] | None,
    bound: float,
    run: Run,
) -> Iterator[Row]:
    """Yield the rows of other libraries' kernels that run the plan of a stage."""
    q, k, v = tensors
    names = EXTERNAL if kernels is None else kernels
    for name, call in external_kernels(q, k, v, stage.plan, names).items():
        what = " ".join(part for part in (case.name, stage.name, name) if part)
        run.say(f"{what} at {stage.plan.density:.3g}")
        try:
            error = check_kernel(name, q, k, v, stage.plan, bound, call=call)
            row = _row(stage, time_call(call), None, dense)
        except torch.OutOfMemoryError:
            raise
        except Exception as wrong:  # noqa: BLE001 -- what others raise is theirs to say
            yield failure(what, wrong)
            continue
        yield {**_named(case, stage.name, name, q.shape[2]), **row, "rel_error": error}


def _runnable(
    q: Tensor, k: Tensor, v: Tensor, plan: gs.SparsePlan, kernels: Sequence[str] | None
) -> Iterator[str]:
    """Yield the kernels to time."""
    for name, reasons in gs.explain_kernels(q, k, v, plan).items():
        wanted = name != "reference" if kernels is None else name in kernels
        if wanted and not reasons:
            yield name


def _named(case: Case, stage: str, kernel: str, num_tokens: int) -> Row:
    """Return how a row begins."""
    return {"case": case.name, "stage": stage, "kernel": kernel, "num_tokens": num_tokens}


def _row(stage: Stage, timing: Timing, prepared: Timing | None, dense: DenseTimes) -> Row:
    """Return the row of a kernel; `median_ms` holds the preparation too."""
    prepare_ms = 0.0 if prepared is None else prepared.median_ms
    whole = replace(timing, median_ms=timing.median_ms + prepare_ms)
    return {
        "density": stage.plan.density,
        **asdict(whole),
        "prepare_ms": prepare_ms,
        "layers": stage.layers,
        **_against(dense, whole.median_ms, dense.timing.median_ms, stage.plan.density),
    }


def _over_layers(measured: Sequence[_Measured], dense: DenseTimes) -> Row:
    """Return the row of all layers, each kind of layer by the kernel that is its fastest."""
    best: dict[str, _Measured] = {}
    for one in measured:
        other = best.get(one.stage.name)
        if other is None or one.timing.median_ms < other.timing.median_ms:
            best[one.stage.name] = one
    layers = sum(one.stage.layers for one in best.values())
    median = sum(one.stage.layers * one.timing.median_ms for one in best.values())
    density = sum(one.stage.layers * one.stage.plan.density for one in best.values()) / layers
    return {
        "stage": f"{layers} layers",
        "kernel": " + ".join(dict.fromkeys(one.kernel for one in best.values())),
        "density": density,
        "median_ms": median,
        "spread_ms": sum(one.stage.layers * one.timing.spread_ms for one in best.values()),
        "peak_extra_bytes": max(one.timing.peak_extra_bytes for one in best.values()),
        "prepare_ms": 0.0,
        "layers": layers,
        **_against(dense, median, layers * dense.timing.median_ms, density),
        "rel_error": None,
    }


def _against(dense: DenseTimes, median_ms: float, dense_ms: float, density: float) -> Row:
    """Return how a time stands to dense attention's."""
    return {
        "dense_ms": dense_ms,
        "dense_kernel": dense.name,
        "efficiency": dense_ms / median_ms * density,
        "speedup": dense_ms / median_ms,
    }


def _dense_row(timing: Timing) -> Row:
    """Return the row of a dense attention."""
    return {
        "density": 1.0,
        **asdict(timing),
        "prepare_ms": 0.0,
        "layers": 0,
        "dense_ms": timing.median_ms,
        "dense_kernel": None,
        "efficiency": 1.0,
        "speedup": 1.0,
        "rel_error": None,
    }
