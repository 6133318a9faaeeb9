"""Budgets over heads: merged plans are the heads' own, and a recipe's density is shared out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from cases import Options, Shape, options, random_plan, shapes
from gossamer.budgets import plan_by_heads
from gossamer.methods import get_method_class
from gossamer.plan.heads import merge_heads

GRID = (8, 20, 26)  # that of the shipped profile


def heads_of(plan: gs.SparsePlan, heads: list[int]) -> torch.Tensor:
    weights = plan.weights()
    weights = weights if weights.shape[1] == 1 else weights[:, heads]
    return weights.expand(2, len(heads), -1, -1)


@given(shapes(max_tokens=120), options(), st.randoms(use_true_random=False))
def test_a_merged_plan_is_its_parts(shape: Shape, opt: Options, random: object) -> None:
    """Any kind of plan, cut at any KV heads, gives each head what its own plan gives it."""
    kv_heads = list(range(3))
    random.shuffle(kv_heads)
    cuts = [kv_heads[:1], kv_heads[1:]]
    parts, heads = [], []
    for number, kv in enumerate(cuts):
        part = Shape(
            shape.batch, len(kv), shape.group, shape.num_queries, shape.num_keys, shape.dim, number
        )
        parts.append(random_plan(part, opt))
        heads.append(
            (torch.tensor(kv)[:, None] * shape.group + torch.arange(shape.group)).flatten()
        )
    if opt.padded:  # the mask is the call's, the same for all
        parts = [replace(part, key_valid=parts[0].key_valid) for part in parts]
    whole = merge_heads(parts, heads, shape.group)
    got = whole.weights().expand(shape.batch, 3 * shape.group, -1, -1)
    for part, at in zip(parts, heads, strict=True):
        want = part.weights().expand(shape.batch, len(at), -1, -1)
        assert torch.equal(got[:, at], want)
    full = Shape(shape.batch, 3, shape.group, shape.num_queries, shape.num_keys, shape.dim, 9)
    q, k, v = full.tensors()
    out = gs.attend(q, k, v, whole, kernel="reference").out
    for part, at, kv in zip(parts, heads, cuts, strict=True):
        alone = gs.attend(q[:, at], k[:, kv], v[:, kv], part, kernel="reference").out
        torch.testing.assert_close(out[:, at], alone)


@pytest.mark.parametrize("name", ["svg-ear", "pisa", "sol"])
def test_heads_at_density_one_stand_beside_heads_with_virtual_keys(name: str) -> None:
    q, k, v = Shape(2, 2, 2, 300, 300, 16, 4).tensors()
    method = gs.get_method(name, density=0.3)
    densities = torch.tensor([1.0, 1.0, 0.3, 0.3], dtype=torch.float64)
    plan = plan_by_heads(method, (q, k, v), gs.Call(), densities, 2, None)
    plan.validate()
    full, sparse = gs.attend(q, k, v, plan).out.split(2, dim=1)
    want = gs.sparse_attention(q[:, :2], k[:, :1], v[:, :1], gs.Dense())
    torch.testing.assert_close(full, want, rtol=1e-4, atol=1e-5)
    part = (q[:, 2:], k[:, 1:], v[:, 1:])
    want = gs.sparse_attention(*part, method, gs.Call(head_offset=2))
    torch.testing.assert_close(sparse, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        gs.attend(q, k, v, plan.refresh(k, v)).out[:, 2:], sparse, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("place", [{"layer": 99}, {"head_offset": 50}])
def test_a_layer_or_head_that_the_profile_does_not_know_is_refused(place: dict[str, int]) -> None:
    budgets = gs.Budgets(profile="tiny-wan")
    with pytest.raises(gs.ProfileMismatchError, match="the profile has 8 layers and 4 heads"):
        budgets.densities(0.3, gs.Call(grid=GRID, **place), 4)


def test_plans_of_different_kinds_are_refused() -> None:
    q, k, v = Shape(1, 2, 1, 100, 100, 8, 0).tensors()
    plans = [gs.get_method(name, density=0.5).plan(q, k, v) for name in ("svg2", "block-topk")]
    with pytest.raises(gs.PlanError, match="different kinds"):
        merge_heads(plans, [torch.tensor([0]), torch.tensor([1])], 1)


WITH_DENSITY = [
    name
    for name in gs.list_methods()
    if not get_method_class(name).fixed_density
    and gs.get_method(name, density=0.3).params().get("density") is not None
]


@pytest.mark.parametrize("name", WITH_DENSITY)
def test_every_head_is_planned_as_if_alone_at_its_density(name: str) -> None:
    tensors = Shape(2, 4, 2, 600, 600, 16, 3).tensors()
    densities = torch.tensor([0.6, 0.6, 0.1, 0.1, 0.6, 0.6, 0.3, 0.3], dtype=torch.float64)
    method = gs.get_method(name, density=0.9)
    plan = plan_by_heads(method, tensors, gs.Call(step=1), densities, 4, None)
    plan.validate()
    q, k, v = tensors
    for kv in range(4):
        heads = [2 * kv, 2 * kv + 1]
        own = gs.get_method(name, density=float(densities[2 * kv]))
        call = gs.Call(step=1, head_offset=2 * kv, num_heads=8)
        alone = own.plan(q[:, heads], k[:, kv : kv + 1], v[:, kv : kv + 1], call)
        torch.testing.assert_close(heads_of(plan, heads), alone.weights().expand(2, 2, -1, -1))


def test_a_method_without_a_density_is_refused() -> None:
    with pytest.raises(gs.UnsupportedError, match=r"svg2 has no density .* density=0.2"):
        gs.SVG2(mass=0.9).with_density(0.3)
    with pytest.raises(gs.RecipeError, match="a density, and svg2 was given none"):
        gs.Recipe(method=gs.SVG2(mass=0.9), budgets=gs.Budgets(profile="tiny-wan"))


def test_instagen_keeps_its_proportion() -> None:
    method = gs.InstaGen(density=0.4, exact=0.1).with_density(0.2)
    assert (method.exact, method.sampled) == (pytest.approx(0.05), pytest.approx(0.15))


def test_a_recipe_shares_its_density_out_over_the_generation() -> None:
    """Heads differ, and the mean over steps, layers and heads is what was asked for."""
    budgets = gs.Budgets(profile="tiny-wan")
    table = torch.stack(
        [
            budgets.densities(
                0.3, gs.Call(layer=layer, step=step, num_layers=8, num_steps=16, grid=GRID), 4
            )
            for layer in range(8)
            for step in range(16)
        ]
    )
    assert float(table.mean()) == pytest.approx(0.3, abs=0.02)
    assert float(table.std()) > 0.05


def test_a_session_plans_by_heads() -> None:
    tensors = Shape(1, 4, 1, 4160, 4160, 16, 3).tensors()
    recipe = gs.Recipe(method=gs.BlockTopK(density=0.3), budgets=gs.Budgets(profile="tiny-wan"))
    session = gs.Session(recipe)
    call = gs.Call(layer=5, step=9, num_layers=8, num_steps=16, grid=GRID)
    session.attention(*tensors, call)
    want = recipe.budgets.densities(0.3, call, 4)
    assert session.records[0].density == pytest.approx(float(want.mean()), abs=0.02)
    assert gs.Recipe.from_toml(recipe.to_toml()) == recipe
    with pytest.raises(gs.PlanError, match="this call has none"):
        session.attention(*tensors, gs.Call(layer=5, step=10, num_layers=8, num_steps=16))
    with pytest.raises(gs.ProfileMismatchError, match="num_layers=9"):
        session.attention(*tensors, gs.Call(layer=5, num_layers=9, num_steps=16, grid=GRID))


@pytest.mark.parametrize(
    "bad", [{"profile": ""}, {"orientation": "up"}, {"groups": 0}, {"groups": True}], ids=str
)
def test_bad_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(gs.RecipeError, match=f"budgets: {next(iter(bad))}"):
        gs.Budgets(**{"profile": "tiny-wan", **bad})
