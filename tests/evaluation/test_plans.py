"""The observer: pictures of plans and errors against dense attention."""

from __future__ import annotations

import pytest
import torch

import gossamer as gs
from evaluation.fake_pipeline import TOKENS, apply_fake, topk
from gossamer.evaluation import generation as generation_module
from gossamer.evaluation import plans
from gossamer.evaluation.generation import generate
from gossamer.evaluation.plans import PlanObserver, coarse_mask, observer_for, relative_error
from gossamer.evaluation.variants import dense_variant


def brute_force_error(q, k, v, out):
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    dense = scores.softmax(-1) @ v.double()
    return ((out.double() - dense).norm() / dense.norm()).item()


def tensors(tokens=130, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(3))


def test_relative_error_is_the_textbook_one():
    q, k, v = tensors()
    out = gs.sparse_attention(q, k, v, gs.get_method("block-topk", density=0.5), gs.Call())
    expected = brute_force_error(q, k, v, out)
    assert relative_error(q, k, v, out, gs.Call()) == pytest.approx(expected, rel=1e-6)


def test_relative_error_of_many_rows_is_measured_on_some():
    q, k, v = tensors(1100)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    noise = 0.1 * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    expected = brute_force_error(q, k, v, out + noise)
    assert relative_error(q, k, v, out + noise, gs.Call()) == pytest.approx(expected, rel=0.1)


def test_the_yardstick_is_not_another_low_precision_run():
    """Both bfloat16 results are near the truth, so the reported error is near dense's own."""
    q, k, v = (5 * tensor.bfloat16() for tensor in tensors(256))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert relative_error(q, k, v, dense, gs.Call()) <= brute_force_error(q, k, v, dense) * 1.01


def test_relative_error_under_a_causal_mask():
    q, k, v = tensors()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative_error(q, k, v, dense, gs.Call(causal=True)) < 1e-5


def test_coarse_mask_is_the_share_of_pairs_in_each_square():
    weights = torch.zeros(8, 12)
    weights[:4, :6] = 2.0
    weights[4, 6] = 0.1
    assert coarse_mask(weights, side=2).tolist() == [[1.0, 0.0], [0.0, pytest.approx(1 / 24)]]
    assert coarse_mask(weights).shape == (8, 12)


def test_only_the_chosen_calls_of_one_branch_are_watched(pipe, settings):
    observer = PlanObserver(mask_steps=(1,), error_steps=(1, 3), mask_heads=(0, 5))
    recipe = topk(0.3).recipe
    generate(pipe, "x", recipe, settings, seed=0, observer=observer)
    assert set(observer.errors) == {(step, layer, "cond") for step in (1, 3) for layer in (0, 1)}
    assert all(0 < error < 1 for error in observer.errors.values())
    shown = {(mask["step"], mask["layer"], mask["head"]) for mask in observer.masks}
    assert shown == {(1, 0, 0), (1, 1, 0)}  # there is no head 5
    for mask in observer.masks:
        assert mask["density"] == pytest.approx(0.3, abs=0.05)
        mean = torch.tensor(mask["mask"]).mean().item()
        assert mean == pytest.approx(mask["density"], abs=1e-3)


def test_sequences_that_are_too_long_are_not_drawn(pipe, settings, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PAIRS", TOKENS**2 - 1)
    observer = observer_for(settings.steps)
    recipe = topk(0.3).recipe
    generate(pipe, "x", recipe, settings, seed=0, observer=observer)
    assert observer.masks == []
    assert observer.errors


@pytest.mark.parametrize("steps", [1, 2, 4, 50])
def test_the_chosen_steps_exist(steps):
    observer = observer_for(steps)
    assert all(0 <= step < steps for step in (*observer.mask_steps, *observer.error_steps))


def test_the_observers_time_is_not_the_methods(pipe, settings, monkeypatch):
    """A clock that ticks a second per look: the observer's two looks a call count as its own."""
    monkeypatch.setattr(gs, "apply", apply_fake)
    observer = PlanObserver()
    clock = iter(range(10_000))
    monkeypatch.setattr(plans.time, "perf_counter", lambda: float(next(clock)))
    assert generation_module.time is plans.time
    recipe = dense_variant().recipe
    generation = generate(pipe, "x", recipe, settings, seed=0, observer=observer)
    calls = len(generation.records)
    assert observer.seconds == calls
    assert generation.total_ms > 0
