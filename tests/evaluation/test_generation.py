"""One generation: what the pipeline is asked, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from evaluation.fake_pipeline import topk
from gossamer.evaluation.generation import Generation, generate
from gossamer.evaluation.variants import dense_variant


def record(step, path, kernel="cpu"):
    return SimpleNamespace(step=step, path=path, kernel=kernel)


def made_of(records):
    return Generation(frames=torch.zeros(0), records=records, summary={}, total_ms=0.0)


def test_the_seed_decides_the_video(pipe, settings):
    recipe = dense_variant().recipe
    first, again, other = (
        generate(pipe, "x", recipe, settings, seed=seed).frames for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_global_random_state_is_left_alone(pipe, settings):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    generate(pipe, "x", topk(0.3).recipe, settings, seed=1)
    assert torch.equal(torch.rand(1), expected)


def test_the_pipeline_is_left_as_it_was_found(pipe, settings):
    generate(pipe, "x", dense_variant().recipe, settings, seed=0)
    assert pipe.session is None
    pipe.fail_at = {1: ValueError("no")}
    with pytest.raises(ValueError, match="no"):
        generate(pipe, "x", dense_variant().recipe, settings, seed=0)
    assert pipe.session is None


def test_steps_are_reported(pipe, settings):
    steps = []
    generate(pipe, "x", dense_variant().recipe, settings, seed=0, on_step=steps.append)
    assert steps == [1, 2, 3, 4]


def test_a_pipeline_without_the_callback_still_runs(pipe, settings):
    class Plain:
        session = None

        def __call__(self, *, prompt, height, width, num_frames, **rest):
            pipe.session = self.session
            rest = {key: rest[key] for key in ("num_inference_steps", "generator")}
            size = {"height": height, "width": width, "num_frames": num_frames}
            return pipe(prompt=prompt, **size, **rest)

    steps = []
    recipe = dense_variant().recipe
    generation = generate(Plain(), "x", recipe, settings, seed=0, on_step=steps.append)
    assert steps == []
    assert generation.frames.shape == (4, 32, 32, 3)


def test_a_step_is_dense_if_every_call_of_it_is():
    records = [
        record(0, "dense"),
        record(0, "dense"),
        record(1, "dense"),
        record(1, "sparse"),
        record(2, "reuse"),
        record(3, "dense"),
    ]
    assert made_of(records).dense_steps == 2


def test_the_kernel_is_that_of_the_sparse_calls():
    dense = [record(0, "dense", "sdpa")] * 3
    assert made_of([*dense, record(1, "sparse", "cpu")]).kernel == "cpu"
    assert made_of(dense).kernel == "sdpa"
    assert made_of([]).kernel == ""
