"""The laws that every method obeys, over random shapes, text, padding, grouped heads, batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from oracle import assert_matches, attention, tolerance

METHODS = gs.list_methods()
CAUSAL = [name for name in METHODS if not gs.get_method(name).causal_reason]


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
        step=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 5)),
    )


@pytest.mark.parametrize("name", METHODS)
@given(st.data(), shapes(self_attention=True), st.sampled_from([0.05, 0.3, 0.7, 1.0]))
def test_law_3_every_plan_is_valid(
    name: str, data: st.DataObject, shape: Shape, density: float
) -> None:
    q, k, v = shape.tensors()
    plan = gs.get_method(name, density=density).plan(q, k, v, data.draw(calls(shape)))
    plan.validate()
    assert (plan.num_queries, plan.num_keys) == (shape.num_queries, shape.num_keys)


@pytest.mark.parametrize("name", METHODS)
@given(st.data(), shapes(self_attention=True))
def test_law_2_a_full_budget_is_dense(name: str, data: st.DataObject, shape: Shape) -> None:
    q, k, v = shape.tensors()
    call = data.draw(calls(shape))
    plan = gs.get_method(name, density=1.0).plan(q, k, v, call)
    assert plan.density == 1.0
    seen = None if call.key_valid is None else call.key_valid[:, None, None]
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


@pytest.mark.parametrize(
    "method",
    [
        gs.InstaGen(exact=1.0, sampled=0.0),
        gs.InstaGen(exact=0.0, sampled=1.0),
        gs.InstaGen(exact=0.5, sampled=0.5, sampler="uniform"),
        gs.InstaGen(exact=0.9, sampled=0.9),
        gs.SVG2(mass=1.0),
        gs.SVG2(mass=0.01, min_ratio=1.0),
        gs.BlockTopK(mass=1.0),
        gs.BlockTopK(blocks=99),
        gs.BlockTopK(blocks=99, block=7, tile=16),
    ],
    ids=str,
)
def test_law_2_holds_for_each_methods_own_budget(method: gs.Method) -> None:
    q, k, v = Shape(2, 2, 2, 333, 333, 16, 2).tensors()
    plan = method.plan(q, k, v)
    plan.validate()
    assert plan.density == 1.0
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


@pytest.mark.parametrize("name", CAUSAL)
@given(shapes(), st.booleans(), st.sampled_from([0.05, 0.4, 1.0]))
def test_causal_plans_are_valid_and_never_look_ahead(
    name: str, shape: Shape, padded: bool, density: float
) -> None:
    """Bottom-right aligned, queries and keys of any two lengths, padding on either side."""
    q, k, v = shape.tensors()
    valid = padding(shape) if padded else None
    if valid is not None and shape.seed % 2:
        valid = valid.flip(1)  # left padding
    plan = gs.get_method(name, density=density).plan(q, k, v, gs.Call(causal=True, key_valid=valid))
    plan.validate()
    key, query = torch.arange(shape.num_keys), torch.arange(shape.num_queries)[:, None]
    seen = key <= query + shape.num_keys - shape.num_queries
    assert not (plan.weights() > 0)[..., ~seen].any()
    if density == 1.0:
        seen = seen[None, None] if valid is None else seen & valid[:, None, None]
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in CAUSAL])
def test_a_method_without_causal_form_says_why(name: str) -> None:
    q, k, v = Shape(1, 1, 1, 64, 64, 8, 0).tensors()
    with pytest.raises(gs.UnsupportedError, match=f"{name} has no causal form: .*positions"):
        gs.sparse_attention(q, k, v, gs.get_method(name), gs.Call(causal=True))


@pytest.mark.parametrize("name", METHODS)
@given(shapes(self_attention=True), st.integers(0, 3))
def test_law_5_density_grows_with_the_budget(name: str, shape: Shape, step: int) -> None:
    q, k, v = shape.tensors()
    densities = [0.02, 0.1, 0.25, 0.5, 0.75, 1.0]
    got = [
        gs.get_method(name, density=d).plan(q, k, v, gs.Call(step=step)).density for d in densities
    ]
    assert got == sorted(got)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "dense"])
@pytest.mark.parametrize("num_tokens", [2048, 4097, 4608])
@pytest.mark.parametrize("density", [0.1, 0.15, 0.3, 0.5])
def test_law_5_the_asked_density_is_met(name: str, num_tokens: int, density: float) -> None:
    q, k, v = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
    plan = gs.get_method(name, density=density).plan(q, k, v)
    assert abs(plan.density - density) <= 0.02


@pytest.mark.parametrize("num_queries", [2048, 1500])
@pytest.mark.parametrize("num_keys", [2048, 4097])
@pytest.mark.parametrize("density", [0.15, 0.3, 0.6])
def test_law_5_the_asked_density_is_met_causally(
    num_queries: int, num_keys: int, density: float
) -> None:
    """Of the visible pairs: blocks on the diagonal are half visible."""
    q, k, v = Shape(1, 2, 1, num_queries, num_keys, 16, 1).tensors()
    plan = gs.BlockTopK(density=density).plan(q, k, v, gs.Call(causal=True))
    assert abs(plan.density - density) <= 0.02


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("density", [0.2, 0.6])
def test_the_asked_density_is_that_of_latent_pairs(name: str, density: float) -> None:
    """Text rows and columns are full, and reported apart."""
    q, k, v = Shape(1, 2, 1, 2048 + 77, 2048 + 77, 16, 1).tensors()
    plan = gs.get_method(name, density=density).plan(q, k, v, gs.Call(text=(0, 77)))
    read = plan.weights() > 0
    assert read[..., :77].all()
    assert read[..., :77, :].all()
    latent = read[..., 77:, 77:].double().mean().item()
    assert latent == pytest.approx(1.0 if name == "dense" else density, abs=0.02)


@pytest.mark.parametrize("text", [(0, 0), (0, 1), (0, 77), (240, 636), (100, 612), (240, 240)])
@pytest.mark.parametrize("name", METHODS)
def test_text_rows_are_dense_rows(name: str, text: tuple[int, int]) -> None:
    length = 240 + text[1] - text[0]
    q, k, v = Shape(2, 2, 2, length, length, 16, 1).tensors()
    call = gs.Call(text=text, grid=(4, 6, 10))
    out = gs.sparse_attention(q, k, v, gs.get_method(name, density=0.3), call)
    rows = slice(*text)
    want = attention(q, k, v).out[:, :, rows]
    allowed = tolerance(q, k, v)
    assert text[0] == text[1] or (out[:, :, rows] - want).abs().max() <= allowed.out


@pytest.mark.parametrize("name", METHODS)
@given(shapes(self_attention=True), st.integers(1, 60), st.sampled_from([0.2, 0.6]))
def test_law_6_padding_changes_nothing(name: str, shape: Shape, pad: int, density: float) -> None:
    """Valid rows are the same whatever lies in the padding, NaN included."""
    q, k, v = shape.tensors()
    method = gs.get_method(name, density=density)
    alone = gs.sparse_attention(q, k, v, method)

    def filled(x: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, pad), value=value)

    valid = torch.arange(shape.num_keys + pad).expand(shape.batch, -1) < shape.num_keys
    call = gs.Call(key_valid=valid)
    for value in (1.5, float("nan")):
        padded = [filled(x, value) for x in (q, k, v)]
        out = gs.sparse_attention(*padded, method, call)[:, :, : shape.num_keys]
        torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_law_6_batch_rows_and_heads_are_independent(name: str) -> None:
    q, k, v = Shape(3, 2, 2, 300, 300, 16, 4).tensors()
    valid = torch.arange(300) < torch.tensor([[300], [170], [33]])
    method = gs.get_method(name, density=0.3)
    whole = gs.sparse_attention(q, k, v, method, gs.Call(key_valid=valid))
    for b in range(3):
        for kv in range(2):
            heads = slice(2 * kv, 2 * kv + 2)
            part = gs.sparse_attention(
                q[b : b + 1, heads],
                k[b : b + 1, kv : kv + 1],
                v[b : b + 1, kv : kv + 1],
                method,
                gs.Call(key_valid=valid[b : b + 1], head_offset=2 * kv),
            )
            seen = valid[b]
            torch.testing.assert_close(
                part[..., seen, :], whole[b : b + 1, heads][..., seen, :], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", METHODS)
def test_law_7_planning_draws_nothing_from_global_generators(name: str) -> None:
    q, k, v = Shape(1, 2, 1, 300, 300, 16, 4).tensors()
    before = torch.random.get_rng_state()
    first = gs.get_method(name, density=0.3).plan(q, k, v)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    second = gs.get_method(name, density=0.3).plan(q, k, v)
    assert torch.equal(first.weights(), second.weights())


@pytest.mark.parametrize("name", METHODS)
def test_inputs_are_never_modified(name: str) -> None:
    tensors = Shape(2, 2, 1, 200, 200, 16, 4).tensors()
    copies = [x.clone() for x in tensors]
    method, state = gs.get_method(name, density=0.3), {}
    for step in range(2):
        method.plan(*tensors, gs.Call(step=step), state=state)
        gs.sparse_attention(*tensors, method)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_masks_that_hide_nothing_change_nothing(name: str) -> None:
    q, k, v = Shape(2, 2, 1, 300, 300, 16, 4).tensors()
    method = gs.get_method(name, density=0.3)
    every = gs.Call(key_valid=torch.ones(2, 300, dtype=torch.bool))
    shared = gs.Call(key_valid=torch.ones(1, 300, dtype=torch.bool))
    plain = gs.sparse_attention(q, k, v, method)
    for call in (every, shared):
        torch.testing.assert_close(gs.sparse_attention(q, k, v, method, call), plain)


@pytest.mark.parametrize("name", METHODS)
def test_degenerate_tokens_are_no_trouble(name: str) -> None:
    """Identical tokens, two distinct values, one huge outlier: empty clusters everywhere."""
    same = torch.ones(1, 2, 150, 16)
    two = same.clone()
    two[:, :, ::3] = -1.0
    outlier = torch.randn(1, 2, 150, 16)
    outlier[:, :, 7] = 1e4
    for x in (same, two, outlier):
        for density in (0.1, 1.0):
            plan = gs.get_method(name, density=density).plan(x, x, x)
            plan.validate()
            out = gs.attend(x, x, x, plan).out
            assert out.isfinite().all()
            if density == 1.0:
                torch.testing.assert_close(
                    out.double(), attention(x, x, x).out, rtol=1e-4, atol=1e-4
                )


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_follows_the_tensors_device(name: str) -> None:
    q, k, v = Shape(1, 1, 1, 150, 150, 16, 4).tensors()
    method = gs.get_method(name, density=0.3)
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
