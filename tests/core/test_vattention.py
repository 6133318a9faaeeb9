"""vAttention against its definition; unbiasedness; the error bound at its rate."""

import math
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer as gs
from cases import shapes
from gossamer.group import Clusters, ClusterSettings
from gossamer.group.pairs import cluster_queries
from gossamer.methods.vattention import VAttention
from gossamer.testing import Shape, assert_matches, attention, tolerance

SHAPES = [
    Shape(1, 2, 1, 200, 200, 16, 1),
    Shape(2, 1, 3, 70, 211, 20, 2),
    Shape(1, 1, 1, 90, 50, 8, 4),
    Shape(2, 2, 2, 150, 150, 8, 3),
]


def groups_of(method: VAttention, q: Tensor, num_keys: int, call: gs.Call) -> Clusters:
    settings = ClusterSettings(
        query_clusters=method.query_clusters,
        key_clusters=None,
        iterations=method.iterations,
        warm_iterations=method.warm_iterations,
    )
    return cluster_queries(q, num_keys, call, settings, None)


def exact_by_loops(
    method: VAttention, queries: Clusters, k: Tensor, at: tuple[int, int, int, int], valid: Tensor
) -> set[int]:
    """The exact keys of group (b, h, g), h of `group` query heads per KV head."""
    b, h, g, group = at
    num_keys, num_queries = k.shape[2], queries.labels.shape[2]
    keys = [j for j in range(num_keys) if valid[b, j]]
    share = method.exact
    if share is None:
        share = 0.05 if method.density is None else method.density / 2
    budget = min(round(len(keys) * share), len(keys))
    logits = (k[b, h // group] @ queries.centroids[b, h, g]).tolist()
    best = sorted(keys, key=lambda j: (-logits[j], j))
    forced = set(keys[: method.sink_keys])
    if method.local is not None:
        for i in range(num_queries):
            if num_queries == num_keys and not valid[b, i]:
                continue
            if int(queries.labels[b, h, i]) == g:
                p = i + num_keys - num_queries
                forced |= {j for j in keys if abs(p - j) <= method.local}
    kept = [j for j in best if j in forced][: budget // 2]
    others = [j for j in best if j not in kept][: budget - len(kept)]
    return set(kept) | set(others)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"density": 0.3},
        {"density": 0.6, "exact": 0.5, "sink_keys": 0, "local": None},
        {"density": 0.4, "exact": 0.2, "sink_keys": 5, "local": 2},
        {"density": 0.2, "exact": 0.0},
    ],
    ids=str,
)
def test_the_plan_is_the_definition(
    shape: Shape, padded: bool, params: dict[str, float | None]
) -> None:
    """The exact keys weigh 1; of n_R others exactly n weigh n_R / n."""
    q, k, v = shape.tensors()
    valid = torch.ones(shape.batch, shape.num_keys, dtype=torch.bool)
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.8
        k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    call = gs.Call(key_valid=valid if padded else None)
    method = VAttention(query_clusters=4, iterations=4, **params)  # type: ignore[arg-type]
    plan = method.plan(q, k, v, call)
    plan.validate()
    weights = plan.weights()
    queries = groups_of(method, q, shape.num_keys, call)
    for b in range(shape.batch):
        number = int(valid[b].sum())
        for h in range(shape.heads):
            for g in range(4):
                exact = exact_by_loops(method, queries, k, (b, h, g, shape.group), valid)
                sampled = max(round(number * method.density), 1) - len(exact)
                rest = number - len(exact)
                of = queries.labels[b, h] == g
                if padded and shape.num_queries == shape.num_keys:
                    of = of & valid[b]
                for row in weights[b, h][of]:
                    ones = torch.zeros(shape.num_keys, dtype=torch.bool)
                    ones[list(exact)] = True
                    assert bool((row[ones] == 1).all())
                    read = row[~ones][row[~ones] > 0]
                    assert len(read) == sampled
                    want = torch.full_like(read, rest / max(sampled, 1))
                    torch.testing.assert_close(read, want, rtol=1e-6, atol=0)
                    assert not row[~valid[b]].any()


# Two-sided t with 199 degrees of freedom: false alarm 5e-4 for each of two statistics. Seeds are
# fixed, so a red test is a change, not luck.
ALARM = 3.54


