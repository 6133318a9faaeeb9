"""`gossamer bench model`: a whole forward of a video transformer, densely and by recipes."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gossamer as gs
from gossamer.evaluation.bench.check import check_dense, check_kernel, error_bound
from gossamer.evaluation.bench.dense import attend_densely, fastest_dense
from gossamer.evaluation.bench.document import Row, Run, failure, run_cases
from gossamer.evaluation.bench.timing import time_call
from gossamer.evaluation.bench.wan import MODELS, WanModel, check_diffusers
from gossamer.reuse import Anchor, call_facts
from gossamer.session import AttentionEvent, DenseBackend, Observer

_BRANCH = "cond"
_NUM_STEPS = 1 << 20  # no forward is the last one, and no anchor is due again
_WARM_UP, _LEAST = 1, 3  # of forwards that take seconds; one more has run before, for the check


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What a model's self-attention does.

    Attributes:
        name: As results name it, e.g. "instagen-8-8".
        recipe: The recipe.
        path: What every call of a timed forward does: "dense", "sparse" or "reuse".
        shared_anchor: Whether all layers reuse one anchor, made of random tensors: those of all
            layers would not fit beside a model of 14B parameters. What a step reads is the same.
    """

    name: str
    recipe: gs.Recipe
    path: str
    shared_anchor: bool = False


def _dense() -> Variant:
    return Variant(name="dense", recipe=gs.Recipe(method=gs.Dense(), min_tokens=0), path="dense")


def _sparse() -> tuple[Variant, ...]:
    """Return the sparse variants: steady state, after the step that began with nothing."""
    once = partial(gs.Reuse, every=_NUM_STEPS)
    return (
        Variant(
            name="instagen-8-8",
            recipe=gs.Recipe(
                method=gs.InstaGen(exact=0.08, sampled=0.08, query_clusters=300, key_clusters=1000),
                min_tokens=0,
            ),
            path="sparse",
        ),
        Variant(
            name="blocks-50-fixed",
            recipe=gs.Recipe(
                method=gs.BlockTopK(density=0.5), reuse=once(residual=False), min_tokens=0
            ),
            path="reuse",
        ),
        Variant(
            name="mc-sparse-15-reuse",
            recipe=gs.Recipe(
                method=gs.MCSparse(density=0.15), reuse=once(residual=True), min_tokens=0
            ),
            path="reuse",
            shared_anchor=True,
        ),
    )


def bench_model(*, models: Sequence[WanModel] = MODELS, run: Run | None = None) -> dict[str, Any]:
    """Time forwards of whole models on a CUDA device.

    Weights and inputs are random. Dense attention is the fastest there is in the same run, also
    where a recipe goes dense. Before a recipe is timed, its kernel's output in the first layer is
    checked against float64 on the model's own tensors.

    Args:
        models: What to run.
        run: Device, file and time limit; None for the current CUDA device without either.

    Returns:
        The results document, see `run_cases`. A row has `case`, `recipe`; `layers` that ran and
        `model_layers`; the fields of `Timing` of one forward; `attention_ms` and `plan_ms` (part of
        it) of all self-attention, and `attention_share` and `plan_share` of the forward; `density`
        and `kernel`; `dense_ms`, `dense_kernel` and `speedup`; `peak_bytes` of everything;
        `shared_anchor_bytes`, of one layer, where all layers share an anchor, else None;
        `rel_error`.

    Raises:
        MissingExtraError: diffusers is not installed.
    """
    check_diffusers()
    run = Run() if run is None else run
    with torch.no_grad():
        return run_cases(models, lambda model: _measure(model, run), run)


class _BenchSession(gs.Session):
    """A session that goes dense by one of the bench's dense attentions, whatever the host has."""

    def __init__(self, recipe: gs.Recipe, dense: str, *, observer: Observer | None = None) -> None:
        """Start without state; `dense` is a name that `attend_densely` knows."""
        super().__init__(recipe, observer=observer)
        self._dense = dense

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: gs.Call | None = None,
        *,
        dense_by: DenseBackend | None = None,
    ) -> Tensor:
        """Run one attention call; see `Session.attention`."""
        del dense_by
        run = partial(attend_densely, self._dense, q, k, v)
        return super().attention(q, k, v, call, dense_by=DenseBackend(self._dense, run))


class _Forward:
    """One model with its session attached; every call is the next step of a generation."""

    def __init__(self, model: Any, inputs: dict[str, Any], first_step: int) -> None:
        self._model, self._inputs = model, inputs
        self._steps = itertools.count(first_step)

    def __call__(self) -> Tensor:
        step = next(self._steps)
        with self._model.cache_context(_BRANCH, step_index=step, num_inference_steps=_NUM_STEPS):
            return self._model(**self._inputs)[0]


