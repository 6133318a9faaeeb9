"""Profiles that recipes name: where they are looked for, when they are refused, what they can."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import gossamer as gs
from calibration.profiles import GRID, HEADS, LAYERS, STEPS, make_profile
from gossamer.select.fidelity import Curves, least_density
from gossamer.select.profile import read_profile

METHOD = '[method]\nname = "scaling"\nprofile = "{}"\n'
BUDGETS = '[method]\nname = "block-topk"\ndensity = 0.5\n[budgets]\nprofile = "{}"\n'
FORMS = pytest.mark.parametrize("form", [METHOD, BUDGETS], ids=["method", "budgets"])


def profile_of(recipe: gs.Recipe) -> str:
    return recipe.budgets.profile if recipe.budgets is not None else recipe.method.profile


def calls() -> list[gs.Call]:
    """Every call of a generation of the profile's model."""
    return [
        gs.Call(layer=layer, num_layers=LAYERS, step=step, num_steps=STEPS, grid=GRID)
        for step in range(STEPS)
        for layer in range(LAYERS)
    ]


@FORMS
def test_a_relative_path_counts_from_the_recipes_folder(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    path = make_profile(tmp_path / "here" / "sub" / "p.safetensors", seed=1)
    (tmp_path / "here" / "r.toml").write_text(form.format("sub/p.safetensors"))
    monkeypatch.chdir(tmp_path)
    assert profile_of(gs.Recipe.load("here/r.toml")) == path
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = gs.Recipe.load(tmp_path / "here" / "r.toml")
    assert profile_of(recipe) == path
    # Saved anywhere it names the same file.
    recipe.save(tmp_path / "elsewhere" / "copy.toml")
    assert gs.Recipe.load("copy.toml") == recipe
    # A file of the current directory is not the one that the recipe means.
    make_profile(tmp_path / "elsewhere" / "mine.safetensors")
    (tmp_path / "here" / "r.toml").write_text(form.format("mine.safetensors"))
    with pytest.raises(gs.RecipeError, match=r"no file .*/here/mine\.safetensors"):
        gs.Recipe.load(tmp_path / "here" / "r.toml")


@FORMS
def test_text_without_a_file_counts_from_the_current_directory(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_profile(tmp_path / "p.safetensors")
    monkeypatch.chdir(tmp_path)
    recipe = gs.Recipe.from_toml(form.format("p.safetensors"))
    monkeypatch.chdir("/")
    assert profile_of(recipe) == path, "a later change of directory changes nothing"
    assert profile_of(gs.Recipe.from_toml(form.format("p.safetensors"), folder=tmp_path)) == path


@FORMS
def test_a_shipped_profile_keeps_its_name(form: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(form.format("tiny-wan"))
    recipe = gs.Recipe.load(tmp_path / "r.toml")
    assert profile_of(recipe) == "tiny-wan"
    assert 'profile = "tiny-wan"' in recipe.to_toml()


@FORMS
def test_a_missing_profile_is_refused_when_the_recipe_is_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(form.format("no.safetensors"))
    words = f"{re.escape(str(path))}: .*no file {re.escape(str(tmp_path / 'no.safetensors'))}"
    with pytest.raises(gs.RecipeError, match=f"{words}; give a file .* or one of tiny-wan"):
        gs.Recipe.load(path)
    path.write_text(form.format("tiny-wam"))
    with pytest.raises(gs.RecipeError, match="did you mean 'tiny-wan'"):
        gs.Recipe.load(path)


@FORMS
def test_a_file_that_is_no_profile_is_refused_when_the_recipe_is_read(
    form: str, tmp_path: Path
) -> None:
    (tmp_path / "p.safetensors").write_text("no profile")
    path = tmp_path / "r.toml"
    path.write_text(form.format("p.safetensors"))
    words = rf"{re.escape(str(path))}: .*p\.safetensors: expected a safetensors file"
    with pytest.raises(gs.ProfileMismatchError, match=words):
        gs.Recipe.load(path)


def test_a_profile_that_does_not_fit_the_method_is_refused_with_it(tmp_path: Path) -> None:
    path = make_profile(tmp_path / "p.safetensors")
    with pytest.raises(gs.ProfileMismatchError, match="expected block=32, but the profile has 16"):
        gs.ScalingAttention(profile=path, block=32)
    with pytest.raises(gs.ProfileMismatchError, match="expected permute='axis'"):
        gs.ScalingAttention(profile=path, permute="axis")
    with pytest.raises(gs.PlanError, match=r"no profile 'q\.safetensors': there is no file /"):
        gs.ScalingAttention(profile="q.safetensors")
    with pytest.raises(gs.RecipeError, match=r"budgets: no profile 'q\.safetensors': there is no"):
        gs.Budgets(profile="q.safetensors")


@pytest.mark.parametrize("kind", ["fast", "uniform", "budgets"])
def test_less_than_the_sparsest_masks_is_said_once_and_reported_as_it_is(
    kind: str, tmp_path: Path
) -> None:
    path = make_profile(tmp_path / f"{kind}.safetensors", seed=3)
    least = least_density(read_profile(path).curves(GRID))
    asked = 0.1
    assert least > asked + 0.1
    if kind == "budgets":
        method = gs.MCSparse(density=asked, tile=16, iterations=2)
        recipe = gs.Recipe(method=method, budgets=gs.Budgets(profile=path), min_tokens=0)
    else:
        method = gs.ScalingAttention(profile=path, density=asked, budgets=kind)
        recipe = gs.Recipe(method=method, min_tokens=0)
    q, k, v = torch.randn(3, 1, HEADS, 96, 8).unbind()
    session = gs.Session(recipe)
    first, *others = calls()
    with pytest.warns(UserWarning, match=rf"density=0\.1 was asked for, .* come to {least:.3f}"):
        session.attention(q, k, v, first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        for call in others:
            session.attention(q, k, v, call)
    assert session.summary()["density"] == pytest.approx(least, abs=0.02)


@pytest.mark.parametrize("above", [-0.015, 0.0, 0.1])
def test_what_the_masks_can_do_is_no_reason_to_warn(above: float, tmp_path: Path) -> None:
    """Down to how nearly any density is met."""
    path = make_profile(tmp_path / "p.safetensors", seed=3)
    density = least_density(read_profile(path).curves(GRID)) + above
    method = gs.ScalingAttention(profile=path, density=density)
    q, k, v = torch.randn(3, 1, HEADS, 96, 8).unbind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = [method.plan(q, k, v, call).density for call in calls()]
    assert sum(got) / len(got) == pytest.approx(density, abs=0.02)


def test_what_every_head_keeps_in_any_case_counts() -> None:
    """Masks of many blocks may be sparser than the 1% that `Budgets` leaves a head."""
    density = torch.tensor([[[[0.001, 1.0], [0.3, 1.0]]]], dtype=torch.float64)
    curves = Curves(fidelity=density, error=density, density=density, num_steps=1)
    assert least_density(curves) == pytest.approx(0.1505)
    assert least_density(curves, floor=0.01) == pytest.approx(0.155)
