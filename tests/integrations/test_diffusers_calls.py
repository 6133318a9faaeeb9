"""The call a session gets: layer, grid and shapes are the model's own, whatever the resolution."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from diffusers import WanVACETransformer3DModel

import gossamer as gs
from gossamer.errors import PlanError
from gossamer.integrations.diffusers.families import FAMILIES
from gossamer.integrations.diffusers.sites import key_mask
from integrations.wan_models import (
    GRID,
    collecting,
    full,
    i2v_inputs,
    inputs,
    run,
    sparse,
    wan,
    wan_i2v,
)

METHODS = [
    gs.BlockTopK(density=0.3, tile=8, block=8),
    gs.get_method("svg2", density=0.4, query_clusters=4, key_clusters=8),
    gs.get_method("instagen", density=0.4, query_clusters=4, key_clusters=8),
]
METHOD_NAMES = [method.name for method in METHODS]


def test_layers_and_grid_are_the_models_own() -> None:
    model = wan(num_layers=12)  # named_modules lists blocks.10 and blocks.11 after blocks.9
    with collecting(model) as (handle, events):
        run(model, inputs())
    calls = [event.call for event in events]
    assert [call.layer for call in calls] == list(range(12))
    assert {call.num_layers for call in calls} == {12}
    assert {call.grid for call in calls} == {GRID}
    assert {call.text for call in calls} == {None}
    assert {call.scale for call in calls} == {None}
    assert {(r.num_heads, r.num_queries, r.num_keys) for r in handle.records} == {(2, 80, 80)}


def test_the_session_computes_what_the_module_asks_for() -> None:
    model = wan(num_layers=1)
    received = {}
    attn = model.blocks[0].attn1
    hooks = [
        attn.norm_q.register_forward_hook(lambda _m, _a, out: received.update(q=out)),
        attn.to_v.register_forward_hook(lambda _m, _a, out: received.update(v=out)),
        attn.to_out[0].register_forward_pre_hook(lambda _m, args: received.update(out=args[0])),
    ]
    with collecting(model) as (_, events):
        run(model, inputs())
    for hook in hooks:
        hook.remove()
    (event,) = events
    assert event.v.shape == (1, 2, 80, 12)
    assert torch.equal(event.v.transpose(1, 2).flatten(2), received["v"])
    assert torch.equal(event.out.transpose(1, 2).flatten(2), received["out"])
    # The rotary embedding turns pairs of channels: norms stay.
    torch.testing.assert_close(
        event.q.transpose(1, 2).norm(dim=(2, 3)), received["q"].norm(dim=2), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("keyword", [True, False])
def test_the_grid_is_read_from_positional_and_keyword_arguments(keyword: bool) -> None:
    model = wan(num_layers=1)
    arguments = inputs((2, 6, 10))
    latents = arguments.pop("hidden_states")
    with collecting(model) as (_, events), torch.no_grad():
        if keyword:
            model(hidden_states=latents, **arguments)
        else:
            model(latents, **arguments)
    assert events[0].call.grid == (2, 3, 5)


def test_a_grid_is_not_guessed_from_the_token_count() -> None:
    model = wan(num_layers=1, patch_size=(1, 4, 2))
    with collecting(model) as (_, events):
        run(model, inputs((4, 8, 10)))
        run(model, inputs((4, 20, 4)))
    assert [event.call.grid for event in events] == [(4, 2, 5), (4, 5, 2)]


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
@pytest.mark.parametrize("latent", [(1, 2, 2), (3, 6, 10), (5, 10, 14)])
def test_any_resolution_runs_and_full_density_is_dense(method: gs.Method, latent) -> None:
    model = wan(num_layers=2)
    arguments = inputs(latent, batch=2)
    dense = run(model, arguments)
    with gs.apply(model, sparse(method=method)) as handle:
        assert run(model, arguments).isfinite().all()
        assert {r.path for r in handle.records} == {"sparse"}
    full_method = gs.get_method(method.name, density=1.0)
    with gs.apply(model, sparse(method=full_method)):
        torch.testing.assert_close(run(model, arguments), dense, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_resolutions_in_turn_equal_fresh_attachments(method: gs.Method) -> None:
    model = wan(num_layers=2)
    latents = [(4, 8, 10), (3, 6, 10), (4, 8, 10)]
    fresh = []
    for latent in latents:
        with gs.apply(model, sparse(method=method)):
            fresh.append(run(model, inputs(latent)))
    with gs.apply(model, sparse(method=method)):
        for latent, expected in zip(latents, fresh, strict=True):
            assert torch.equal(run(model, inputs(latent)), expected)


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_batch_rows_are_independent(method: gs.Method) -> None:
    model = wan(num_layers=2)
    arguments = inputs(batch=2)
    with gs.apply(model, sparse(method=method)):
        both = run(model, arguments)
        for row in range(2):
            alone = {k: v[row : row + 1] if torch.is_tensor(v) else v for k, v in arguments.items()}
            torch.testing.assert_close(run(model, alone)[0], both[row], atol=1e-5, rtol=1e-4)


def test_image_to_video_models() -> None:
    model = wan_i2v()
    dense = run(model, i2v_inputs())
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, i2v_inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1]


def test_per_token_timesteps() -> None:
    model = wan()
    arguments = inputs() | {"timestep": torch.full((1, 80), 500)}
    dense = run(model, arguments)
    with gs.apply(model, full()):
        torch.testing.assert_close(run(model, arguments), dense, atol=2e-6, rtol=2e-5)


def test_vace_models_with_their_control_blocks() -> None:
    torch.manual_seed(0)
    model = WanVACETransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, vace_layers=[0, 1], vace_in_channels=8,
    ).eval()  # fmt: skip
    arguments = inputs() | {"control_hidden_states": torch.randn(1, 8, 4, 8, 10)}
    dense = run(model, arguments)
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, arguments), dense, atol=5e-6, rtol=5e-5)
        assert sorted(r.layer for r in handle.records) == [0, 1, 2, 3]


def test_other_token_counts_than_the_grid_are_refused() -> None:
    model = wan(num_layers=1)
    hook = model.patch_embedding.register_forward_hook(lambda _m, _a, out: out[..., :-1])
    rope = model.rope.register_forward_hook(
        lambda _m, _a, out: tuple(x[:, : 4 * 4 * 4] for x in out)
    )
    with gs.apply(model, sparse()), pytest.raises(PlanError, match=r"4\*4\*5.*64"):
        run(model, inputs())
    hook.remove()
    rope.remove()


def test_calling_past_the_model_is_refused() -> None:
    model = wan(num_layers=1)
    with gs.apply(model, sparse()), torch.no_grad():
        with pytest.raises(gs.UnsupportedError, match="model.forward"):
            model.forward(**inputs())
        model(**inputs())
        with pytest.raises(gs.UnsupportedError, match="model.forward"):
            model.forward(**inputs())


def test_short_sequences_go_dense_by_default_and_say_so() -> None:
    model = wan()
    dense = run(model, inputs())
    with gs.apply(model, sparse(min_tokens=1024)) as handle:
        assert torch.equal(run(model, inputs()), dense)
    assert all("80 tokens" in record.reason for record in handle.records)


@pytest.mark.parametrize(("text", "span"), [("none", None), ("first", (0, 7)), ("last", (80, 87))])
def test_where_a_family_has_its_text(text, span) -> None:
    family = dataclasses.replace(FAMILIES[0], text=text)
    assert family.text_span(87, 80) == span
    assert family.text_span(80, 80) is None


def test_key_masks_are_told_from_other_masks() -> None:
    valid = torch.tensor([[True, True, False], [True, False, False]])
    for mask in (valid, valid[:, None, None]):
        key_valid, reason = key_mask(mask, 2, 3)
        assert reason is None
        assert torch.equal(key_valid, valid)
    key_valid, reason = key_mask(valid[:1, None, None], 2, 3)  # one row for the batch
    assert reason is None
    assert torch.equal(key_valid, valid[:1])
    assert key_mask(None, 2, 3) == (None, None)
    for mask in (
        torch.ones(2, 1, 3, 3, dtype=torch.bool),  # a row for each query
        torch.ones(2, 4, 1, 3, dtype=torch.bool),  # for each head
        torch.ones(3, 3, dtype=torch.bool),  # [N, S] with B = 2
        torch.ones(2, 1, 1, 1, dtype=torch.bool),  # broadcast over keys
        torch.zeros(2, 1, 1, 3),  # additive
    ):
        key_valid, reason = key_mask(mask, 2, 3)
        assert key_valid is None
        assert str(tuple(mask.shape)) in reason
    with pytest.raises(PlanError, match=r"\(2, 1, 1, 5\).*3 keys"):
        key_mask(torch.ones(2, 1, 1, 5, dtype=torch.bool), 2, 3)
