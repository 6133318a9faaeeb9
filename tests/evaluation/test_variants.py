"""Reading `svg2@.15` and recipe names."""

from __future__ import annotations

import pytest

import gossamer as gs
from gossamer.evaluation.variants import load_variant, parse_variant


@pytest.mark.parametrize(
    ("spec", "name", "density", "label"),
    [
        ("dense", "dense", 1.0, "dense"),
        ("dense@1", "dense", 1.0, "dense"),
        ("block-topk@0.15", "block-topk", 0.15, "block-topk@0.15"),
        (" svg2@.15 ", "svg2", 0.15, "svg2@0.15"),
        ("instagen-uniform@.3", "instagen-uniform", 0.3, "instagen-uniform@0.3"),
        ("svg2", "svg2", None, "svg2"),
    ],
)
def test_specs(spec, name, density, label):
    variant = parse_variant(spec)
    assert (variant.name, variant.density_asked, variant.label) == (name, density, label)
    assert variant.recipe.method.name == ("instagen" if "instagen" in name else name)


@pytest.mark.parametrize("sampler", ["uniform", "importance"])
def test_named_variants_set_the_sampler(sampler):
    assert parse_variant(f"instagen-{sampler}@.3").recipe.method.params()["sampler"] == sampler


def test_the_schedule_goes_into_the_recipe():
    recipe = parse_variant("svg2@.2", dense_steps=0.3, dense_layers=1, kernel="cpu").recipe
    assert (recipe.dense_steps, recipe.dense_layers, recipe.kernel) == (0.3, 1, "cpu")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("svg22@.2", "unknown method 'svg22'; did you mean 'svg2'"),
        ("instagen-unifrom@.2", "did you mean 'instagen-uniform'"),
        ("zzz", "unknown method 'zzz'; known: dense, "),
        ("", "unknown method ''"),
        ("svg2@", "above 0 and at most 1"),
        ("svg2@many", "above 0 and at most 1"),
        ("svg2@0", "above 0 and at most 1"),
        ("svg2@1.01", "above 0 and at most 1"),
        ("svg2@-.1", "above 0 and at most 1"),
        ("svg2@nan", "above 0 and at most 1"),
        ("svg2@inf", "above 0 and at most 1"),
        ("dense@.5", "dense attention has density 1"),
    ],
)
def test_bad_specs_name_the_fix(spec, message):
    with pytest.raises(ValueError, match=message):
        parse_variant(spec)


def test_a_recipe_file_is_named_after_its_stem(tmp_path):
    path = tmp_path / "mine.toml"
    gs.Recipe(method=gs.get_method("block-topk", density=0.25), dense_steps=2).save(path)
    variant = load_variant(str(path))
    assert (variant.name, variant.density_asked) == ("mine", 0.25)
    assert variant.recipe.dense_steps == 2


def test_shipped_recipes_load():
    for name in gs.list_recipes():
        assert load_variant(name).name == name


def test_unknown_recipes_and_keys(tmp_path):
    with pytest.raises(gs.RecipeError, match="no recipe 'no-such'"):
        load_variant("no-such")
    path = tmp_path / "bad.toml"
    path.write_text("colour = 1\n")
    with pytest.raises(gs.RecipeError, match="colour"):
        load_variant(str(path))
