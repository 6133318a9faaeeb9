"""Arguments of methods that contradict one another, or that the others leave without effect."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

import gossamer as gs
from gossamer.methods import get_method_class


@pytest.mark.parametrize("density", [0.3, 0.999])
def test_dense_attention_warns_of_a_lower_density(density: float) -> None:
    """It is a method like any other to a loop over all of them, and says what it is."""
    with pytest.warns(UserWarning, match=f"dense: every key is read, .* 1 and not {density};"):
        assert gs.get_method("dense", density=density) == gs.Dense()
    with pytest.warns(UserWarning, match=f"dense: every key is read, .* 1 and not {density};"):
        gs.Recipe.from_toml(f'[method]\nname = "dense"\ndensity = {density}\n')


@pytest.mark.parametrize("density", [1, 1.0])
@pytest.mark.parametrize("name", gs.list_methods())
def test_density_one_is_everything(name: str, density: float) -> None:
    """As a whole number too, with and without a grid, and from a recipe file."""
    method = gs.get_method(name, density=density)
    assert gs.Recipe.from_toml(gs.Recipe(method=method).to_toml()).method == method
    q, k, v = torch.randn(3, 1, 2, 240, 16).unbind()
    calls = [gs.Call(), gs.Call(grid=(4, 6, 10))]
    if not get_method_class(name).causal_reason:
        calls.append(gs.Call(causal=True))
    for call in calls:
        assert method.plan(q, k, v, call).density == 1.0


@pytest.mark.parametrize(("exact", "sampled"), [(0.9, 0.9), (1.0, 0.01), (0.5, 0.501)])
def test_instagen_refuses_shares_above_one_together(exact: float, sampled: float) -> None:
    message = f"exact={exact:g} and sampled={sampled:g} must .* at most 1"
    with pytest.raises(gs.PlanError, match=message):
        gs.InstaGen(exact=exact, sampled=sampled)


def test_instagen_fills_in_no_more_than_is_left() -> None:
    assert gs.InstaGen(exact=1.0).sampled == 0.0
    assert gs.InstaGen(sampled=0.95).exact == pytest.approx(0.05)
    assert (gs.InstaGen(exact=0.2).sampled, gs.InstaGen(sampled=0.2).exact) == (0.08, 0.08)
    for tenths in range(11):  # sums that round above 1 are no reason to refuse
        gs.InstaGen(exact=tenths / 10, sampled=1 - tenths / 10)


@pytest.mark.parametrize(
    ("name", "params", "unused", "why"),
    [
        # A density stands for the method's own budget.
        ("svg2", {"density": 0.2, "mass": 0.5}, "mass=0.5", "density=0.2"),
        ("svg2", {"density": 0.2, "min_ratio": 0.0}, "min_ratio=0.0", "density=0.2"),
        ("svg-ear", {"density": 0.2, "mass": 0.5}, "mass=0.5", "density=0.2"),
        ("xattention", {"density": 0.2, "mass": 0.5}, "mass=0.5", "density=0.2"),
        ("flexprefill", {"density": 0.2, "mass": 0.5}, "mass=0.5", "density=0.2"),
        ("flexprefill", {"density": 0.2, "min_budget": 9}, "min_budget=9", "density=0.2"),
        ("minference", {"density": 0.2, "local": 9}, "local=9", "density=0.2"),
        ("minference", {"density": 0.2, "columns": 9}, "columns=9", "density=0.2"),
        ("minference", {"density": 0.2, "diagonals": 9}, "diagonals=9", "density=0.2"),
        ("minference", {"density": 0.2, "blocks": 9}, "blocks=9", "density=0.2"),
        ("moba", {"density": 0.2, "top_k": 5}, "top_k=5", "density=0.2"),
        ("nsa", {"density": 0.2, "selected": 5}, "selected=5", "density=0.2"),
        ("nsa", {"density": 0.2, "local_blocks": 5}, "local_blocks=5", "density=0.2"),
        ("vsa", {"density": 0.2, "keep": 0.5}, "keep=0.5", "density=0.2"),
        ("pisa", {"density": 0.2, "exact": 0.5}, "exact=0.5", "density=0.2"),
        ("sol", {"density": 0.2, "tau": 2.0}, "tau=2.0", "density=0.2"),
        ("vattention", {"density": 0.2, "epsilon": 0.2}, "epsilon=0.2", "density=0.2"),
        ("vattention", {"density": 0.2, "delta": 0.2}, "delta=0.2", "density=0.2"),
        ("vattention", {"density": 0.2, "base": 0.2}, "base=0.2", "density=0.2"),
        # One choice leaves the parameters of another one unread.
        ("minference", {"pattern": "a-shape", "columns": 9}, "columns=9", "pattern='a-shape'"),
        ("minference", {"pattern": "a-shape", "queries": 9}, "queries=9", "pattern='a-shape'"),
        ("minference", {"pattern": "vertical-slash", "sink": 9}, "sink=9", "vertical-slash"),
        ("minference", {"pattern": "block-sparse", "local": 9}, "local=9", "block-sparse"),
        (
            "minference",
            {"pattern": "block-sparse", "search_density": 0.1},
            "search_density=0.1",
            "block-sparse",
        ),
        ("mc-sparse", {"grouping": "none", "iterations": 3}, "iterations=3", "grouping='none'"),
        ("scaling", {"orientation": "deep-clean"}, "orientation=", "without a profile"),
        ("scaling", {"budgets": "uniform"}, "budgets='uniform'", "without a profile"),
        ("scaling", {"profile": "tiny-wan", "p": 0.3, "budgets": "uniform"}, "budgets=", "p=0.3"),
        (
            "scaling",
            {"profile": "tiny-wan", "budgets": "uniform", "orientation": "deep-clean"},
            "orientation='deep-clean'",
            "budgets='uniform'",
        ),
        ("sliding-window", {"window3d": (2, 2, 2), "block": 64}, "block=64", "window3d"),
        ("intra", {"schedule": "g2s4", "gather": "cyclic"}, "gather='cyclic'", "g2s4"),
        ("intra", {"schedule": "g2s4", "groups": 4}, "groups=4", "g2s4"),
        ("intra", {"schedule": "g2s4", "window": (2, 8, 8)}, "window=", "g2s4"),
        ("intra", {"schedule": "gather", "interleave": 3}, "interleave=3", "'gather'"),
        ("intra", {"schedule": "scatter", "query_patch": (1, 8, 8)}, "query_patch=", "'scatter'"),
        ("intra", {"span": 99}, "span=99", "'interleave'"),
        ("intra", {"sink": 9}, "sink=9", "'interleave'"),
        ("intra", {"gather": "segment", "window": (2, 8, 8)}, "window=", "gather='segment'"),
        ("intra", {"neighbourhood": "strided", "patch": (1, 2, 4)}, "patch=", "'strided'"),
    ],
)
def test_what_has_no_effect_is_refused(
    name: str, params: dict[str, object], unused: str, why: str
) -> None:
    message = f"{name}: .*{unused}.* has no effect .*{why}.*: leave out one of them"
    with pytest.raises(gs.PlanError, match=message):
        gs.get_method(name, **params)


def test_what_was_filled_in_is_no_contradiction() -> None:
    """Methods are made again from all of their parameters: by recipes and `with_density`."""
    made = [
        gs.get_method("intra", density=0.2, schedule=schedule, **more)
        for schedule in ("interleave", "scatter", "gather", "g2s4")
        for more in ({}, {"fit": False})
    ]
    made += [gs.Intra(schedule="g2s4"), gs.Intra(gather="cyclic"), gs.MInference(pattern="a-shape")]
    made += [gs.get_method(name, density=1) for name in gs.list_methods()]
    for method in made:
        assert gs.Recipe.from_toml(gs.Recipe(method=method).to_toml()).method == method
        if method.params().get("density") is not None:
            assert method.with_density(0.4).params()["density"] == 0.4


@pytest.mark.parametrize("method", [gs.SVG(sink_frames=1), gs.SlidingWindow(sink_frames=1)])
def test_sink_frames_need_a_grid_from_the_first_call_on(method: gs.Method) -> None:
    """Not after the dense steps, which plan nothing."""
    session = gs.Session(gs.Recipe(method=method, dense_steps=2, min_tokens=0))
    q, k, v = torch.randn(3, 1, 2, 240, 16).unbind()
    with pytest.raises(gs.PlanError, match=r"sink_frames=1 needs call\.grid"):
        session.attention(q, k, v, gs.Call(step=0, num_steps=4))
    session.attention(q, k, v, gs.Call(step=0, num_steps=4, grid=(4, 6, 10)))


@pytest.mark.parametrize("value", [None, "x", [1], float("nan")], ids=str)
@pytest.mark.parametrize("name", gs.list_methods())
def test_values_of_a_wrong_kind_are_refused_when_a_method_is_made(name: str, value: object) -> None:
    """Not at the first call. None is a value where it is the default, and for one more."""
    method = get_method_class(name)
    for field in fields(method):
        if value is None and (
            field.default is None or (name, field.name) == ("vattention", "local")
        ):
            continue
        with pytest.raises(gs.PlanError, match=field.name):
            method(**{field.name: value})


def test_a_radius_beyond_the_grid_reads_everything() -> None:
    """However great: its square may be no number."""
    q, k, v = torch.randn(3, 1, 2, 240, 16).unbind()
    for radius in (12.0, 1e9, 1e300):
        assert gs.Clear(radius=radius).plan(q, k, v, gs.Call(grid=(4, 6, 10))).density == 1.0
