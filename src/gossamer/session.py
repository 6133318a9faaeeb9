"""The session: the only place that holds state between attention calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.attention import attend
from gossamer.budgets import plan_by_heads
from gossamer.call import Call, check_tensors, given_call
from gossamer.errors import RecipeError, described
from gossamer.kernels import DENSE_KERNEL, choose_kernel, dense_attention, wants_gradients
from gossamer.methods import Dense
from gossamer.plan import SparsePlan
from gossamer.recipe import Recipe
from gossamer.records import Record, Stopwatch, summarize
from gossamer.reuse import Anchor, AnchorStore, call_facts
from gossamer.schedule import is_dense, past_end


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

    State (centroids of the previous step, anchors of `Reuse`, static plans) is kept per (layer,
    branch), so guidance passes never mix, and dropped at the end of a generation.

    Attributes:
        recipe: The recipe.
    """

    def __init__(self, recipe: Recipe, *, observer: Observer | None = None) -> None:
        """Start without state.

        Args:
            recipe: What to run and where.
            observer: Called with an `AttentionEvent` after each call, outside the measured times.
        """
        if not isinstance(recipe, Recipe):
            raise RecipeError(
                f"recipe={described(recipe)} is not a recipe: use gossamer.Recipe(method=…) or "
                "Recipe.load"
            )
        self.recipe = recipe
        self._observer = observer
        self._states: dict[tuple[int, str], dict[str, Any]] = {}
        self._static: dict[Hashable, SparsePlan] = {}
        self._anchors = AnchorStore(recipe.reuse) if recipe.reuse is not None else None
        self._records: list[Record] = []
        self._ended = False
        self._checked: set[tuple[str, int]] = set()

    @property
    def records(self) -> list[Record]:
        """Every call of the current generation, or of the last one until the next one begins."""
        return list(self._records)

    def summary(self) -> dict[str, Any]:
        """Return the totals of `records` (see `gossamer.records.summarize`).

        With `Reuse` also `reuse_peak_bytes`, the most that plans and residuals took, and, where
        they are offloaded, `reuse_copy_ms` and `reuse_compute_to_copy`: copies hide behind the
        computation where the ratio is above 1.
        """
        totals = summarize(self._records)
        if self._anchors is not None:
            totals["reuse_peak_bytes"] = self._anchors.peak_bytes
            copy_ms = self._anchors.copy_ms
            if copy_ms:
                reused = sum(r.attention_ms for r in self._records if r.path == "reuse")
                totals["reuse_copy_ms"] = copy_ms
                totals["reuse_compute_to_copy"] = reused / copy_ms
        return totals

    def reset(self) -> None:
        """Forget all state and all records."""
        self.end_generation()
        self._records = []
        self._ended = False

    def end_generation(self) -> None:
        """Drop all state; the records stay readable until the next generation's first call."""
        self.drop_state()
        self._static = {}
        self._ended = True

    def drop_state(self) -> None:
        """Forget what was kept for later steps; the generation and its records go on."""
        self._states = {}
        if self._anchors is not None:
            self._anchors.clear()

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

        Warns:
            UserWarning: Once, where the recipe names steps or layers that do not exist.
        """
        call = given_call(call)
        check_tensors(q, k, v)
        call.check(q.shape[0], q.shape[2], k.shape[2], q.shape[1])
        self.recipe.method.check_call(call)
        self._begin(call)
        reason = self._dense_reason(q, call)
        if reason is not None and not self._is_early_anchor(reason, call):
            return self.dense(q, k, v, call, reason=reason, by=dense_by)
        anchor = None
        if self._anchors is not None:
            anchor = self._anchors.get((call.layer, call.branch), call, q, k)
        if anchor is not None:
            return self._reuse(q, k, v, call, anchor)
        return self._sparse(q, k, v, call, by=dense_by, at=reason)

    def _sparse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        *,
        by: DenseBackend | None,
        at: str | None,
    ) -> Tensor:
        """Plan and attend; at an anchor step keep the plan, attend fully and keep the residual."""
        watch = Stopwatch(q.device)
        path, anchors = "sparse", self._anchors
        with_full = anchors is not None and anchors.reuse.residual
        plan, notes, full = self._plan(q, k, v, call, with_full=with_full)
        if self.recipe.method.fixed_density:
            notes.append("density fixed by geometry")
        gradients = wants_gradients(q, k, v)
        kernel = choose_kernel(q, k, v, plan, self.recipe.kernel, gradients=gradients)
        watch.mark()
        out = attend(q, k, v, plan, scale=call.scale, kernel=kernel.name).out
        if anchors is not None:
            place, residual = (call.layer, call.branch), None
            if not anchors.has_room(place, plan, q):
                anchors.drop(place)
                notes.append(f"no reuse: max_bytes={anchors.reuse.max_bytes} is used up")
            else:
                notes.append("anchor" if at is None else f"{at}, anchor")
                if anchors.reuse.residual:
                    full = _run_dense(q, k, v, call, by) if full is None else full
                    residual, out, path = full.float() - out.float(), full.to(q.dtype), "dense"
                shape = (*q.shape, k.shape[2])
                anchor = Anchor(
                    step=call.step,
                    shape=shape,
                    facts=call_facts(call),
                    plan=plan,
                    residual=residual,
                )
                anchors.put(place, anchor)
        watch.mark()
        reason = "; ".join(notes)
        record = _record(q, k, call, path, kernel.name, reason, watch, plan)
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=plan, record=record))
        return out

    def _reuse(self, q: Tensor, k: Tensor, v: Tensor, call: Call, anchor: Anchor) -> Tensor:
        """Attend with the anchor's plan and add its residual."""
        watch = Stopwatch(q.device)
        plan = anchor.plan.refresh(k, v)
        gradients = wants_gradients(q, k, v)
        kernel = choose_kernel(q, k, v, plan, self.recipe.kernel, gradients=gradients)
        watch.mark()
        out = attend(q, k, v, plan, scale=call.scale, kernel=kernel.name).out
        if anchor.residual is not None:
            out = (out.float() + anchor.residual).to(q.dtype)
        watch.mark()
        reason = f"anchor of step {anchor.step}"
        record = _record(q, k, call, "reuse", kernel.name, reason, watch, plan)
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=plan, record=record))
        return out

    def _is_early_anchor(self, reason: str, call: Call) -> bool:
        """Return whether a dense step is the last one before a sparse one, and can be its anchor.

        It runs fully anyway, so that the first sparse step need not.
        """
        if reason != "dense step" or self._anchors is None or not self._anchors.reuse.residual:
            return False
        following = call.step + 1
        if call.num_steps is not None and following >= call.num_steps:
            return False
        steps = self.recipe.dense_steps
        return not is_dense("dense_steps", steps, following, call.num_steps)

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
        self._begin(call)
        watch = Stopwatch(q.device)
        out = _run_dense(q, k, v, call, by)
        watch.mark()
        kernel = DENSE_KERNEL if by is None else by.name
        record = _record(q, k, call, "dense", kernel, reason, watch, None)
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=None, record=record))
        return out

    def _begin(self, call: Call) -> None:
        """Clear the last generation's records at the first call of the next one."""
        self._warn_past_end("step", call.num_steps)
        self._warn_past_end("layer", call.num_layers)
        if self._ended:
            self._records, self._ended = [], False
            if self.recipe.reuse is not None:
                self._anchors = AnchorStore(self.recipe.reuse)

    def _warn_past_end(self, unit: str, total: int | None) -> None:
        """Warn, once for each total, of steps or layers in the recipe that do not exist."""
        if total is None or (unit, total) in self._checked:
            return
        self._checked.add((unit, total))
        name = f"dense_{unit}s"
        schedules = {name: getattr(self.recipe, name)}
        if unit == "step" and self.recipe.reuse is not None:
            schedules["reuse: anchors"] = self.recipe.reuse.anchors
        for key, schedule in schedules.items():
            complaint = past_end(key, schedule, unit, total)
            if complaint is not None:
                warnings.warn(complaint, UserWarning, stacklevel=4)

    def _dense_reason(self, q: Tensor, call: Call) -> str | None:
        """Return why this call goes dense, None if it does not."""
        recipe = self.recipe
        if isinstance(recipe.method, Dense):
            return "dense method"
        if is_dense("dense_layers", recipe.dense_layers, call.layer, call.num_layers):
            return "dense layer"
        if q.shape[2] < recipe.min_tokens:
            return f"short: {q.shape[2]} tokens < min_tokens={recipe.min_tokens}"
        if is_dense("dense_steps", recipe.dense_steps, call.step, call.num_steps):
            return "dense step"
        return None

    def _plan(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, with_full: bool
    ) -> tuple[SparsePlan, list[str], Tensor | None]:
        """Return the plan in its launch order, what the record should say of it, full attention.

        Full attention is None where it is not asked for, or not computed on the way to the plan.
        """
        method, full, budgets = self.recipe.method, None, self.recipe.budgets
        if budgets is not None:
            state = self._states.setdefault((call.layer, call.branch), {})
            density = float(method.params()["density"])
            each = budgets.densities(density, call, q.shape[1])
            plan = plan_by_heads(method, (q, k, v), call, each, budgets.groups, state)
            return *self._ordered(plan), None
        static = method.static_key(call)
        if static is None or call.key_valid is not None:
            state = self._states.setdefault((call.layer, call.branch), {})
            if with_full:
                plan, full = method.anchor(q, k, v, call, state=state)
            else:
                plan = method.plan(q, k, v, call, state=state)
            return *self._ordered(plan), full
        shape = (q.shape[1], q.shape[2], k.shape[1], k.shape[2], call.grid, call.text)
        heads = (call.head_offset, call.heads, call.num_heads)
        key = (static, shape, call.causal, call.scale, q.device, heads)
        if key in self._static:
            return self._static[key], ["static plan"], None
        self._static[key], notes = self._ordered(method.plan(q, k, v, call))
        return self._static[key], notes, None

    def _ordered(self, plan: SparsePlan) -> tuple[SparsePlan, list[str]]:
        """Return the plan in the recipe's launch order, and why it is ordered or not."""
        order = self.recipe.order
        if order is None:
            return plan, []
        decision = order.decide(plan)
        plan = order.order(plan, decision)
        return plan, [f"{order.name}: {decision.reason}"]

    def _finish(self, event: AttentionEvent) -> None:
        """Keep the record and show the call to the observer."""
        self._records.append(event.record)
        if self._observer is not None:
            self._observer(event)


def _run_dense(q: Tensor, k: Tensor, v: Tensor, call: Call, by: DenseBackend | None) -> Tensor:
    """Attend fully, by the host library's backend where there is one."""
    if by is not None:
        return by.run()
    return dense_attention(q, k, v, scale=call.scale, causal=call.causal, key_valid=call.key_valid)


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
        density=1.0 if plan is None or path == "dense" else plan.density_tensor,
        watch=watch,
        plan_stretch=None if plan is None else 0,
    )
