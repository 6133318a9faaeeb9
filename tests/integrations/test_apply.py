"""The entry: what `apply` takes, and what it says about what it cannot take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.integrations import detach
from integrations.wan_models import inputs, pipeline, run, sparse, wan


def test_takes_a_recipe_a_method_a_shipped_name_and_a_file(tmp_path: Path) -> None:
    model = wan(num_layers=1)
    recipe = sparse()
    path = tmp_path / "mine.toml"
    recipe.save(path)
    for given in (recipe, path, str(path)):
        with gs.apply(model, given) as handle:
            assert handle.recipe == recipe
    with gs.apply(model, recipe.method) as handle:
        assert handle.recipe == gs.Recipe(method=recipe.method)
    name = gs.list_recipes()[0]
    with gs.apply(model, name) as handle:
        assert handle.recipe == gs.Recipe.load(name)


@pytest.mark.parametrize("recipe", ["no-such-recipe", 7, None])
def test_a_recipe_that_is_none_leaves_the_model_alone(recipe: object) -> None:
    model = wan(num_layers=1)
    with pytest.raises(gs.RecipeError, match=repr(recipe)):
        gs.apply(model, recipe)  # type: ignore[arg-type]
    with gs.apply(model, sparse()) as handle:
        assert handle.attached


def test_missing_diffusers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(gs.MissingExtraError, match=r'pip install "gossamer\[diffusers\]"'):
        gs.apply(object(), sparse())


@pytest.mark.parametrize(
    ("target", "named"),
    [
        (torch.nn.Linear(2, 2), "Linear"),
        (object(), "object"),
        ("Wan-AI/Wan2.1", "str"),
        (None, "None"),
    ],
)
def test_a_stranger_is_told_what_is_supported(target: object, named: str) -> None:
    with pytest.raises(gs.UnsupportedError, match=named) as caught:
        gs.apply(target, sparse())
    assert "Wan" in str(caught.value)
    assert "WanTransformer3DModel" in str(caught.value)


def test_an_unsupported_diffusers_transformer_is_named() -> None:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        cross_attention_dim=32, num_layers=1, caption_channels=16,
    )  # fmt: skip
    with pytest.raises(gs.UnsupportedError, match="LTXVideoTransformer3DModel"):
        gs.apply(model, sparse())


def test_a_pipeline_without_a_supported_model_is_told_what_it_has() -> None:
    pipe = pipeline(None)
    with pytest.raises(gs.UnsupportedError, match="WanPipeline with no models loaded"):
        gs.apply(pipe, sparse())
    pipe.vae = torch.nn.Linear(1, 1)
    with pytest.raises(gs.UnsupportedError, match="vae: Linear"):
        gs.apply(pipe, sparse())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(gs.UnsupportedError, match="no module that matches"):
        gs.apply(wan(num_layers=0), sparse())


def test_a_second_attachment_is_refused_and_changes_nothing() -> None:
    model = wan()
    with gs.apply(model, sparse()) as first:
        sparse_output = run(model, inputs())
        with pytest.raises(gs.UnsupportedError, match=r"attached already.*remove\(\)"):
            gs.apply(model, sparse())
        with pytest.raises(gs.UnsupportedError, match="attached already"):
            gs.apply(pipeline(wan(seed=3), model), sparse())
        assert torch.equal(run(model, inputs()), sparse_output)
        assert len(first.records) == 3


def test_a_refusal_at_one_model_leaves_the_pipelines_other_models_alone() -> None:
    first, second = wan(seed=3), wan()
    dense = run(first, inputs())
    with gs.apply(second, sparse()), pytest.raises(gs.UnsupportedError):
        gs.apply(pipeline(first, second), sparse())
    assert torch.equal(run(first, inputs()), dense)
    with gs.apply(first, sparse()) as handle:
        run(first, inputs())
        assert len(handle.records) == 3


def test_detach_where_the_handle_is_lost() -> None:
    high, low = wan(), wan(seed=3)
    pipe = pipeline(high, low)
    dense = run(low, inputs())
    handle = gs.apply(pipe, sparse())
    assert not torch.equal(run(low, inputs()), dense)
    detach(low)  # all models that were attached together
    assert not handle.attached
    assert torch.equal(run(low, inputs()), dense)
    handle.remove()
    detach(pipe)  # nothing left to do
    with gs.apply(high, sparse()), gs.apply(low, sparse()):
        pass


def test_the_handle_shows_records_and_totals_also_after_removal() -> None:
    model = wan()
    with gs.apply(model, sparse()) as handle:
        run(model, inputs())
        assert "attached" in repr(handle)
    assert "removed" in repr(handle)
    assert not handle.attached
    assert [r.layer for r in handle.records] == [0, 1, 2]
    assert handle.summary()["sparse_calls"] == 3
    assert handle.records == handle.session.records


def test_the_observer_sees_every_call() -> None:
    model = wan()
    events = []
    with gs.apply(model, sparse(), observer=events.append):
        run(model, inputs())
    assert [event.call.layer for event in events] == [0, 1, 2]
    assert events[0].q.shape == (1, 2, 80, 12)
