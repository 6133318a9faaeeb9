"""Every method's plan says what its call says: what a method forgets is refused, not attended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods import check_plan, register, registry
from gossamer.plan import full_plan
from gossamer.testing import METHOD_LAWS, method_at

TENSORS = Shape(2, 1, 2, 90, 90, 16, 1).tensors()
VALID = torch.arange(90) < torch.tensor([[90], [50]])
LAW = next(law for law in METHOD_LAWS if law.__name__ == "plans_say_what_the_call_says")


@dataclass(frozen=True, kw_only=True)
class Forgetful(gs.Method):
    """Reads everything, and plans for the call with some fields changed."""

    name: ClassVar[str] = "forgetful"
    changes: Any = None
    density: float = 1.0

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Forgetful:
        return cls(density=density, **params)

    def _plan_latent(self, q, k, v, call, state):
        del v, state
        changes = {"causal": False} if self.changes is None else self.changes
        return replace(full_plan(q, k, call), **changes)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (
            {"causal": True},
            {"causal": False},
            r"causal=False where the call has True: pass SparsePlan\(…, causal=call.causal\)",
        ),
        ({}, {"causal": True}, "causal=True where the call has False"),
        (
            {"key_valid": VALID},
            {"key_valid": None},
            r"key_valid=None where the call has a torch.Tensor of shape \(2, 90\)",
        ),
        ({}, {"key_valid": VALID}, r"key_valid=a torch.*pass SparsePlan\(…, key_valid=call.key_v"),
        ({"key_valid": VALID}, {"key_valid": torch.ones_like(VALID)}, "key_valid=a"),
        ({"key_valid": VALID}, {"key_valid": VALID[:1]}, "key_valid=a"),
        ({"scale": 0.5}, {"scale": None}, r"scale=None where the call has 0.5: .*scale=call.scale"),
        ({}, {"scale": 1.0}, "scale=1.0 where the call has None"),
        ({}, {"num_keys": 91}, r"num_keys=91 where the call has 90: .*num_keys=k.shape\[2\]"),
        ({}, {"num_queries": 89}, r"num_queries=89 where .*num_queries=q.shape\[2\]"),
    ],
)
def test_a_field_that_is_not_the_calls_is_named(call, changes, message) -> None:
    with pytest.raises(gs.PlanError, match="forgetful made a plan with " + message):
        Forgetful(changes=changes).plan(*TENSORS, gs.Call(**call))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_valid": None}, "key_valid=None"),
        ({"scale": None}, "scale=None"),
        ({"num_keys": 90}, "num_keys=90 where the call has 70"),
    ],
)
def test_text_hides_nothing(changes, message) -> None:
    """The joined plan has the call's own mask and lengths: what was planned is checked before."""
    call = gs.Call(text=(5, 25), key_valid=VALID, scale=0.5)
    with pytest.raises(gs.PlanError, match=message):
        Forgetful(changes=changes).plan(*TENSORS, call)


def test_batch_and_heads_fit() -> None:
    keys = gs.KeyTokens.from_lists(torch.arange(90).expand(3, 3, 1, -1))
    with pytest.raises(gs.PlanError, match=r"plan of batch 3: must be 1 or q's 2"):
        Forgetful(changes={"keys": keys}).plan(*TENSORS)
    keys = gs.KeyTokens.from_lists(torch.arange(90).expand(1, 3, 1, -1))
    with pytest.raises(gs.PlanError, match=r"plan of heads 3: must be 1 or q's 2"):
        Forgetful(changes={"keys": keys}).plan(*TENSORS)


def test_a_plan_on_another_device_is_refused() -> None:
    plan = gs.Dense().plan(*TENSORS).to("meta")
    with pytest.raises(gs.PlanError, match="dense made a plan on meta: .* q's device, cpu"):
        check_plan("dense", plan, *TENSORS[:2], gs.Call())


def test_a_method_without_a_name_plans_and_is_called_by_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(Forgetful, "name")
    Forgetful().plan(*TENSORS).validate()
    with pytest.raises(gs.PlanError, match="Forgetful made a plan with causal=False"):
        Forgetful().plan(*TENSORS, gs.Call(causal=True))


def test_what_is_no_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forgetful, "_plan_latent", lambda *_: [1, 2])
    with pytest.raises(gs.PlanError, match=r"forgetful planned \[1, 2\]: must return a gossamer.S"):
        Forgetful().plan(*TENSORS)


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        ({}, {"scale": 16**-0.5}),  # one factor in other words
        ({"scale": 1 / 16**0.5}, {"scale": None}),
        ({"key_valid": VALID}, {"key_valid": VALID.clone()}),
        ({"key_valid": VALID[1:]}, {"key_valid": VALID[1:].expand(2, -1)}),
    ],
)
def test_the_same_in_other_words_is_the_same(call, changes) -> None:
    Forgetful(changes=changes).plan(*TENSORS, gs.Call(**call)).validate()


@pytest.mark.parametrize("call", [{}, {"causal": True}, {"key_valid": VALID}])
@pytest.mark.parametrize("name", ["dense", "block-topk", "sliding-window"])
def test_planning_is_traced_as_one_graph(name: str, call: dict[str, Any]) -> None:
    """The checks break no graph, with lengths that are symbols too."""
    torch.compiler.reset()
    method = method_at(name, 0.3)

    def count(q, k, v, valid):
        given = {**call, "key_valid": valid} if "key_valid" in call else call
        return method.plan(q, k, v, gs.Call(**given)).keys.count

    traced = torch.compile(count, fullgraph=True, backend="eager", dynamic=True)
    assert torch.equal(traced(*TENSORS, VALID), count(*TENSORS, VALID))


@pytest.mark.parametrize("name", gs.list_methods())
def test_the_law_holds_for_every_method(name: str) -> None:
    LAW(name)


def test_the_law_fails_where_a_method_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes past `Method.plan`, which would have refused it."""
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    register(Forgetful)
    with pytest.raises(AssertionError, match="causal=False where the call has True"):
        LAW("forgetful")

    @register
    @dataclass(frozen=True, kw_only=True)
    class Direct(Forgetful):
        name: ClassVar[str] = "direct"

        def plan(self, q, k, v, call=None, *, state=None):
            del v, state
            return replace(full_plan(q, k, call), scale=None)

    with pytest.raises(AssertionError, match="direct made a plan with scale=None"):
        LAW("direct")
