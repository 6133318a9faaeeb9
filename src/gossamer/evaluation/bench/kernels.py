"""`gossamer bench kernels`: every kernel on the same plans, beside the fastest dense attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gossamer as gs
from gossamer.evaluation.bench.cases import CASES, Case
from gossamer.evaluation.bench.timing import Timing, time_call
from gossamer.evaluation.environment import environment, package_version
from gossamer.kernels.flash import unavailable
from gossamer.plan.rows import tile_queries, tile_rows

DENSITIES = (0.1, 0.2, 0.5)
_CHECKED_TILES = 4  # per head, against the float64 reference
# A row of few keys in bfloat16 is further from float64 than dense attention is, by its rounding.
_ALLOWED = 2.0
_ROUNDING = torch.finfo(torch.bfloat16).eps

OnCase = Callable[[str], None]


def bench_kernels(
    *,
    cases: Sequence[Case] = CASES,
    densities: Sequence[float] = DENSITIES,
    kernels: Sequence[str] | None = None,
    on_case: OnCase | None = None,
) -> dict[str, Any]:
    """Time kernels on the current CUDA device.

    Each row is checked against `kernel="reference"` before it is timed, and dense attention is
    timed in the same run: efficiency = fastest dense time / sparse time * density.

    Args:
        cases: What to run.
        densities: Shares of the keys per row.
        kernels: Names of Gossamer's kernels; None for all but the reference that run here.
        on_case: Called with what runs next.

    Returns:
        The results document: `environment` and `rows`.

    Raises:
        ArithmeticError: A kernel is further from the reference than twice dense attention is.
    """
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    for case in cases:
        q, k, v = case.tensors(device)
        with torch.no_grad():
            dense, dense_name, others = _fastest_dense(q, k, v)
            rows += [{"case": case.name, "kernel": name, **_dense_row(t)} for name, t in others]
            bound = _bound(q, k, v)
            for density in densities:
                plan = case.plan(density, device)
                for name in _runnable(q, k, v, plan, kernels):
                    if on_case is not None:
                        on_case(f"{case.name} at {density:g}, {name}")
                    error = _check(case, name, q, k, v, plan, bound)
                    timing = time_call(partial(gs.attend, q, k, v, plan, kernel=name))
                    row = _row(case, name, plan, timing, dense)
                    rows.append({**row, "dense_kernel": dense_name, "rel_error": error})
                del plan
    versions = {name: package_version(name) for name in ("triton", "flash-attn-4")}
    return {"environment": {**environment(device), **versions}, "rows": rows}


def _runnable(
    q: Tensor, k: Tensor, v: Tensor, plan: gs.SparsePlan, kernels: Sequence[str] | None
) -> Iterator[str]:
    """Yield the kernels to time."""
    for name, reasons in gs.explain_kernels(q, k, v, plan).items():
        wanted = name != "reference" if kernels is None else name in kernels
        if wanted and not reasons:
            yield name


def _fastest_dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Timing, str, list[tuple[str, Timing]]]:
    """Time every dense attention there is; return the fastest, its name and all of them."""
    found: list[tuple[str, Timing]] = []
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash-2": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            found.append(
                (name, time_call(lambda: functional.scaled_dot_product_attention(q, k, v)))
            )
    if not unavailable(q.device):
        flash = _flash_attention()
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))  # it takes [B, N, H, D], strided
        found.append(("flash-attn-4", time_call(lambda: flash(q_, k_, v_))))
    name, timing = min(found, key=lambda entry: entry[1].median_ms)
    return timing, name, found


def _flash_attention() -> Callable[..., object]:
    """Return flash-attn-4's dense attention."""
    return importlib.import_module("flash_attn.cute.interface").flash_attn_func


def _bound(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Return how far a kernel may stand from float64, relative: twice what dense attention does."""
    q, k, v = q[:, :1, :128], k[:, :1, :4096], v[:, :1, :4096]
    got = functional.scaled_dot_product_attention(q, k, v).double()
    want = functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return _ALLOWED * float((got - want).norm() / want.norm()) + _ROUNDING


def _check(
    case: Case, kernel: str, q: Tensor, k: Tensor, v: Tensor, plan: gs.SparsePlan, bound: float
) -> float:
    """Return the relative error on some tiles of every head, or refuse to time the kernel."""
    tiles = torch.linspace(0, plan.num_tiles - 1, _CHECKED_TILES, device=q.device).long()
    some = replace(
        plan,
        query_index=tile_queries(plan)[:, :, tiles].int(),
        tile_row=tile_rows(plan)[:, :, tiles].int(),
    )
    queries = tile_queries(some).flatten()
    queries = queries[queries >= 0]
    want = gs.attend(q, k, v, some, kernel="reference").out[:, :, queries].double()
    got = gs.attend(q, k, v, plan, kernel=kernel).out[:, :, queries].double()
    error = float((got - want).norm() / want.norm())
    if not error <= bound:
        raise ArithmeticError(
            f"{kernel} on {case.name}: relative error {error:.3g} is above {bound:.3g}"
        )
    return error


def _row(
    case: Case, kernel: str, plan: gs.SparsePlan, timing: Timing, dense: Timing
) -> dict[str, Any]:
    """Return one row of the results."""
    return {
        "case": case.name,
        "kernel": kernel,
        "density": plan.density,
        **asdict(timing),
        "dense_ms": dense.median_ms,
        "efficiency": dense.median_ms / timing.median_ms * plan.density,
        "speedup": dense.median_ms / timing.median_ms,
    }


def _dense_row(timing: Timing) -> dict[str, Any]:
    """Return the row of a dense attention."""
    return {
        "density": 1.0,
        **asdict(timing),
        "dense_ms": timing.median_ms,
        "dense_kernel": None,
        "efficiency": 1.0,
        "speedup": 1.0,
        "rel_error": None,
    }