class _FirstLayer:
    """Keeps what the first layer did, while it is asked to."""

    def __init__(self) -> None:
        self._wanted = True
        self._event: AttentionEvent | None = None

    def __call__(self, event: AttentionEvent) -> None:
        if self._wanted and event.call.layer == 0:
            self._event = event

    def take(self) -> AttentionEvent:
        """Return it and keep nothing from now on: it would count as the model's memory."""
        event, self._event, self._wanted = self._event, None, False
        if event is None:
            raise ArithmeticError("no attention call reached the session")
        return event


def _measure(case: WanModel, run: Run) -> Iterator[Row]:
    """Yield the rows of a model: dense, then every recipe that agrees with the reference."""
    tensors = case.tensors(run.device)
    dense = fastest_dense(*tensors)
    del tensors
    model, inputs = case.build(run.device), case.inputs(run.device)
    run.say(f"{case.name}, dense ({dense.name})")
    first = _row(case, _dense(), dense.name, model, inputs, run)
    dense_ms = first["median_ms"]

    def finished(row: Row) -> Row:
        ratio = dense_ms / row["median_ms"]
        return {**row, "dense_ms": dense_ms, "dense_kernel": dense.name, "speedup": ratio}

    yield finished(first)
    for variant in _sparse():
        run.say(f"{case.name}, {variant.name}")
        try:
            row = _row(case, variant, dense.name, model, inputs, run)
        except (ArithmeticError, torch.OutOfMemoryError) as error:
            yield failure(f"{case.name} {variant.name}", error)
            continue
        yield finished(row)


def _row(
    case: WanModel, variant: Variant, dense: str, model: Any, inputs: dict[str, Any], run: Run
) -> Row:
    """Return the row of a variant, without what compares it with dense attention.

    Raises:
        ArithmeticError: Its first layer, or the model's output, is wrong, or calls of the timed
            forward did not do what the variant is for.
    """
    attach: Callable[..., Any] = importlib.import_module(
        "gossamer.integrations.diffusers.attach"
    ).attach
    watch = _FirstLayer()
    session = _BenchSession(variant.recipe, dense, observer=watch)
    anchor_bytes = None
    if variant.shared_anchor:
        anchor_bytes = _share_anchor(session, case, run.device)
    forward = _Forward(model, inputs, first_step=1 if variant.shared_anchor else 0)
    with attach(model, session):
        if not bool(forward().isfinite().all()):
            raise ArithmeticError("the model's output is not finite")
        error = _check(watch.take(), dense)
        held = _allocated(run.device)
        timing = time_call(forward, warm_up=_WARM_UP, least=_LEAST)
        records = session.records[-case.run_layers :]  # of the last forward
        paths = {record.path for record in records}
        if paths != {variant.path}:
            raise ArithmeticError(f"calls went {', '.join(sorted(paths))}, not {variant.path}")
        attention_ms = sum(record.attention_ms for record in records)
        plan_ms = sum(record.plan_ms for record in records)
        density = sum(record.density for record in records) / len(records)
    return {
        "case": case.name,
        "recipe": variant.name,
        "layers": case.run_layers,
        "model_layers": case.num_layers,
        **asdict(timing),
        "attention_ms": attention_ms,
        "attention_share": attention_ms / timing.median_ms,
        "plan_ms": plan_ms,
        "plan_share": plan_ms / timing.median_ms,
        "density": density,
        "kernel": " + ".join(dict.fromkeys(record.kernel for record in records)),
        "peak_bytes": held + timing.peak_extra_bytes,
        "shared_anchor_bytes": anchor_bytes,
        "rel_error": error,
    }


def _share_anchor(session: _BenchSession, case: WanModel, device: torch.device) -> int:
    """Give all layers one anchor of step 0, made of random tensors; return its bytes."""
    anchors = session._anchors
    if anchors is None:
        raise ValueError("only a recipe with reuse has anchors to share")
    q, k, v = case.tensors(device)
    call = gs.Call(grid=case.grid, branch=_BRANCH, num_steps=_NUM_STEPS)
    plan, full = session.recipe.method.anchor(q, k, v, call)
    full = attend_densely(session._dense, q, k, v) if full is None else full
    residual = full.float() - gs.attend(q, k, v, plan).out.float()
    shape = (*q.shape, k.shape[2])
    anchor = Anchor(step=0, shape=shape, facts=call_facts(call), plan=plan, residual=residual)
    for layer in range(case.run_layers):
        anchors.put((layer, _BRANCH), anchor)
    return anchor.num_bytes


def _check(event: AttentionEvent, dense: str) -> float:
    """Return the relative error of a layer's kernel, or refuse it.

    Raises:
        ArithmeticError: It is above twice dense attention's.
    """
    q, k, v = event.q, event.k, event.v
    if event.plan is None:
        return check_dense(dense, event.out, q, k, v)
    return check_kernel(event.record.kernel, q, k, v, event.plan, error_bound(q, k, v))


def _allocated(device: torch.device) -> int:
    """Return the bytes held on a device; 0 where torch does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
