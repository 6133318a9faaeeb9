"""Processors: the user's own keep running; what cannot be attached to is refused, never dense."""

from __future__ import annotations

import inspect

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from torch import nn
from torch.nn import functional

import gossamer as gs
from integrations.wan_models import full, inputs, run, snapshot, sparse, wan

NATIVE = AttentionBackendName.NATIVE
MATH = AttentionBackendName._NATIVE_MATH


class Counting(WanAttnProcessor):
    """A user's processor with state, by inheritance."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.gain = 1.5

    def __call__(self, attn, hidden_states, *args, **kwargs):
        self.calls += 1
        return super().__call__(attn, hidden_states, *args, **kwargs) * self.gain


class Wrapping:
    """A user's processor with state around the stock one; it has no backend of its own."""

    def __init__(self) -> None:
        self.calls = 0
        self.inner = WanAttnProcessor()

    def __call__(self, attn, hidden_states, *args, **kwargs):
        self.calls += 1
        return self.inner(attn, hidden_states, *args, **kwargs) * 1.5


class Learned(nn.Module):
    """A user's processor with parameters, which calls PyTorch's attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = functional.scaled_dot_product_attention(q, k, v, scale=0.25)
        return attn.to_out[0](out.transpose(1, 2).flatten(2) * self.gain)


@pytest.mark.parametrize("make", [Counting, Wrapping, Learned])
def test_a_users_processor_keeps_running(make) -> None:
    model = wan()
    processor = make()
    model.blocks[1].attn1.set_processor(processor)
    before = snapshot(model)
    dense = run(model, inputs())
    with gs.apply(model, full()) as handle:
        assert model.blocks[1].attn1.processor is processor
        assert isinstance(processor, make)
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1, 2]
        assert {r.path for r in handle.records} == {"sparse"}
    assert type(processor) is make
    if make is Learned:
        assert snapshot(model) == before
    else:
        assert processor.calls == 2
    assert torch.equal(run(model, inputs()), dense)


def test_the_scale_a_processor_asks_for_reaches_the_call() -> None:
    model = wan(num_layers=1)
    model.blocks[0].attn1.set_processor(Learned())
    events = []
    with gs.apply(model, sparse(), observer=events.append):
        run(model, inputs())
    assert events[0].call.scale == 0.25


def test_one_processor_shared_by_all_modules() -> None:
    model = wan()
    shared = Counting()
    model.set_attn_processor(shared)
    shared._attention_backend = MATH
    before = vars(shared).copy()
    dense = run(model, inputs())
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1, 2]  # attn1 only, each its own layer
    assert vars(shared) == before | {"calls": 12}
    assert type(shared) is Counting


def test_a_processor_shared_with_another_model() -> None:
    model, other = wan(), wan(seed=4)
    shared = model.blocks[0].attn1.processor
    other.blocks[0].attn1.set_processor(shared)
    dense = run(other, inputs())
    with gs.apply(model, sparse()) as handle:
        run(model, inputs())
        assert torch.equal(run(other, inputs()), dense)
        assert len(handle.records) == 3
        with pytest.raises(gs.UnsupportedError, match=r"blocks\.0\.attn1 shares its processor"):
            gs.apply(other, sparse())
    with gs.apply(other, sparse()):
        assert not torch.equal(run(other, inputs()), dense)


def test_a_function_as_processor_is_refused_and_nothing_is_changed() -> None:
    model = wan()
    stock = WanAttnProcessor()
    model.blocks[2].attn1.set_processor(lambda attn, *args: stock(attn, *args))
    before = snapshot(model)
    with pytest.raises(gs.UnsupportedError, match=r"blocks\.2\.attn1 has a function"):
        gs.apply(model, sparse())
    assert snapshot(model) == before


def test_a_missing_processor_is_refused() -> None:
    model = wan()
    model.blocks[0].attn1.processor = None
    with pytest.raises(gs.UnsupportedError, match=r"blocks\.0\.attn1 has no processor"):
        gs.apply(model, sparse())


class Handmade(WanAttnProcessor):
    """A processor with attention of its own: nothing can be made sparse."""

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return attn.to_out[0](attn.to_v(hidden_states))


def test_attention_that_never_arrives_is_an_error() -> None:
    model = wan()
    model.blocks[1].attn1.set_processor(Handmade())
    with gs.apply(model, sparse()), pytest.raises(gs.UnsupportedError, match="Handmade"):
        run(model, inputs())


def test_processors_replaced_after_attaching_are_noticed() -> None:
    model = wan()
    dense = run(model, inputs())
    handle = gs.apply(model, sparse())
    replacement = WanAttnProcessor()
    model.blocks[1].attn1.set_processor(replacement)
    with pytest.raises(
        gs.UnsupportedError, match=r"blocks\.1\.attn1 was replaced.*WanAttnProcessor"
    ):
        run(model, inputs())
    handle.remove()
    assert model.blocks[1].attn1.processor is replacement
    assert torch.equal(run(model, inputs()), dense)


def test_a_backend_set_after_attaching_is_noticed_and_kept_on_removal() -> None:
    model = wan()
    handle = gs.apply(model, sparse())
    model.blocks[1].attn1.set_attention_backend("native")
    with pytest.raises(gs.UnsupportedError, match=r"backend of blocks\.1\.attn1 was set to"):
        run(model, inputs())
    handle.remove()
    assert model.blocks[1].attn1.processor._attention_backend is NATIVE
    assert "_attention_backend" not in vars(model.blocks[0].attn1.processor)


def test_the_users_backend_comes_back() -> None:
    model = wan()
    for block in model.blocks[:2]:
        block.attn1.set_attention_backend("native")
        block.attn2.set_attention_backend("_native_math")
    before = snapshot(model)
    dense = run(model, inputs())
    with gs.apply(model, full()):
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert model.blocks[0].attn2.processor._attention_backend is MATH
    assert snapshot(model) == before
    assert torch.equal(run(model, inputs()), dense)


class Masked(WanAttnProcessor):
    """Passes on an attention mask, as models with padded text do."""

    mask: torch.Tensor

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.mask, rotary_emb)


@pytest.mark.parametrize("previous", [None, MATH])
def test_what_no_plan_can_carry_runs_on_the_previous_backend(previous, monkeypatch) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    used = []
    for member in (NATIVE, MATH):
        stock = _AttentionBackendRegistry._backends[member]

        def spy(member=member, stock=stock, **kwargs):
            used.append((member, kwargs["query"].shape[1], kwargs["key"].shape[1]))
            return stock(**kwargs)

        monkeypatch.setitem(_AttentionBackendRegistry._backends, member, spy)
    model = wan(num_layers=1)
    processor = Masked()
    processor.mask = torch.zeros(1, 1, 80, 80)
    model.blocks[0].attn1.set_processor(processor)
    if previous is not None:
        processor._attention_backend = previous
    dense = run(model, inputs())
    used.clear()
    with gs.apply(model, sparse()) as handle:
        assert torch.equal(run(model, inputs()), dense)
    assert used == [(previous or NATIVE, 80, 80), (NATIVE, 80, 7)]
    (record,) = handle.records
    assert record.path == "dense"
    assert record.kernel == f"diffusers:{(previous or NATIVE).value}"
    assert "(1, 1, 80, 80)" in record.reason
    assert "torch.float32" in record.reason
    assert record.density == 1.0


@pytest.mark.parametrize("active", [True, False])
def test_dense_steps_run_on_the_backend_the_user_chose(active: bool) -> None:
    model = wan()
    if not active:
        model.blocks[0].attn1.set_attention_backend("_native_math")
    with attention_backend("_native_math" if active else "native"):
        dense = run(model, inputs())
        with gs.apply(model, sparse(dense_layers="0,1")) as handle:
            attached = run(model, inputs())
        with gs.apply(model, sparse(dense_layers="0-2")):
            assert torch.equal(run(model, inputs()), dense)
    assert not torch.equal(attached, dense)
    chosen = "diffusers:_native_math"
    assert [r.kernel for r in handle.records[:2]] == [chosen, chosen if active else "sdpa"]
    assert [r.reason for r in handle.records] == ["dense layer", "dense layer", ""]
    assert handle.records[2].path == "sparse"


def test_the_active_backend_serves_models_without_their_own() -> None:
    model = wan(num_layers=1)
    processor = Masked()
    processor.mask = torch.zeros(1, 1, 80, 80)
    model.blocks[0].attn1.set_processor(processor)
    with gs.apply(model, sparse()), attention_backend("_native_math"):
        attached = run(model, inputs())
    with attention_backend("_native_math"):
        assert torch.equal(attached, run(model, inputs()))


def test_key_masks_reach_the_call_in_every_form() -> None:
    model = wan(num_layers=1)
    processor = Masked()
    model.blocks[0].attn1.set_processor(processor)
    valid = torch.arange(80).expand(2, 80) < torch.tensor([[60], [80]])
    arguments = inputs(batch=2)
    outputs = []
    for mask in (valid, valid[:, None, None, :]):
        processor.mask = mask
        events = []
        dense = run(model, arguments)
        with gs.apply(model, full(), observer=events.append) as handle:
            outputs.append(run(model, arguments))
        torch.testing.assert_close(outputs[-1], dense, atol=2e-6, rtol=2e-5)
        assert handle.records[0].path == "sparse"
        assert torch.equal(events[0].call.key_valid, valid)
    assert torch.equal(outputs[0], outputs[1])


def test_a_mask_of_another_length_is_refused() -> None:
    model = wan(num_layers=1)
    processor = Masked()
    processor.mask = torch.ones(1, 1, 1, 256, dtype=torch.bool)
    model.blocks[0].attn1.set_processor(processor)
    with gs.apply(model, sparse()), pytest.raises(gs.PlanError, match=r"1, 1, 1, 256.*80 keys"):
        run(model, inputs())


class Odd(WanAttnProcessor):
    """Runs attention of kinds that self-attention of a diffusion model never is."""

    causal = False

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        q, k, v = (
            layer(hidden_states).unflatten(2, (attn.heads, -1))
            for layer in (attn.to_q, attn.to_k, attn.to_v)
        )
        keys = slice(None) if self.causal else slice(0, 50)
        out = dispatch_attention_fn(
            q, k[:, keys], v[:, keys], is_causal=self.causal, backend=self._attention_backend
        )
        return attn.to_out[0](out.flatten(2))


@pytest.mark.parametrize(
    ("causal", "reason"), [(True, "causal"), (False, "80 queries and 50 keys")]
)
def test_causal_and_cross_shapes_go_dense_and_say_so(causal: bool, reason: str) -> None:
    model = wan(num_layers=1)
    processor = Odd()
    processor.causal = causal
    model.blocks[0].attn1.set_processor(processor)
    dense = run(model, inputs())
    with gs.apply(model, sparse()) as handle:
        assert torch.equal(run(model, inputs()), dense)
    assert handle.records[0].path == "dense"
    assert reason in handle.records[0].reason


def test_signatures_that_models_inspect_are_kept() -> None:
    model = wan()
    processor = model.blocks[0].attn1.processor
    stock = inspect.signature(processor.__call__)
    with gs.apply(model, sparse()):
        assert inspect.signature(processor.__call__) == stock
        assert len(model.attn_processors) == 6


def test_moving_and_casting_an_attached_model() -> None:
    model = wan()
    with gs.apply(model, full()):
        model.to(torch.float64).to(torch.bfloat16).to("cpu")
        arguments = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v
                     for k, v in inputs().items()}  # fmt: skip
        attached = run(model, arguments)
    assert attached.dtype == torch.bfloat16
    torch.testing.assert_close(attached, run(model, arguments), atol=2e-2, rtol=2e-2)


def test_lora_acts_as_in_the_stock_model() -> None:
    model, stock = wan(), wan()
    assert torch.equal(run(model, inputs()), run(stock, inputs()))
    before = snapshot(model)
    with gs.apply(model, full()) as handle:
        plain = run(model, inputs())
        for each in (model, stock):
            torch.manual_seed(7)
            each.add_adapter(
                LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
            )
        on = run(model, inputs())
        torch.testing.assert_close(on, run(stock, inputs()), atol=2e-6, rtol=2e-5)
        assert (on - plain).abs().max() > 1e-3
        for each in (model, stock):
            each.set_adapters(["default"], weights=[0.5])
        half = run(model, inputs())
        torch.testing.assert_close(half, run(stock, inputs()), atol=2e-6, rtol=2e-5)
        assert not torch.allclose(half, on, atol=1e-3)
        for each in (model, stock):
            each.disable_adapters()
        assert torch.equal(run(model, inputs()), plain)
        model.enable_adapters()
        torch.testing.assert_close(run(model, inputs()), half, atol=2e-6, rtol=2e-5)
        model.delete_adapters("default")
        assert len(handle.records) == 3
    removed = snapshot(model)
    assert {k: v for k, v in removed.items() if k.endswith("processor")} == {
        k: v for k, v in before.items() if k.endswith("processor")
    }


def test_lora_loaded_before_attaching() -> None:
    model = wan()
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    dense = run(model, inputs())
    with gs.apply(model, full()):
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)


def test_fused_projections() -> None:
    model = wan()
    model.fuse_qkv_projections()
    dense = run(model, inputs())
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert {r.path for r in handle.records} == {"sparse"}
