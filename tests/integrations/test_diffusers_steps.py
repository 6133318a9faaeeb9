"""Step, branch and generation: which pass a call belongs to, and what state it may meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

import gossamer as gs
from integrations.wan_models import (
    Remembering,
    collecting,
    generate,
    i2v_pipeline,
    inputs,
    pipeline,
    run,
    sparse,
    wan,
)

STATEFUL = [
    gs.get_method("svg2", density=0.4, query_clusters=4, key_clusters=8),
    gs.get_method("instagen", density=0.4, query_clusters=4, key_clusters=8),
]


def places(records: Any) -> list[tuple[int, int | None, str]]:
    """Return (step, num_steps, branch) of the first layer's records."""
    return [(r.step, r.num_steps, r.branch) for r in records if r.layer == 0]


def both_passes(steps: int) -> list[tuple[int, int, str]]:
    """Return what `places` is of a whole generation with guidance."""
    return [(step, steps, branch) for step in range(steps) for branch in ("cond", "uncond")]


def check_memory(log: list[Any]) -> None:
    """Each call meets its own layer's and pass's state of the step before, or none at step 0."""
    for call, found in log:
        expected = None if call.step == 0 else (call.layer, call.branch, call.step - 1)
        assert found == expected


def image_pipeline(experts: int = 1, **config: Any) -> Any:
    """Return an image-to-video pipeline of one or two experts."""
    models = [wan(num_layers=2, seed=n, in_channels=36, out_channels=16) for n in range(experts)]
    return i2v_pipeline(*models, **config)


IMAGE = Image.new("RGB", (80, 64), (200, 30, 10))


def test_a_generation() -> None:
    pipe = pipeline(wan())
    method = Remembering()
    with gs.apply(pipe, sparse(method=method)) as handle:
        generate(pipe, steps=4)
        assert places(handle.records) == both_passes(4)
        assert len(handle.records) == 4 * 2 * 3
    check_memory(method.log)
    assert sum(found is not None for _, found in method.log) == 3 * 2 * 3


def test_the_transformer_alone_learns_the_step_from_the_pipelines_contexts() -> None:
    pipe = pipeline(wan())
    with gs.apply(pipe.transformer, sparse()) as handle:
        generate(pipe, steps=3)
        assert places(handle.records) == both_passes(3)


def test_without_guidance() -> None:
    pipe = pipeline(wan())
    with gs.apply(pipe, sparse()) as handle:
        generate(pipe, steps=3, guidance_scale=1.0)
        assert places(handle.records) == [(step, 3, "cond") for step in range(3)]


@pytest.mark.parametrize("method", STATEFUL, ids=[method.name for method in STATEFUL])
def test_generations_repeat_bit_for_bit(method: gs.Method) -> None:
    pipe = pipeline(wan())
    with gs.apply(pipe, sparse(method=method)) as handle:
        first = generate(pipe, steps=3)
        count = len(handle.records)
        assert torch.equal(generate(pipe, steps=3), first)
        assert len(handle.records) == count
        generate(pipe, steps=2, seed=8, height=32)
        assert torch.equal(generate(pipe, steps=3), first)


class Interrupted(Exception):
    """Raised in the middle of a generation."""


@pytest.mark.parametrize("stop", [(0, "uncond"), (2, "cond"), (2, "uncond")])
@pytest.mark.parametrize("whole_pipeline", [True, False])
def test_a_generation_after_an_interrupted_one(stop, whole_pipeline: bool) -> None:
    pipe = pipeline(wan())
    target = pipe if whole_pipeline else pipe.transformer
    method = Remembering()

    def interrupt(event: Any) -> None:
        if (event.call.step, event.call.branch) == stop and event.call.layer == 1 and armed:
            raise Interrupted

    armed = False
    with gs.apply(target, sparse(method=method), observer=interrupt) as handle:
        expected = generate(pipe, steps=4)
        armed = True
        with pytest.raises(Interrupted):
            generate(pipe, steps=4)
        armed = False
        method.log.clear()
        assert torch.equal(generate(pipe, steps=4), expected)
        assert places(handle.records) == both_passes(4)
        assert len(handle.records) == 4 * 2 * 3
    check_memory(method.log)