@pytest.mark.parametrize("params", [{"density": 0.25}, {"epsilon": 0.2, "base": 0.05}], ids=str)
def test_law_8_weighted_sums_are_unbiased(params: dict[str, float]) -> None:
    """With the pilot too: the sample is drawn apart from it."""
    q, k, v = Shape(1, 2, 1, 160, 160, 16, 6).tensors()
    e = (q @ k.mT * 0.25).double().exp()
    full = torch.cat([e @ v.double(), e.sum(-1, keepdim=True)], -1)
    g = torch.Generator().manual_seed(11)
    signs = torch.randint(2, full[..., :-1].shape, generator=g) * 2.0 - 1
    numbers = []
    for seed in range(200):
        plan = VAttention(iterations=2, **params).plan(q, k, v, gs.Call(seed=seed))
        estimate = e * plan.weights().double()
        error = torch.cat([estimate @ v.double(), estimate.sum(-1, keepdim=True)], -1) - full
        error = error / full[..., -1:]
        numbers.append(torch.stack([error[..., -1].mean(), (error[..., :-1] * signs).mean()]))
    t = torch.stack(numbers)
    assert float((t.mean(0) / (t.std(0) / 200**0.5)).abs().max()) < ALARM


def test_every_other_key_is_sampled_equally_often() -> None:
    """Over 100 seeds of 16 heads: each key's share is n / n_R, at 4 standard errors in the mean."""
    q, k, v = Shape(1, 16, 1, 40, 120, 8, 2).tensors()
    method = VAttention(
        density=0.3, exact=0.1, sink_keys=0, local=None, query_clusters=1, iterations=1
    )
    read = torch.zeros(16, 120, dtype=torch.float64)
    for seed in range(100):
        read += (method.plan(q, k, v, gs.Call(seed=seed)).weights()[0, :, 0] > 0).double()
    p = 24 / 108
    rest = read < 100  # the twelve exact keys of each head are always read
    assert rest.sum(-1).tolist() == [108] * 16
    z = (read[rest] - 100 * p) / (100 * p * (1 - p)) ** 0.5
    # Without replacement the numbers of one head are tied: one degree of freedom less for each.
    freedom = 16 * 107
    assert float(z.square().sum() / freedom) == pytest.approx(1, abs=4 * (2 / freedom) ** 0.5)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.06, 0.05), (0.04, 0.3)])
def test_the_error_bound_holds_at_its_rate(epsilon: float, delta: float) -> None:
    """Denominators err by more than epsilon in at most a share delta of all cases, not far below.

    Every query is a group of its own, so that no other's need widens its sample, and needs more
    than the pilot. Heads and seeds are independent: the shares of missed queries in each are 160
    independent numbers. One-sided false alarm 1e-3; and at least half of delta is missed, so the
    sample is no larger than it must be.
    """
    q, k, v = Shape(1, 8, 1, 30, 1000, 8, 3).tensors()
    e = ((0.7 * q) @ k.mT * 8**-0.5).double().exp()
    method = VAttention(
        epsilon=epsilon,
        delta=delta,
        base=0.1,
        sink_keys=0,
        local=None,
        query_clusters=30,
        iterations=3,
        tile=8,
    )
    shares = []
    for seed in range(20):
        plan = method.plan(0.7 * q, k, v, gs.Call(seed=seed))
        got = (e * plan.weights().double()).sum(-1)
        miss = (got / e.sum(-1) - 1).abs() > epsilon
        shares.append(miss.double().mean(-1).flatten())
        assert 0.17 < plan.density < 0.6
    share = torch.cat(shares)
    mean, error = float(share.mean()), float(share.std() / len(share) ** 0.5)
    assert mean - 3.09 * error <= delta
    assert mean + 3.09 * error >= delta / 2


def test_the_bound_holds_for_every_query_of_a_group() -> None:
    """The greatest need of a group is drawn: its queries miss less often than delta."""
    q, k, v = Shape(1, 4, 1, 200, 600, 8, 3).tensors()
    e = (q @ k.mT * 8**-0.5).double().exp()
    method = VAttention(epsilon=0.05, delta=0.2, base=0.1, iterations=3)
    misses = []
    for seed in range(10):
        got = (e * method.plan(q, k, v, gs.Call(seed=seed)).weights().double()).sum(-1)
        misses.append(((got / e.sum(-1) - 1).abs() > 0.05).double().mean())
    assert float(torch.stack(misses).mean()) <= 0.2


