"""Recipes and schedules: round trips, refusals, and which steps are dense."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from gossamer.schedule import check_schedule, is_dense


def dense_indices(schedule: object, total: int) -> list[int]:
    checked = check_schedule("dense_steps", schedule)
    return [i for i in range(total) if is_dense("dense_steps", checked, i, total)]


@pytest.mark.parametrize(
    ("schedule", "total", "dense"),
    [
        (0, 10, []),
        (0.0, 10, []),
        (3, 10, [0, 1, 2]),
        (1, 1, [0]),
        (99, 3, [0, 1, 2]),
        (0.3, 10, [0, 1, 2]),
        (0.1, 30, [0, 1, 2]),
        (0.25, 1, [0]),
        (0.25, 2, [0]),
        (0.25, 49, list(range(13))),
        (0.25, 50, list(range(13))),
        (0.03, 30, [0]),
        (1.0, 4, [0, 1, 2, 3]),
        ((0.25, 1), 8, [0, 1, 7]),
        ((0, 0.5), 4, [2, 3]),
        ((1, 0), 4, [0]),
        ("0-2,5", 8, [0, 1, 2, 5]),
        ("7", 8, [7]),
        ("", 8, []),
        ([2, 1], 6, [0, 1, 5]),
    ],
)
def test_which_steps_are_dense(schedule: object, total: int, dense: list[int]) -> None:
    assert dense_indices(schedule, total) == dense


@given(st.floats(0.001, 1.0), st.integers(1, 60))
def test_a_fraction_above_zero_is_never_rounded_to_none(fraction: float, total: int) -> None:
    dense = dense_indices(fraction, total)
    assert dense == list(range(len(dense)))
    assert max(1, fraction * total - 1) <= len(dense) <= fraction * total + 1


@pytest.mark.parametrize(
    "schedule", [-1, 1.5, float("nan"), True, None, (1, 2, 3), "a", "3-1", "1-", "-2", (0.5, -1)]
)
def test_bad_schedules_are_refused(schedule: object) -> None:
    with pytest.raises(gs.RecipeError, match="dense_steps="):
        gs.Recipe(method=gs.Dense(), dense_steps=schedule)


RECIPES = [
    gs.Recipe(method=gs.Dense()),
    gs.Recipe(method=gs.InstaGen(exact=0.05, sampled=0.1, sampler="uniform"), dense_steps=0.3),
    gs.Recipe(method=gs.InstaGen(density=0.15), dense_layers=(1, 0.25), min_tokens=0),
    gs.Recipe(method=gs.SVG2(mass=0.8, query_clusters=10), dense_steps="0-3,9", kernel="cpu"),
    gs.Recipe(method=gs.BlockTopK(blocks=4), dense_steps=1, dense_layers=1.0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.method.name)
def test_a_recipe_round_trips(recipe: gs.Recipe, tmp_path: Path) -> None:
    assert gs.Recipe.from_toml(recipe.to_toml()) == recipe
    recipe.save(tmp_path / "r.toml")
    assert gs.Recipe.load(tmp_path / "r.toml") == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["r.toml"]


@pytest.mark.parametrize("name", gs.list_recipes())
def test_shipped_recipes_load(name: str) -> None:
    recipe = gs.Recipe.load(name)
    assert gs.Recipe.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dense_step = 1\n[method]\nname = 'svg2'",
            "unknown key 'dense_step': did you mean 'dense_steps'",
        ),
        ("[method]\nname = 'svg22'", "unknown method 'svg22': did you mean 'svg2'"),
        ("[method]\nname = 'svg2'\nmas = 1", "svg2 has no parameter 'mas': did you mean 'mass'"),
        ("[method]\nname = 'svg2'\nmass = 2.0", "mass=2.0 must be a number with 0 < mass <= 1"),
        ("[method]\nname = 'svg2'\nmass = 'much'", "mass='much' must be a number"),
        ("[method]\nname = 'svg2'\ndensity = nan", "density=nan must be a number"),
        ("dense_steps = 0.3", r"needs a \[method\] table with a name"),
        ("[method]\nmass = 0.3", r"needs a \[method\] table with a name"),
        ("method = ", "not valid TOML"),
        ("kernel = 'fast'\nmethod = 'dense'", "unknown kernel 'fast': known are auto, hopper"),
        ("min_tokens = -1\nmethod = 'dense'", "min_tokens=-1: must be an integer >= 0"),
        ("min_tokens = true\nmethod = 'dense'", "min_tokens=True: must be an integer >= 0"),
    ],
)
def test_bad_recipes_are_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(gs.RecipeError, match=message):
        gs.Recipe.from_toml(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dense_steps = .3\n[method]\nname = 'svg2'", "line 1, .*: write .3 as 0.3$"),
        ("[method]\nname = 'svg2'\nmass = .9 # all", "line 3, .*: write .9 as 0.9$"),
        ("dense_steps = [1, .25]\nmethod = 'svg2'", "line 1, .*: write .25 as 0.25$"),
        ("[method]\nname = 'svg2'\nmass = 1.", "line 3, .*: write 1. as 1.0$"),
        ("[method]\nname = 'sol'\ntau = -.5", "line 3, .*: write -.5 as -0.5$"),
        ("[method]\nname = 'a.b' 'c.'", r"line 2, column \d+\)$"),
        ("dense_steps = 0..3", r"line 1, column \d+\)$"),
    ],
)
def test_a_number_that_toml_does_not_take_is_written_out(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(gs.RecipeError, match=rf"mine\.toml: not valid TOML: .*{words}"):
        gs.Recipe.load(path)


def test_saving_makes_the_folder(tmp_path: Path) -> None:
    recipe = gs.Recipe(method=gs.SVG2())
    recipe.save(tmp_path / "new" / "deep" / "r.toml")
    assert gs.Recipe.load(tmp_path / "new" / "deep" / "r.toml") == recipe


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = gs.Recipe(method=gs.SVG2())
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "r.toml").mkdir(parents=True)
    for path in ("file/r.toml", "folder/r.toml"):
        with pytest.raises(gs.RecipeError, match=rf"cannot write the recipe .*{path}"):
            recipe.save(tmp_path / path)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["r.toml"]


def test_a_method_alone_may_be_a_name() -> None:
    assert gs.Recipe.from_toml("method = 'svg2'").method == gs.SVG2()


def test_a_recipe_needs_a_method() -> None:
    with pytest.raises(gs.RecipeError, match="method='svg2' is not a method"):
        gs.Recipe(method="svg2")


def test_a_missing_recipe_names_the_shipped_ones() -> None:
    with pytest.raises(gs.RecipeError, match="no recipe 'instagn': did you mean 'instagen'"):
        gs.Recipe.load("instagn")


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(gs.RecipeError, match=r"cannot read the recipe .*bad.toml"):
        gs.Recipe.load(path)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(gs.PlanError, match="unknown method 'instagn': did you mean 'instagen'"):
        gs.get_method("instagn")
    with pytest.raises(gs.PlanError, match="instagen has no parameter 'sample'"):
        gs.get_method("instagen", sample=0.1)


@pytest.mark.parametrize("name", gs.list_methods())
@pytest.mark.parametrize("density", [0, -1, 1.01, float("nan"), float("inf"), "half", True])
def test_no_method_takes_an_impossible_density(name: str, density: object) -> None:
    with pytest.raises(gs.PlanError, match=f"{name}: density="):
        gs.get_method(name, density=density)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"density": 0.2, "mass": 0.5}, r"give one of density, blocks and mass, not \['density'"),
        ({"blocks": 0}, "blocks=0 must be an integer >= 1"),
        ({"block": 0}, "block=0 must be an integer >= 1"),
    ],
)
def test_block_topk_takes_one_budget(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.BlockTopK(**params)


def test_none_round_trips_where_it_is_not_the_default() -> None:
    method = gs.VAttention(local=None)
    text = gs.Recipe(method=method).to_toml()
    assert '= "none"' in text
    assert gs.Recipe.from_toml(text).method == method


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("instagen", {"tile": None}),
        ("mc-sparse", {"iterations": None}),
        ("xattention", {"block": None}),
        ("xattention", {"keep_sink": "yes"}),
        ("nsa", {"length": None}),
        ("intra", {"sink": None}),
        ("svg-ear", {"gamma": None}),
        ("svg-ear", {"gamma": "x"}),
        ("sliding-window", {"window3d": 5}),
        ("scaling", {"profile": 3}),
        ("scaling", {"profile": ["a"]}),
    ],
)
def test_values_of_a_wrong_type_are_refused(name: str, params: dict[str, object]) -> None:
    (field,) = params
    with pytest.raises(gs.PlanError, match=field):
        gs.get_method(name, **params)


def test_methods_are_values() -> None:
    assert gs.InstaGen(density=0.2) == gs.InstaGen(exact=0.1, sampled=0.1, density=0.2)
    assert len({gs.SVG2(), gs.SVG2(), gs.SVG2(mass=0.8)}) == 2
    assert gs.get_method("instagen", density=0.3, exact=0.1).sampled == pytest.approx(0.2)


def test_a_third_party_method_registers_through_its_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import dataclass
    from importlib.metadata import EntryPoint
    from typing import ClassVar

    from gossamer.methods import registry

    @dataclass(frozen=True, kw_only=True)
    class Theirs(gs.Dense):
        """A method of another package."""

        name: ClassVar[str] = "theirs"

    entry = EntryPoint("theirs", "elsewhere:Theirs", registry._ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Theirs)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    registry._load_entry_points.cache_clear()
    assert gs.list_methods()[-1] == "theirs"
    assert gs.get_method("theirs") == Theirs()
    registry._load_entry_points.cache_clear()
