"""What attaching touches: the self-attention of the given model's blocks, and nothing else."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.nn import functional

import gossamer as gs
from gossamer.integrations.diffusers.backend import MEMBER
from integrations.wan_models import (
    collecting,
    full,
    generate,
    i2v_inputs,
    inputs,
    pipeline,
    run,
    snapshot,
    sparse,
    wan,
    wan_i2v,
)


def test_full_density_equals_the_stock_model() -> None:
    model = wan()
    dense = run(model, inputs())
    with gs.apply(model, full()) as handle:
        torch.testing.assert_close(run(model, inputs()), dense, atol=2e-6, rtol=2e-5)
        assert {r.path for r in handle.records} == {"sparse"}
    with gs.apply(model, sparse()):
        assert (run(model, inputs()) - dense).abs().max() > 1e-4


def test_a_dense_schedule_equals_the_stock_model_bit_for_bit() -> None:
    model = wan()
    dense = run(model, inputs())
    with gs.apply(model, sparse(dense_layers="0-2")) as handle:
        assert torch.equal(run(model, inputs()), dense)
        assert {r.reason for r in handle.records} == {"dense layer"}


@pytest.mark.parametrize(("make", "arguments"), [(wan, inputs()), (wan_i2v, i2v_inputs())])
def test_cross_attention_is_not_touched(make, arguments) -> None:
    model = make()
    cross = {
        name: vars(m.processor).copy()
        for name, m in model.named_modules()
        if name.endswith("attn2")
    }
    with collecting(model) as (handle, events):
        for name, before in cross.items():
            processor = model.get_submodule(name).processor
            assert type(processor).__name__ == "WanAttnProcessor"
            assert vars(processor) == before
        run(model, arguments)
        assert len(handle.records) == len(model.blocks)
        assert all(event.q.shape == event.k.shape == (1, 2, 80, 12) for event in events)


def test_other_models_and_torch_are_not_touched() -> None:
    model, other = wan(), wan(seed=4)
    before = snapshot(other)
    dense = run(other, inputs())
    sdpa = functional.scaled_dot_product_attention
    active = _AttentionBackendRegistry.get_active_backend()
    names = list(AttentionBackendName)
    with gs.apply(model, sparse()) as handle:
        run(model, inputs())
        assert torch.equal(run(other, inputs()), dense)
        assert snapshot(other) == before
        assert len(handle.records) == 3
        assert functional.scaled_dot_product_attention is sdpa
        assert _AttentionBackendRegistry.get_active_backend() == active
        assert list(AttentionBackendName) == names
        with pytest.raises(ValueError, match="gossamer"):
            other.set_attention_backend("gossamer")


def test_only_the_denoisers_of_a_pipeline_are_attached_to() -> None:
    pipe = pipeline(wan())
    pipe.register_modules(vae=torch.nn.Linear(1, 1))
    before = snapshot(pipe.vae)
    with gs.apply(pipe, sparse()):
        assert snapshot(pipe.vae) == before


def test_removal_restores_everything() -> None:
    model = wan()
    before = snapshot(model)
    dense = run(model, inputs())
    keys = list(model.state_dict())
    handle = gs.apply(model, sparse())
    assert snapshot(model) != before
    assert list(model.state_dict()) == keys
    with model.cache_context("cond"):
        run(model, inputs())
    handle.remove()
    assert snapshot(model) == before
    assert torch.equal(run(model, inputs()), dense)
    handle.remove()
    assert snapshot(model) == before


def test_removal_after_a_generation_and_again() -> None:
    pipe = pipeline(wan())
    dense = generate(pipe)  # leaves diffusers' own registry on the model
    before = snapshot(pipe.transformer)
    for _ in range(2):
        with gs.apply(pipe, sparse()):
            assert not torch.equal(generate(pipe), dense)
        assert snapshot(pipe.transformer) == before
        assert torch.equal(generate(pipe), dense)


def test_an_exception_leaves_a_removable_and_usable_model() -> None:
    model = wan()
    before = snapshot(model)
    dense = run(model, inputs())
    with gs.apply(model, sparse()):
        sparse_output = run(model, inputs())

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    handle = gs.apply(model, sparse())
    hook = model.blocks[1].attn1.norm_q.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"), handle:
        run(model, inputs())
    hook.remove()
    assert snapshot(model) == before
    assert torch.equal(run(model, inputs()), dense)

    with gs.apply(model, sparse()) as handle:
        hook = model.blocks[1].attn1.norm_q.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(model, inputs())
        hook.remove()
        assert torch.equal(run(model, inputs()), sparse_output)
        assert [r.layer for r in handle.records] == [0, 1, 2]
    assert torch.equal(run(model, inputs()), dense)


def test_a_model_dropped_without_removal_is_freed() -> None:
    pipe = pipeline(wan())
    gs.apply(pipe, sparse())
    generate(pipe, steps=1)
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None


def test_an_attached_model_is_not_copied() -> None:
    model = wan()
    with gs.apply(model, sparse()), pytest.raises(gs.UnsupportedError, match="copy it before"):
        copy.deepcopy(model)
    dense = run(model, inputs())
    twin = copy.deepcopy(model)
    with gs.apply(model, sparse()):
        assert torch.equal(run(twin, inputs()), dense)


def test_the_name_of_the_backend_can_be_copied() -> None:
    """Whatever this Python's enum does with a member that is not listed."""
    assert copy.deepcopy(MEMBER) is MEMBER


def test_one_model_in_two_roles_is_attached_to_once() -> None:
    model = wan()
    before = snapshot(model)
    with gs.apply(pipeline(model, model), sparse()) as handle:
        run(model, inputs())
        assert [r.layer for r in handle.records] == [0, 1, 2]
    assert snapshot(model) == before


def test_a_users_hook_added_after_attaching_survives_removal() -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Doubling(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: tuple) -> tuple:
            return (output[0] * 2,)

    model = wan()
    dense = run(model, inputs())
    for first in ("hook", "apply"):
        registry = HookRegistry.check_if_exists_or_initialize(model)
        if first == "hook":
            registry.register_hook(Doubling(), "doubling")
        handle = gs.apply(model, full())
        if first == "apply":
            registry.register_hook(Doubling(), "doubling")
        torch.testing.assert_close(run(model, inputs()), dense * 2, atol=5e-6, rtol=2e-5)
        handle.remove()
        assert torch.equal(run(model, inputs()), dense * 2)
        registry.remove_hook("doubling")
        assert torch.equal(run(model, inputs()), dense)


def test_removing_a_users_hook_while_attached() -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    class Doubling(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: tuple) -> tuple:
            return (output[0] * 2,)

    model = wan()
    dense = run(model, inputs())
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(Doubling(), "doubling")
    with gs.apply(model, sparse(dense_layers="0-2")):
        assert torch.equal(run(model, inputs()), dense * 2)
        registry.remove_hook("doubling")
        assert torch.equal(run(model, inputs()), dense)
    assert torch.equal(run(model, inputs()), dense)


def test_threads_do_not_see_each_others_calls() -> None:
    import threading

    models = [wan(seed=seed) for seed in (0, 1)]
    latents = [(4, 8, 10), (3, 6, 8)]
    handles = [gs.apply(model, sparse()) for model in models]
    alone = [run(m, inputs(latent)) for m, latent in zip(models, latents, strict=True)]
    together: list[list[torch.Tensor]] = [[], []]

    def work(number: int) -> None:
        for _ in range(10):
            together[number].append(run(models[number], inputs(latents[number])))

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (0, 1):
        assert len(together[number]) == 10
        assert all(torch.equal(out, alone[number]) for out in together[number])
        handles[number].remove()
