"""Law 8 on real heads: weighted sums over sampled keys average to the full sums."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gossamer as gs
from gossamer.evaluation.captures import Capture

CAPTURE = Path(__file__).parents[1] / "data/tiny-wan-capture.safetensors"
SEEDS = 200
# One false alarm in 2,000 runs of one sampler's test, were its seeds not fixed.
LIMIT = 3.5

SAMPLERS = {
    "importance": gs.InstaGen(density=0.24),
    "uniform": gs.InstaGen(density=0.24, sampler="uniform"),
    "poisson": gs.InstaGen(density=0.24, sampler="poisson"),
    "replacement": gs.InstaGen(density=0.24, sampler="replacement"),
    "vattention": gs.VAttention(density=0.24),
}


def head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, gs.Call]:
    """Return one captured head in float64 and its call."""
    capture = Capture.open(CAPTURE)
    key = capture.keys[len(capture.keys) // 2]
    q, k, v = (x[None].double() for x in capture.read(key))
    return q, k, v, capture.call(key)


@pytest.mark.parametrize("name", SAMPLERS)
def test_sums_over_the_sample_are_unbiased(name: str) -> None:
    """One pooled statistic: the estimated sums of every 16th query, over their true sums.

    Each seed gives one number, the mean over queries of the estimated softmax denominator relative
    to the true one, and of the numerator along the true output. Its mean over seeds must be 1.
    """
    q, k, v, call = head()
    rows = torch.arange(0, q.shape[2], 16)
    logits = (q[0, 0, rows] @ k[0, 0].mT) * q.shape[-1] ** -0.5
    weight = logits.softmax(-1)  # [R, S], the true share of each key
    exact = weight @ v[0, 0]
    along = (v[0, 0] @ exact.mT).mT / exact.square().sum(-1, keepdim=True)  # [R, S]
    state: dict[str, object] = {}
    SAMPLERS[name].plan(q, k, v, call, state=state)  # clusters that the seed does not move
    found = []
    for seed in range(SEEDS):
        plan = SAMPLERS[name].plan(q, k, v, replace(call, seed=seed), state=dict(state))
        read = plan.weights()[0, 0, rows].double() * weight
        found.append([read.sum(-1).mean(), (read * along).sum(-1).mean()])
    for column in torch.tensor(found, dtype=torch.float64).T:
        statistic = (column.mean() - 1) / (column.std() / math.sqrt(SEEDS))
        assert abs(statistic) < LIMIT, f"mean {column.mean():.4f}, t = {statistic:.2f}"
        assert column.std() > 0
