"""The laws that every method obeys, over random shapes, text, padding, grouped heads, batches.

`gossamer.testing` holds the laws, which other packages run on their methods; here they run on all
of Gossamer's, and on inputs that hypothesis draws.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.methods import get_method_class
from gossamer.testing import (
    METHOD_LAWS,
    check_causal,
    check_full,
    check_monotone,
    check_padding,
    check_valid,
    method_at,
)

METHODS = gs.list_methods()
CAUSAL = [name for name in METHODS if not get_method_class(name).causal_reason]
SOME = settings(max_examples=12)  # times all methods


def padding(shape: Shape) -> torch.Tensor:
    """Return [B, S], at least one valid key a row, different rows of different lengths."""
    lengths = torch.randint(1, shape.num_keys + 1, (shape.batch, 1), generator=shape.generator())
    return torch.arange(shape.num_keys) < lengths


@st.composite
def calls(draw: st.DrawFn, shape: Shape) -> gs.Call:
    """Draw a call of self-attention: text at the head, at the tail, inside or none; padding."""
    start = draw(st.integers(0, shape.num_keys))
    stop = draw(st.integers(start, min(start + 40, shape.num_keys)))
    text = draw(st.sampled_from([None, (start, stop), (0, stop - start)]))
    return gs.Call(
        text=text,
        key_valid=padding(shape) if draw(st.booleans()) else None,
        grid=draw(st.sampled_from([None, grid(shape, text)])),
        layer=draw(st.integers(0, 5)),
        step=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 5)),
    )


def grid(shape: Shape, text: tuple[int, int] | None) -> tuple[int, int, int] | None:
    """Return some grid of the latent tokens; None where there are none."""
    latent = shape.num_keys - (0 if text is None else text[1] - text[0])
    if latent == 0:
        return None
    frames = next(f for f in (5, 3, 2, 1) if latent % f == 0)
    rows = next(r for r in (7, 4, 3, 2, 1) if latent // frames % r == 0)
    return frames, rows, latent // frames // rows


@pytest.mark.parametrize("law", METHOD_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_law(name: str, law: Callable[[str], None]) -> None:
    law(name)


@pytest.mark.parametrize("name", METHODS)
@SOME
@given(st.data(), shapes(self_attention=True), st.sampled_from([0.05, 0.3, 0.7, 1.0]))
def test_law_3_every_plan_is_valid(
    name: str, data: st.DataObject, shape: Shape, density: float
) -> None:
    call = data.draw(calls(shape))
    check_valid(method_at(name, density), shape.tensors(), call)


@pytest.mark.parametrize("name", METHODS)
@SOME
@given(st.data(), shapes(self_attention=True))
def test_law_2_a_full_budget_is_dense(name: str, data: st.DataObject, shape: Shape) -> None:
    check_full(gs.get_method(name, density=1.0), shape.tensors(), data.draw(calls(shape)))


@pytest.mark.parametrize(
    "method",
    [
        gs.InstaGen(exact=1.0, sampled=0.0),
        gs.InstaGen(exact=0.0, sampled=1.0),
        gs.InstaGen(exact=0.5, sampled=0.5, sampler="uniform"),
        gs.InstaGen(exact=0.9, sampled=0.1),
        gs.SVG2(mass=1.0),
        gs.SVG2(mass=0.01, min_ratio=1.0),
        gs.BlockTopK(mass=1.0),
        gs.BlockTopK(blocks=99),
        gs.BlockTopK(blocks=99, block=7, tile=16),
    ],
    ids=str,
)
def test_law_2_holds_for_each_methods_own_budget(method: gs.Method) -> None:
    check_full(method, Shape(2, 2, 2, 333, 333, 16, 2).tensors(), gs.Call())


@pytest.mark.parametrize("name", CAUSAL)
@SOME
@given(shapes(), st.booleans(), st.sampled_from([0.05, 0.4, 1.0]))
def test_causal_plans_are_valid_and_never_look_ahead(
    name: str, shape: Shape, padded: bool, density: float
) -> None:
    """Bottom-right aligned, queries and keys of any two lengths, padding on either side."""
    valid = padding(shape) if padded else None
    if valid is not None and shape.seed % 2:
        valid = valid.flip(1)  # left padding
    call = gs.Call(causal=True, key_valid=valid)
    method = method_at(name, density)
    check_causal(method, shape.tensors(), call)
    if density == 1.0:
        check_full(method, shape.tensors(), call)


@pytest.mark.parametrize("name", METHODS)
@SOME
@given(shapes(self_attention=True), st.integers(0, 3))
def test_law_5_density_grows_with_the_budget(name: str, shape: Shape, step: int) -> None:
    check_monotone(name, shape.tensors(), gs.Call(step=step))


@pytest.mark.parametrize("name", [n for n in CAUSAL if not get_method_class(n).fixed_density])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2048, 2048), (1500, 2113), (1500, 4097)])
def test_law_5_the_asked_density_is_met_causally(
    name: str, num_queries: int, num_keys: int
) -> None:
    """Of the visible pairs: blocks on the diagonal are half visible."""
    q, k, v = Shape(1, 2, 1, num_queries, num_keys, 16, 1).tensors()
    for density in (0.15, 0.3, 0.625, 0.8):
        plan = method_at(name, density).plan(q, k, v, gs.Call(causal=True))
        assert abs(plan.density - density) <= 0.02, density


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", [0.2, 0.6])
def test_the_asked_density_is_that_of_latent_pairs(name: str, density: float) -> None:
    """Text rows and columns are full, and reported apart."""
    q, k, v = Shape(1, 2, 1, 2048 + 77, 2048 + 77, 16, 1).tensors()
    method = method_at(name, density)
    weights = method.plan(q, k, v, gs.Call(text=(0, 77))).weights()
    latent = method.plan(*(x[:, :, 77:] for x in (q, k, v))).density
    read = weights > 0
    assert read[..., :77].all()
    assert type(method).own_text_rule or read[..., :77, : q.shape[2]].all()
    assert read[..., 77:, 77:].sum(-1).double().mean() / 2048 == pytest.approx(latent, abs=1e-6)


@pytest.mark.parametrize("name", METHODS)
@SOME
@given(shapes(self_attention=True), st.integers(1, 60), st.sampled_from([0.2, 0.6]))
def test_law_6_padding_changes_nothing(name: str, shape: Shape, pad: int, density: float) -> None:
    check_padding(name, shape, pad, density)


@pytest.mark.parametrize("name", METHODS)
def test_masks_that_hide_nothing_change_nothing(name: str) -> None:
    q, k, v = Shape(2, 2, 1, 300, 300, 16, 4).tensors()
    method = method_at(name, 0.3)
    every = gs.Call(key_valid=torch.ones(2, 300, dtype=torch.bool))
    shared = gs.Call(key_valid=torch.ones(1, 300, dtype=torch.bool))
    plain = gs.sparse_attention(q, k, v, method)
    for call in (every, shared):
        torch.testing.assert_close(gs.sparse_attention(q, k, v, method, call), plain)


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_follows_the_tensors_device(name: str) -> None:
    q, k, v = Shape(1, 1, 1, 150, 150, 16, 4).tensors()
    method = method_at(name, 0.3)
    want = gs.sparse_attention(q, k, v, method)
    torch.set_default_device("meta")
    try:
        got = gs.sparse_attention(q, k, v, method)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_documents_its_source_and_its_parameters(name: str) -> None:
    method = gs.get_method(name)
    assert name == "dense" or method.paper
    doc = type(method).__doc__ or ""
    assert all(f"{param}:" in doc for param in method.params())


def test_a_law_fails_where_it_does_not_hold() -> None:
    """The laws are checks, not ceremonies: each broken method is caught."""
    tensors = Shape(1, 1, 1, 300, 300, 16, 0).tensors()
    with pytest.raises(AssertionError, match="density 0.5"):
        check_full(gs.InstaGen(density=0.5), tensors, gs.Call())
    with pytest.raises(AssertionError, match="output differs by"):
        check_full(Wrong(), tensors, gs.Call())


class Wrong(gs.Dense):
    """Reads everything, with the wrong scale."""

    def plan(self, q, k, v, call=None, *, state=None):
        from dataclasses import replace

        return replace(super().plan(q, k, v, call), scale=1.0)
