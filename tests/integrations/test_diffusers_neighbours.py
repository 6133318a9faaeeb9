"""Together with offloading and diffusers' caches; and what is refused: gradients, parallelism."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig

import gossamer as gs
from integrations.wan_models import (
    full,
    generate,
    inputs,
    pipeline,
    run,
    snapshot,
    sparse,
    wan,
)


def offloaded(model: torch.nn.Module) -> None:
    """Do what `enable_model_cpu_offload` does to a model, before and after every generation."""
    remove_hook_from_module(model, recurse=True)
    cpu_offload_with_hook(model, torch.device("cpu"))


@pytest.mark.parametrize("offload_first", [True, False])
def test_model_offloading_that_rehooks_after_every_generation(offload_first: bool) -> None:
    pipe = pipeline(wan())
    with gs.apply(pipe, sparse()):
        expected = generate(pipe, steps=2)
    dense = generate(pipe, steps=2)
    model = pipe.transformer
    if offload_first:
        offloaded(model)
    handle = gs.apply(pipe, sparse())
    for _ in range(2):
        offloaded(model)
        assert torch.equal(generate(pipe, steps=2), expected)
        assert [r.step for r in handle.records if r.layer == 0] == [0, 0, 1, 1]
    handle.remove()
    assert hasattr(model, "_hf_hook")
    assert torch.equal(generate(pipe, steps=2), dense)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(generate(pipe, steps=2), dense)


def test_sequential_offloading() -> None:
    model = wan()
    dense = run(model, inputs())
    cpu_offload(model, torch.device("cpu"))
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert [r.layer for r in handle.records] == [0, 1, 2]
    assert torch.equal(run(model, inputs()), dense)


@pytest.mark.parametrize("offload_first", [True, False])
def test_group_offloading(offload_first: bool) -> None:
    pipe = pipeline(wan())
    dense = generate(pipe, steps=2)
    with gs.apply(pipe, sparse()):
        expected = generate(pipe, steps=2)

    def offload() -> None:
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="leaf_level"
        )

    if offload_first:
        offload()
    with gs.apply(pipe, sparse()):
        if not offload_first:
            offload()
        assert torch.equal(generate(pipe, steps=2), expected)
    assert torch.equal(generate(pipe, steps=2), dense)


@pytest.mark.parametrize("cache_first", [True, False])
def test_first_block_cache(cache_first: bool) -> None:
    pipe = pipeline(wan())
    config = FirstBlockCacheConfig(threshold=1e9)  # every block after the first is skipped
    if cache_first:
        pipe.transformer.enable_cache(config)
    with gs.apply(pipe, sparse()) as handle:
        if not cache_first:
            pipe.transformer.enable_cache(config)
        first = generate(pipe, steps=3)
        calls = [(r.step, r.branch, r.layer) for r in handle.records]
        assert torch.equal(generate(pipe, steps=3), first)
        assert [(r.step, r.branch, r.layer) for r in handle.records] == calls
    passes = [(step, branch) for step in range(3) for branch in ("cond", "uncond")]
    assert [(s, b) for s, b, layer in calls if layer == 0] == passes
    skipped = {(s, b) for s, b in passes if (s, b, 1) not in calls}
    assert skipped == {(s, b) for s, b in passes if s > 0}
    pipe.transformer.disable_cache()
    dense = generate(pipe, steps=3)
    with gs.apply(pipe, sparse()):
        assert not torch.equal(generate(pipe, steps=3), dense)
    assert torch.equal(generate(pipe, steps=3), dense)


def test_a_cached_generation_is_the_stock_one_at_full_density() -> None:
    pipe = pipeline(wan())
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    dense = generate(pipe, steps=4)
    with gs.apply(pipe, full()):
        torch.testing.assert_close(generate(pipe, steps=4), dense, atol=1e-4, rtol=1e-3)
    assert torch.equal(generate(pipe, steps=4), dense)


def test_forward_with_gradients_runs_and_backward_is_refused() -> None:
    model = wan()
    expected = run(model, inputs())
    with gs.apply(model, full()):
        output = model(**inputs())[0]
        torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-5)
        with pytest.raises(gs.UnsupportedError, match=r"torch\.no_grad\(\)"):
            output.sum().backward()
    model.zero_grad()
    model(**inputs())[0].sum().backward()
    assert model.blocks[0].attn1.to_q.weight.grad.abs().sum() > 0


# Dynamo itself looks at .grad of a block's input, which is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_forward_with_gradients_runs_and_backward_is_refused() -> None:
    torch.compiler.reset()
    model = wan(num_layers=2)
    dense = run(model, inputs())
    with gs.apply(model, full()):
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        output = model(**inputs())[0]
        torch.testing.assert_close(output, dense, atol=2e-6, rtol=2e-5)
        with pytest.raises(gs.UnsupportedError, match="inference only"):
            output.sum().backward()
    torch.compiler.reset()


def test_gradient_checkpointing_is_refused_with_the_backward_pass() -> None:
    model = wan().train()
    model.enable_gradient_checkpointing()
    with gs.apply(model, full()):
        output = model(**inputs())[0]
        with pytest.raises(gs.UnsupportedError, match="gradient checkpointing"):
            output.sum().backward()


def test_inference_mode() -> None:
    model = wan()
    expected = run(model, inputs())
    with gs.apply(model, full()), torch.inference_mode():
        output = model(**inputs())[0]
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-5)


def test_context_parallelism_is_refused_before_and_after_attaching() -> None:
    model = wan()
    for module in model.modules():
        if hasattr(module, "processor"):
            module.processor._parallel_config = SimpleNamespace()
    before = snapshot(model)
    with pytest.raises(gs.UnsupportedError, match=r"blocks\.0\.attn1: context parallelism"):
        gs.apply(model, sparse())
    assert snapshot(model) == before

    model = wan()
    with gs.apply(model, sparse()):
        model.blocks[1].attn1.processor._parallel_config = SimpleNamespace()
        with pytest.raises(gs.UnsupportedError, match="enable_parallelism"):
            run(model, inputs())


def test_diffusers_itself_refuses_parallelism_of_an_attached_model() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    from gossamer.integrations.diffusers.backend import MEMBER

    assert not _AttentionBackendRegistry._is_context_parallel_available(MEMBER)


def test_another_default_device_does_not_matter() -> None:
    model = wan()
    arguments = inputs()
    dense = run(model, arguments)
    with torch.device("meta"):
        handle = gs.apply(model, full())
    for name in ("cpu", "meta"):
        torch.set_default_device(name)
        try:
            attached = run(model, arguments)
        finally:
            torch.set_default_device(None)
        torch.testing.assert_close(attached, dense, atol=2e-6, rtol=2e-5)
    handle.remove()
