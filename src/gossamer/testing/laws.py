"""The laws of a method, as checks that any package can run on its own methods.

Each check raises `AssertionError` where its law does not hold. `METHOD_LAWS` holds those that take
a method's registry name alone; `gossamer.methods.register` gives one to a class of your own:

    @pytest.mark.parametrize("law", METHOD_LAWS, ids=lambda law: law.__name__)
    def test_law(law):
        law("my-method")
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.attention import attend, sparse_attention
from gossamer.call import Call
from gossamer.errors import PlanError, UnsupportedError
from gossamer.methods import Dense, Method, check_plan, get_method, get_method_class
from gossamer.plan import SparsePlan
from gossamer.testing.shape import Shape
from gossamer.testing.yardstick import assert_matches, attention, require, tolerance

DENSITIES = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)
_NEAR = 0.02  # how nearly a density is met, DESIGN.md law 5


def method_at(name: str, density: float) -> Method:
    """Return a method at a density; one that reads everything at the only one it has, 1."""
    reads_everything = issubclass(get_method_class(name), Dense)
    return get_method(name, density=1.0 if reads_everything else density)


def check_valid(method: Method, tensors: tuple[Tensor, Tensor, Tensor], call: Call) -> SparsePlan:
    """Check law 3, a valid plan: every query in one tile, lists in range, no starved query."""
    plan = method.plan(*tensors, call)
    plan.validate()
    lengths = (plan.num_queries, plan.num_keys)
    expected = (tensors[0].shape[2], tensors[1].shape[2])
    require(lengths == expected, f"the plan is for lengths {lengths}, not {expected}")
    return plan


def check_full(method: Method, tensors: tuple[Tensor, Tensor, Tensor], call: Call) -> None:
    """Check law 2 for a method at full budget: it equals dense attention."""
    q, k, v = tensors
    plan = method.plan(q, k, v, call)
    require(plan.density == 1.0, f"density {plan.density} at full budget")
    seen = visible(call, q.shape[2], k.shape[2])
    assert_matches(attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


def visible(call: Call, num_queries: int, num_keys: int) -> Tensor | None:
    """Return which pairs a call allows, [B|1, 1, N or 1, S] bool; None for all."""
    seen = None if call.key_valid is None else call.key_valid[:, None, None]
    if not call.causal:
        return seen
    query = torch.arange(num_queries)[:, None]
    below = torch.arange(num_keys) <= query + num_keys - num_queries
    return below[None, None] if seen is None else seen & below


def check_causal(method: Method, tensors: tuple[Tensor, Tensor, Tensor], call: Call) -> None:
    """Check that a causal plan is valid and reads no key that lies ahead or is padding."""
    q, k, _ = tensors
    plan = check_valid(method, tensors, call)
    seen = visible(call, q.shape[2], k.shape[2])
    if seen is not None:
        ahead = (plan.weights() > 0) & ~seen
        require(not bool(ahead.any()), f"{int(ahead.sum())} pairs lie ahead or are padding")


def check_monotone(name: str, tensors: tuple[Tensor, Tensor, Tensor], call: Call) -> None:
    """Check law 5: the density grows with the one that is asked for."""
    plans = [method_at(name, d).plan(*tensors, call) for d in DENSITIES]
    got = [plan.density for plan in plans]
    require(all(a <= b for a, b in pairwise(got)), f"asked {DENSITIES}, got {got}")


def check_padding(name: str, shape: Shape, pad: int, density: float) -> None:
    """Check law 6: valid rows are the same whatever lies in the padding, NaN included."""
    q, k, v = shape.tensors()
    method = method_at(name, density)
    alone = sparse_attention(q, k, v, method)
    valid = torch.arange(shape.num_keys + pad).expand(shape.batch, -1) < shape.num_keys
    for value in (1.5, float("nan")):
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad), value=value) for x in shape.tensors())
        out = sparse_attention(q, k, v, method, Call(key_valid=valid))[:, :, : shape.num_keys]
        torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)


def check_left_padding(name: str, shape: Shape, pad: int, density: float) -> None:
    """Check law 6 for causal prompts that are padded in front, as batches of prefill are."""
    method = method_at(name, density)
    valid = torch.arange(shape.num_keys + pad).expand(shape.batch, -1) >= pad
    outs = []
    for value in (1.5, float("nan")):
        q, k, v = (torch.nn.functional.pad(x, (0, 0, pad, 0), value=value) for x in shape.tensors())
        call = Call(causal=True, key_valid=valid)
        check_causal(method, (q, k, v), call)
        outs.append(sparse_attention(q, k, v, method, call)[:, :, pad:])
    require(bool(outs[1].isfinite().all()), "padding in front reaches valid rows")
    require(torch.equal(*outs), "valid rows depend on what lies in the padding")


def full_budgets_are_dense(name: str) -> None:
    """Check law 2 on ragged lengths, grouped heads, text, padding and a grid."""
    for tensors, call in _calls():
        check_full(method_at(name, 1.0), tensors, call)


def plans_are_valid(name: str) -> None:
    """Check law 3 on ragged lengths, grouped heads, text, padding and a grid."""
    for density in (0.05, 0.3, 0.7):
        for tensors, call in _calls():
            check_valid(method_at(name, density), tensors, call)


def causal_plans_look_at_the_past_alone(name: str) -> None:
    """Check causal plans, bottom-right aligned, or that their refusal gives the reason."""
    reason = get_method_class(name).causal_reason
    for shape in (Shape(2, 2, 2, 130, 257, 16, 0), Shape(1, 1, 1, 300, 300, 8, 1)):
        tensors = shape.tensors()
        for density in (0.05, 0.4, 1.0):
            method = method_at(name, density)
            if reason:
                _expect_refusal(method, tensors, reason)
            else:
                check_causal(method, tensors, Call(causal=True))
    if not reason:
        tensors = Shape(2, 2, 2, 130, 257, 16, 0).tensors()
        check_full(method_at(name, 1.0), tensors, Call(causal=True))


def plans_say_what_the_call_says(name: str) -> None:
    """Check that lengths, causality, padding and scale of a call stand in its plan.

    Kernels go by the plan alone.
    """
    method = method_at(name, 0.3)
    q, k, v = Shape(2, 2, 2, 240, 240, 16, 6).tensors()
    padded = torch.arange(240) < torch.tensor([[240], [170]])
    calls = [Call(key_valid=padded), Call(scale=0.05)]
    calls += [Call(key_valid=padded, scale=0.05, text=(10, 40))]
    if not get_method_class(name).causal_reason:
        calls += [Call(causal=True), Call(causal=True, key_valid=padded, scale=0.05)]
    for call in calls:
        try:
            check_plan(method.name, method.plan(q, k, v, call), q, k, call)
        except PlanError as error:
            raise AssertionError(str(error)) from error


def densities_are_met(name: str) -> None:
    """Check law 5: the share of latent pairs that is asked for is computed, within .02.

    Of a method whose density is fixed by its geometry only the growth is checked.
    """
    for num_tokens, grid in ((2048, None), (4160, (13, 16, 20))):
        tensors = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
        call = Call(grid=grid)
        check_monotone(name, tensors, call)
        if get_method_class(name).fixed_density:
            continue
        for density in (0.1, 0.15, 0.3, 0.5):
            got = method_at(name, density).plan(*tensors, call).density
            require(abs(got - density) <= _NEAR, f"asked {density}, got {got} at {num_tokens}")


def padding_changes_nothing(name: str) -> None:
    """Check law 6 for padding of one token and of more than a tile, behind and in front."""
    causal = not get_method_class(name).causal_reason
    for pad in (1, 150):
        for density in (0.2, 0.6):
            check_padding(name, Shape(2, 2, 2, 237, 237, 16, 2), pad, density)
            if causal:
                check_left_padding(name, Shape(2, 2, 2, 237, 237, 16, 2), pad, density)


def batch_rows_and_heads_are_independent(name: str) -> None:
    """Check law 6: a batch row or KV head alone gives what it gives among others."""
    q, k, v = Shape(3, 2, 2, 300, 300, 16, 4).tensors()
    valid = torch.arange(300) < torch.tensor([[300], [170], [33]])
    method = method_at(name, 0.3)
    whole = sparse_attention(q, k, v, method, Call(key_valid=valid, num_heads=4))
    for b in range(3):
        row, seen = slice(b, b + 1), valid[b]
        for kv in range(2):
            heads = slice(2 * kv, 2 * kv + 2)
            call = Call(key_valid=valid[row], head_offset=2 * kv, num_heads=4)
            part = (q[row, heads], k[row, kv : kv + 1], v[row, kv : kv + 1])
            torch.testing.assert_close(
                sparse_attention(*part, method, call)[..., seen, :],
                whole[row, heads][..., seen, :],
                rtol=1e-4,
                atol=1e-5,
            )


def planning_is_pure(name: str) -> None:
    """Check law 7: no global random state, the same plan again, inputs as they were."""
    tensors = Shape(1, 2, 1, 300, 300, 16, 4).tensors()
    copies = [x.clone() for x in tensors]
    before = torch.random.get_rng_state()
    method, state = method_at(name, 0.3), {}
    first = method.plan(*tensors)
    require(torch.equal(torch.random.get_rng_state(), before), "planning drew global numbers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        second = method.plan(*tensors)
    require(torch.equal(first.weights(), second.weights()), "planning again gives another plan")
    for step in range(2):
        method.plan(*tensors, Call(step=step), state=state).validate()
    same = all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    require(same, "planning changed its inputs")


def text_rows_are_dense(name: str) -> None:
    """Check that text queries attend to everything, wherever the text stands."""
    for text in ((0, 1), (0, 77), (240, 636), (100, 612)):
        length = 240 + text[1] - text[0]
        q, k, v = Shape(2, 2, 2, length, length, 16, 1).tensors()
        plan = method_at(name, 0.3).plan(q, k, v, Call(text=text, grid=(4, 6, 10)))
        plan.validate()
        if get_method_class(name).own_text_rule:
            continue
        got = attend(q, k, v, plan).out[:, :, slice(*text)].double()
        want = attention(q, k, v).out[:, :, slice(*text)]
        error, allowed = (got - want).abs().max().item(), tolerance(q, k, v).out
        require(error <= allowed, f"text {text}: differs by {error:.3g}, allowed {allowed:.3g}")


def degenerate_tokens_are_no_trouble(name: str) -> None:
    """Check identical tokens, two distinct ones, and a huge outlier: finite, and dense at 1."""
    same = torch.ones(1, 2, 150, 16)
    two, outlier = same.clone(), Shape(1, 2, 1, 150, 150, 16, 5).tensors()[0]
    two[:, :, ::3] = -1.0
    outlier[:, :, 7] = 1e4
    for x in (same, two, outlier):
        for density in (0.1, 1.0):
            plan = check_valid(method_at(name, density), (x, x, x), Call())
            out = attend(x, x, x, plan).out
            require(bool(out.isfinite().all()), "the output is not finite")
            if density == 1.0:
                want = attention(x, x, x).out
                torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


METHOD_LAWS: tuple[Callable[[str], None], ...] = (
    full_budgets_are_dense,
    plans_are_valid,
    causal_plans_look_at_the_past_alone,
    plans_say_what_the_call_says,
    densities_are_met,
    padding_changes_nothing,
    batch_rows_and_heads_are_independent,
    planning_is_pure,
    text_rows_are_dense,
    degenerate_tokens_are_no_trouble,
)
"""Every law of a method, each a function of its registry name."""


def _calls() -> list[tuple[tuple[Tensor, Tensor, Tensor], Call]]:
    """Return tensors and calls: text at each place or none, padding, a grid, few tokens."""
    short = torch.arange(333) < torch.tensor([[333], [40]])
    cases = [
        (Shape(2, 2, 2, 333, 333, 16, 0), Call()),
        (Shape(2, 2, 2, 333, 333, 20, 1), Call(key_valid=short, step=2)),
        (Shape(2, 1, 3, 333, 333, 8, 2), Call(key_valid=short, text=(10, 40), seed=3)),
        (Shape(1, 2, 1, 5 * 7 * 9 + 20, 5 * 7 * 9 + 20, 16, 3), _joint((5, 7, 9), 20)),
        (Shape(1, 1, 1, 1, 1, 16, 4), Call()),
        (Shape(1, 1, 1, 129, 129, 16, 5), Call(text=(0, 129))),
    ]
    return [(shape.tensors(), call) for shape, call in cases]


def _joint(grid: tuple[int, int, int], length: int) -> Call:
    """Return a call of a grid behind text."""
    return Call(grid=grid, text=(0, length), layer=3)


def _expect_refusal(method: Method, tensors: tuple[Tensor, Tensor, Tensor], reason: str) -> None:
    """Check that a method without causal form says so."""
    try:
        method.plan(*tensors, Call(causal=True))
    except UnsupportedError as error:
        require(reason in str(error), f"the refusal does not give the reason: {error}")
        return
    raise AssertionError(f"{method.name} has no causal form and planned one")
