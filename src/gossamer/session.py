"""The session: the only place that holds state between attention calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.attention import attend
from gossamer.call import Call
from gossamer.kernels import DENSE_KERNEL, choose_kernel, dense_attention
from gossamer.methods import Dense, check_tensors
from gossamer.plan import SparsePlan
from gossamer.recipe import Recipe
from gossamer.records import Record, Stopwatch, summarize
from gossamer.schedule import is_dense


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionEvent:
    """What an observer is shown after each call.

    Attributes:
        q: [B, H, N, D] queries.
        k: [B, Hk, S, D] keys.
        v: [B, Hk, S, D] values.
        out: [B, H, N, D] the attention's output.
        call: The facts about the call.
        plan: The plan that ran; None where the call went dense.
        record: What the call did.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    call: Call
    plan: SparsePlan | None
    record: Record


Observer = Callable[[AttentionEvent], None]


@dataclass(frozen=True)
class DenseBackend:
    """Another library's way to compute one call densely.

    Attributes:
        name: What the record calls it.
        run: Computes the output, [B, H, N, D].
    """

    name: str
    run: Callable[[], Tensor]


class Session:
    """Runs a recipe over the calls of a generation.

    State (centroids of the previous step, static plans) is kept per (layer, branch), so guidance
    passes never mix, and dropped at the end of a generation.

    Attributes:
        recipe: The recipe.
    """

    def __init__(self, recipe: Recipe, *, observer: Observer | None = None) -> None:
        """Start without state.

        Args:
            recipe: What to run and where.
            observer: Called with an `AttentionEvent` after each call, outside the measured times.
        """
        self.recipe = recipe
        self._observer = observer
        self._states: dict[tuple[int, str], dict[str, Any]] = {}
        self._static: dict[Hashable, SparsePlan] = {}
        self._records: list[Record] = []
        self._ended = False

    @property
    def records(self) -> list[Record]:
        """Every call of the current generation, or of the last one until the next one begins."""
        return list(self._records)

    def summary(self) -> dict[str, Any]:
        """Return the totals of `records` (see `gossamer.records.summarize`)."""
        return summarize(self._records)

    def reset(self) -> None:
        """Forget all state and all records."""
        self.end_generation()
        self._records = []
        self._ended = False

    def end_generation(self) -> None:
        """Drop all state; the records stay readable until the next generation's first call."""
        self._states = {}
        self._static = {}
        self._ended = True

    def drop_state(self) -> None:
        """Forget what was kept for later steps; the generation and its records go on."""
        self._states = {}

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call | None = None,
        *,
        dense_by: DenseBackend | None = None,
    ) -> Tensor:
        """Run one attention call, dense or sparse as the recipe says.

        Args:
            q: [B, H, N, D] queries, after positional encoding.
            k: [B, Hk, S, D] keys.
            v: [B, Hk, S, D] values.
            call: The facts about the call; None for layer 0, step 0.
            dense_by: Computes the call where it goes dense; None for the session's own way.

        Returns:
            [B, H, N, D] in q's dtype.

        Raises:
            PlanError: Shapes, grid, text or padding contradict one another; raised at the first
                call also where the schedule is still dense.
            UnsupportedError: The method or the recipe's kernel cannot run this.
        """
        call = Call() if call is None else call
        check_tensors(q, k, v)
        call.check(q.shape[0], q.shape[2], k.shape[2])
        self._begin()
        reason = self._dense_reason(q, call)
        if reason is not None:
            return self.dense(q, k, v, call, reason=reason, by=dense_by)
        watch = Stopwatch(q.device)
        plan, cached = self._plan(q, k, v, call)
        kernel = choose_kernel(q, k, v, plan, self.recipe.kernel)
        watch.mark()
        out = attend(q, k, v, plan, scale=call.scale, kernel=kernel.name).out
        watch.mark()
        record = _record(
            q, k, call, "sparse", kernel.name, "static plan" if cached else "", watch, plan
        )
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=plan, record=record))
        return out

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        *,
        reason: str,
        by: DenseBackend | None = None,
    ) -> Tensor:
        """Run one call densely and record why; arguments as `attention`, `by` as its `dense_by`."""
        self._begin()
        watch = Stopwatch(q.device)
        if by is None:
            out = dense_attention(
                q, k, v, scale=call.scale, causal=call.causal, key_valid=call.key_valid
            )
        else:
            out = by.run()
        watch.mark()
        kernel = DENSE_KERNEL if by is None else by.name
        record = _record(q, k, call, "dense", kernel, reason, watch, None)
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=None, record=record))
        return out

    def _begin(self) -> None:
        """Clear the last generation's records at the first call of the next one."""
        if self._ended:
            self._records, self._ended = [], False

    def _dense_reason(self, q: Tensor, call: Call) -> str | None:
        """Return why this call goes dense, None if it does not."""
        recipe = self.recipe
        if isinstance(recipe.method, Dense):
            return "dense method"
        if is_dense("dense_steps", recipe.dense_steps, call.step, call.num_steps):
            return "dense step"
        if is_dense("dense_layers", recipe.dense_layers, call.layer, call.num_layers):
            return "dense layer"
        if q.shape[2] < recipe.min_tokens:
            return f"short: {q.shape[2]} tokens < min_tokens={recipe.min_tokens}"
        return None

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[SparsePlan, bool]:
        """Return the plan, and whether it is a static one made before."""
        method = self.recipe.method
        static = method.static_key(call)
        if static is None or call.key_valid is not None:
            state = self._states.setdefault((call.layer, call.branch), {})
            return method.plan(q, k, v, call, state=state), False
        shape = (q.shape[1], q.shape[2], k.shape[1], k.shape[2], call.grid, call.text)
        key = (static, shape, call.causal, call.scale, q.device, call.head_offset)
        cached = key in self._static
        if not cached:
            self._static[key] = method.plan(q, k, v, call)
        return self._static[key], cached

    def _finish(self, event: AttentionEvent) -> None:
        """Keep the record and show the call to the observer."""
        self._records.append(event.record)
        if self._observer is not None:
            self._observer(event)


def _record(
    q: Tensor,
    k: Tensor,
    call: Call,
    path: str,
    kernel: str,
    reason: str,
    watch: Stopwatch,
    plan: SparsePlan | None,
) -> Record:
    """Make the record of one call."""
    place = {
        "layer": call.layer,
        "num_layers": call.num_layers,
        "step": call.step,
        "num_steps": call.num_steps,
        "branch": call.branch,
    }
    return Record(
        place=place,
        shape=(q.shape[0], q.shape[1], q.shape[2], k.shape[2]),
        path=path,
        kernel=kernel,
        reason=reason,
        density=1.0 if plan is None else plan.density_tensor,
        watch=watch,
        plan_stretch=None if plan is None else 0,
    )