def test_two_experts_count_global_steps_and_share_no_state() -> None:
    high, low = wan(seed=0), wan(seed=5)
    pipe = pipeline(high, low, boundary_ratio=0.7)
    method = Remembering()
    with gs.apply(pipe, sparse(method=method, dense_steps=(1, 1))) as handle:
        first = generate(pipe, steps=6)
        assert places(handle.records) == both_passes(6)
        dense = {r.step for r in handle.records if r.path == "dense"}
        assert dense == {0, 5}
        assert torch.equal(generate(pipe, steps=6), first)
    cold = [(call.step, call.branch) for call, found in method.log if found is None]
    boundary = sorted({step for step, _ in cold})
    assert len(boundary) == 2  # the first sparse step, and the second expert's first
    assert boundary[0] == 1
    assert cold.count((boundary[1], "uncond")) == cold.count((boundary[1], "cond")) == 2 * 3
    for call, found in method.log:
        assert found in (None, (call.layer, call.branch, call.step - 1))


def test_only_the_second_expert() -> None:
    pipe = pipeline(None, wan(), boundary_ratio=1.0)
    with gs.apply(pipe, sparse()) as handle:
        generate(pipe, steps=3)
        assert {r.num_steps for r in handle.records} == {3}


@pytest.mark.parametrize("experts", [1, 2])
def test_image_to_video_pipelines_tell_no_step_but_their_scheduler_does(experts: int) -> None:
    pipe = image_pipeline(experts, boundary_ratio=0.7 if experts == 2 else None)
    method = Remembering()
    with gs.apply(pipe, sparse(method=method)) as handle:
        first = generate(pipe, steps=5, image=IMAGE)
        assert places(handle.records) == both_passes(5)
        assert torch.equal(generate(pipe, steps=5, image=IMAGE), first)
    if experts == 1:
        check_memory(method.log)
    cold = {call.step for call, found in method.log if found is None}
    assert len(cold) == experts


def test_an_image_to_video_transformer_alone_counts_its_passes() -> None:
    pipe = image_pipeline()
    method = Remembering()
    with gs.apply(pipe.transformer, sparse(method=method, dense_steps=1)) as handle:
        for _ in range(2):
            generate(pipe, steps=3, image=IMAGE)
            assert places(handle.records) == [(s, None, b) for s, _, b in both_passes(3)]
            assert {r.step for r in handle.records if r.path == "dense"} == {0}


def test_a_share_of_an_unknown_number_of_steps_is_an_error() -> None:
    model = wan()
    with (
        gs.apply(model, sparse(dense_steps=0.5)),
        pytest.raises(gs.RecipeError, match="dense_steps=0.5"),
        model.cache_context("cond"),
    ):
        run(model, inputs())


def test_passes_named_by_hand() -> None:
    model = wan()
    method = Remembering()
    with gs.apply(model, sparse(method=method, dense_steps=0.0)) as handle:
        for step in range(3):
            for branch in ("cond", "uncond"):
                with model.cache_context(branch, step_index=step, num_inference_steps=3):
                    run(model, inputs())
        assert places(handle.records) == both_passes(3)
        check_memory(method.log)
        # The same again, without anybody having said that the first generation is over.
        for branch in ("cond", "uncond"):
            with model.cache_context(branch, step_index=0, num_inference_steps=3):
                run(model, inputs())
        assert places(handle.records) == both_passes(3)[:2]
        check_memory(method.log)


def test_a_pass_that_comes_twice_in_a_step_does_not_meet_itself() -> None:
    model = wan()
    method = Remembering()
    with gs.apply(model, sparse(method=method)) as handle:
        for step in (3, 4, 4):
            with model.cache_context("cond", step_index=step, num_inference_steps=9):
                run(model, inputs())
    assert [found and found[2] for call, found in method.log if call.layer == 1] == [None, 3, None]
    assert len(handle.records) == 9