def test_the_sample_size_is_the_formula() -> None:
    """One query per group, a pilot of every key: n follows from the exact moments."""
    q, k, v = Shape(1, 2, 1, 5, 400, 8, 3).tensors()
    method = VAttention(
        epsilon=0.05, delta=0.2, base=1.0, exact=0.1, query_clusters=5, local=None, sink_keys=0
    )
    chosen = method.plan(q, k, v)
    assert (chosen.weights() == 1).all()  # the pilot's size is the least
    logits = (q @ k.mT * 8**-0.5).double()
    size = torch.tensor([[40]]), torch.tensor([[360]]), torch.tensor([[360]])
    got = method._sample_size(logits[0].float(), *size)
    e = logits[0].exp()
    s, total = e[..., 40:].std(-1), e.sum(-1)
    first = (NormalDist().inv_cdf(0.9) * s * 360 / (0.05 * total)) ** 2
    assert torch.equal(got, (first / (1 + first / 360)).ceil().long())


def test_a_smaller_error_reads_more() -> None:
    q, k, v = Shape(1, 2, 1, 700, 700, 16, 1).tensors()
    got = []
    for epsilon in (1.0, 0.5, 0.3, 0.1, 0.03, 1e-4):
        plan = VAttention(epsilon=epsilon).plan(q, k, v)
        plan.validate()
        got.append(plan.density)
    assert got == sorted(got)
    assert got[0] < 0.15
    assert got[-1] == pytest.approx(1.0, abs=2e-3)


@given(shapes(), st.booleans(), st.integers(0, 3))
def test_error_mode_plans_are_valid(shape: Shape, padded: bool, step: int) -> None:
    q, k, v = shape.tensors()
    valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.6
    if padded:
        q = q.masked_fill(~valid[:, None, :, None], torch.nan) if q.shape[2] == k.shape[2] else q
        k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    call = gs.Call(key_valid=valid if padded else None, step=step)
    plan = VAttention(iterations=2).plan(q, k, v, call)
    plan.validate()
    weights = plan.weights()
    assert weights.isfinite().all()
    if padded:
        assert not (weights > 0).any(1).any(1)[~valid].any()


@pytest.mark.parametrize("num_tokens", [2048, 4097])
def test_law_5_the_asked_density_is_met(num_tokens: int) -> None:
    q, k, v = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
    for density in (0.03, 0.1, 0.5, 1.0):
        plan = VAttention(density=density, iterations=2).plan(q, k, v)
        assert plan.density == pytest.approx(density, abs=1 / num_tokens)


def test_a_full_budget_is_dense() -> None:
    q, k, v = Shape(2, 2, 2, 333, 333, 16, 2).tensors()
    for method in (VAttention(density=1.0), VAttention(exact=1.0), VAttention(base=1.0)):
        plan = method.plan(q, k, v)
        assert plan.density == 1.0
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_the_sample_is_shared_by_batch_rows_and_heads_have_their_own() -> None:
    q, k, v = Shape(1, 1, 1, 200, 200, 16, 2).tensors()
    method = VAttention(density=0.3)
    both = [torch.cat([x, x]) for x in (q, k, v)]
    alone = method.plan(q, k, v).weights()
    assert torch.equal(method.plan(*both).weights(), torch.cat([alone, alone]))
    state: dict[str, Tensor] = {}
    method.plan(q, k, v, state=state)
    warm = [
        VAttention(density=0.3, warm_iterations=1).plan(q, k, v, call, state=dict(state)).weights()
        for call in (gs.Call(), gs.Call(seed=1), gs.Call(step=1), gs.Call(head_offset=3))
    ]
    for i in range(4):
        for j in range(i):
            assert not torch.equal(warm[i], warm[j])


def test_ranks_agree_on_heads() -> None:
    q, k, v = Shape(1, 4, 1, 300, 300, 16, 2).tensors()
    whole = VAttention(density=0.2).plan(q, k, v).weights()
    part = VAttention(density=0.2).plan(q[:, 1:], k[:, 1:], v[:, 1:], gs.Call(head_offset=1))
    torch.testing.assert_close(part.weights(), whole[:, 1:])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"density": 0.0}, "density=0.0 must be a number with 0 < density <= 1"),
        ({"density": 0.1, "exact": 0.2}, "exact=0.2 must be at most density=0.1"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be a number with 0 < epsilon <= 1"),
        ({"delta": 1.0}, "delta=1 bounds nothing"),
        ({"delta": 1e-17}, "delta=1e-17 must be at least 1e-06"),
        ({"epsilon": 1e-300}, "epsilon=1e-300 and delta=0.1 must be at least 1e-06"),
        ({"base": math.inf}, "base=inf must be a number"),
        ({"sink_keys": -1}, "sink_keys=-1 must be an integer >= 0"),
        ({"local": 0.0}, "local=0.0 must be an integer >= 0"),
        ({"sink_keys": None}, "sink_keys=None must be an integer >= 0"),
        ({"tile": 0}, "tile=0 must be an integer >= 1"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.get_method("vattention", **params)