def test_several_forwards_under_one_context_are_steps() -> None:
    model = wan()
    method = Remembering()
    with gs.apply(model, sparse(method=method)) as handle, model.cache_context("cond"):
        for _ in range(3):
            run(model, inputs())
    assert places(handle.records) == [(0, None, "cond"), (1, None, "cond"), (2, None, "cond")]
    check_memory(method.log)


def test_forwards_outside_any_context_are_stateless() -> None:
    model = wan()
    method = Remembering()
    texts = [inputs(seed=seed) for seed in (1, 2)]
    with gs.apply(model, sparse(method=method)) as handle:
        cold = [run(model, text) for text in texts]
        for _ in range(2):  # two passes a step, with nothing to tell them apart
            for text, expected in zip(texts, cold, strict=True):
                assert torch.equal(run(model, text), expected)
                assert places(handle.records) == [(0, 1, "")]
                assert len(handle.records) == 3  # a generation of its own: records do not pile up
    assert {found for _, found in method.log} == {None}


def test_a_forward_by_hand_after_a_generation_is_not_a_step_of_it() -> None:
    pipe = pipeline(wan())
    method = Remembering()
    with gs.apply(pipe, sparse(method=method)) as handle:
        run(pipe.transformer, inputs())
        assert places(handle.records) == [(0, 1, "")]
        generate(pipe, steps=3)
        method.log.clear()
        run(pipe.transformer, inputs())
        assert places(handle.records) == [(0, 1, "")]
    assert {found for _, found in method.log} == {None}


class Unnamed:
    """A pipeline that names no pass, starts past the first steps and runs two passes a step."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        self.components = {"transformer": transformer, "scheduler": scheduler}
        self.transformer = transformer
        self.scheduler = scheduler

    def __call__(self, steps: int, skip: int = 0) -> torch.Tensor:
        self.scheduler.set_timesteps(steps)
        latents = inputs()["hidden_states"]
        self.num_timesteps = steps - skip
        for t in self.scheduler.timesteps[skip:]:
            passes = [inputs(seed=seed) | {"hidden_states": latents} for seed in (3, 4)]
            noise = sum(run(self.transformer, arguments) for arguments in passes)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
        self.transformer._reset_stateful_cache()
        return latents


def test_a_pipeline_that_names_no_pass_has_steps_but_no_state() -> None:
    pipe = Unnamed(wan(), pipeline(None).scheduler)
    method = Remembering()
    with gs.apply(pipe, sparse(method=method, dense_steps=(0.25, 0))) as handle:
        first = pipe(6, skip=2)
        assert places(handle.records) == [(s, 4, "") for s in range(4) for _ in range(2)]
        assert {r.step for r in handle.records if r.path == "dense"} == {0}
        assert torch.equal(pipe(6, skip=2), first)
    assert {found for _, found in method.log} == {None}


def test_a_scheduler_that_tells_no_step() -> None:
    pipe = pipeline(wan())
    named = Unnamed(pipe.transformer, DDIMScheduler(clip_sample=False))
    with gs.apply(named, sparse()) as handle:
        named.scheduler.set_timesteps(2)
        named.num_timesteps = 2
        for _ in range(2):
            for branch in ("cond", "uncond"):
                with named.transformer.cache_context(branch):
                    run(named.transformer, inputs())
        assert places(handle.records) == both_passes(2)


def test_records_stay_until_the_next_generation() -> None:
    pipe = pipeline(wan())
    with gs.apply(pipe, sparse()) as handle:
        generate(pipe, steps=2)
        assert places(handle.records) == both_passes(2)
        generate(pipe, steps=1)
        assert places(handle.records) == both_passes(1)


def test_no_state_outlives_the_generation() -> None:
    pipe = pipeline(wan())
    with collecting(pipe, sparse(method=STATEFUL[0])) as (handle, _):
        generate(pipe, steps=2)
        assert not handle.session._states
