"""Poisson sampling and draws with replacement: inclusion in closed form, sizes, full budgets."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer as gs
from gossamer.counter import uniform
from gossamer.group import Draw, Sorted, sort_by_group
from gossamer.select import inclusion_by_importance
from gossamer.select.lists import list_trials
from gossamer.select.trials import Trials, expected_distinct, poisson, with_replacement
from gossamer.testing import Shape, assert_matches, attention, tolerance

DRAW = Draw(seed=3, layer=1, step=2, heads=torch.arange(64), salt=2)


@dataclass(frozen=True, eq=False)
class AtMidpoints(Trials):
    """Throws one point in each row: row r of R at the middle of the r-th of R equal pieces."""

    def throws(self, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        """Return the points."""
        at = (row + 0.5) / self.taken.shape[2]
        return (at + 0 * (head + place)).double()


def problem(seed: int, num_rows: int, budget_share: float) -> tuple[Tensor, Sorted]:
    """Return log pi [1, 1, num_rows, C], the same in each row, and keys in random clusters."""
    g = torch.Generator().manual_seed(seed)
    keys = sort_by_group(torch.randint(9, (1, 1, 70), generator=g), 10)  # the last is empty
    score = 1.5 * torch.randn(1, 1, 1, 10, generator=g)
    sizes = keys.size[:, :, None]
    certain = (torch.arange(10) == seed % 9) | (sizes == 0)
    rest = 70 - keys.size[0, 0, seed % 9]
    log_pi = inclusion_by_importance(
        score, sizes, certain, (rest * budget_share).round().long().view(1, 1, 1)
    )
    return log_pi.expand(1, 1, num_rows, 10), keys


def per_key(x: Tensor, keys: Sorted) -> Tensor:
    """Spread cluster numbers [C] over the keys [S] in their own order."""
    spread = torch.empty(keys.order.shape[2], dtype=x.dtype)
    spread[keys.order[0, 0]] = x.repeat_interleave(keys.size[0, 0])
    return spread


def reads(listed: gs.KeyTokens, num_keys: int) -> Tensor:
    """Return how often each key is read, [R, S] weights (0: not)."""
    assert listed.log_weight is not None
    start, count = listed.start.flatten(), listed.count.flatten()
    row = torch.arange(len(start)).repeat_interleave(count)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    at = start[row] + place
    index = listed.index[at].long()
    rising = (index[1:] > index[:-1]) | (row[1:] > row[:-1])
    assert bool(rising.all())  # ascending in each row, without repeats
    weights = torch.zeros(len(start), num_keys, dtype=torch.float64)
    weights[row, index] = listed.log_weight[at].double().exp()
    return weights


@pytest.mark.parametrize("kind", [poisson, with_replacement])
@pytest.mark.parametrize("seed", range(3))
def test_a_throw_hits_each_key_with_its_share_of_the_axis(kind: object, seed: int) -> None:
    """Deterministic: a key's length on the axis is what its inclusion probability is made from."""
    num_rows = 4_000
    log_pi, keys = problem(seed, num_rows, 0.3)
    sizes = keys.size[:, :, None]
    trials = kind(log_pi, sizes, DRAW)  # type: ignore[operator]
    fields = {**vars(trials), "taken": torch.zeros_like(trials.taken)}
    fields["count"] = torch.ones_like(trials.count)
    hit = (reads(list_trials(AtMidpoints(**fields), keys), 70) > 0).double().mean(0)
    unit = per_key(trials.unit[0, 0, 0], keys)
    assert float(unit.sum()) > 0
    torch.testing.assert_close(hit, unit / unit.sum(), rtol=0, atol=1.01 / num_rows)


@pytest.mark.parametrize("seed", range(3))
def test_poisson_inclusion_in_closed_form(seed: int) -> None:
    """No point of a Poisson number lies in a key with probability exp(-length) = 1 - pi."""
    log_pi, keys = problem(seed, 1, 0.4)
    trials = poisson(log_pi, keys.size[:, :, None], DRAW)
    singly = trials.taken > 0
    included = torch.where(singly, trials.log_keep.exp(), -torch.expm1(-trials.unit))
    filled = (keys.size[:, :, None] > 0).expand_as(log_pi)
    torch.testing.assert_close(included[filled], log_pi.exp()[filled], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(trials.log_weight[filled], -log_pi[filled], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("pi", [0.01, 0.3, 0.5])
@pytest.mark.parametrize("size", [1, 70, 9000])
def test_the_number_of_throws_is_poisson(pi: float, size: int) -> None:
    """Each row's number is where the distribution function passes that row's uniform number."""
    num_rows = 300
    log_pi = torch.full((1, 1, num_rows, 1), pi, dtype=torch.float64).log()
    trials = poisson(log_pi, torch.full((1, 1, 1, 1), size), DRAW)
    mean = -size * math.log1p(-pi)
    n = torch.arange(int(mean + 12 * mean**0.5 + 40), dtype=torch.float64)
    distribution = (n * math.log(mean) - mean - (n + 1).lgamma()).exp().cumsum(0)
    at = uniform(2, 3, 1, 2, 0, torch.arange(num_rows), 2, 0, device=torch.device("cpu"))
    assert torch.equal(trials.count[0, 0], torch.searchsorted(distribution, at, right=True))


def test_poisson_keys_are_independent_and_their_number_has_the_stated_spread() -> None:
    """Over 4000 rows: pair products and the variance of the size, at 4 standard errors."""
    num_rows = 4000
    log_pi, keys = problem(1, num_rows, 0.45)
    read = reads(list_trials(poisson(log_pi, keys.size[:, :, None], DRAW), keys), 70) > 0
    pi = per_key(log_pi[0, 0, 0].exp(), keys)
    assert bool(read[:, pi == 1].all())
    error = (read.double() - pi) / (pi * (1 - pi)).sqrt().clamp(min=1e-9)
    error = error[:, pi < 1]
    z = error.mean(0) * num_rows**0.5
    assert float(z.square().mean()) < 1 + 4 * (2 / len(z)) ** 0.5
    pairs = (error.mT @ error / num_rows**0.5)[*torch.triu_indices(len(z), len(z), 1)]
    assert float(pairs.square().mean()) < 1 + 4 * (2 / len(z)) ** 0.5
    variance = (pi * (1 - pi)).sum()
    size = read.double().sum(1)
    assert float(size.var() / variance) == pytest.approx(1, abs=4 * (2 / num_rows) ** 0.5)
    assert float(size.mean()) == pytest.approx(
        float(pi.sum()), abs=4 * float(variance / num_rows) ** 0.5
    )


def test_repeats_are_merged_with_their_number() -> None:
    """Weights are n / (m p), and n sums to the draws: checked on the draws themselves."""
    log_pi, keys = problem(2, 300, 0.6)
    sizes = keys.size[:, :, None]
    trials = with_replacement(log_pi, sizes, DRAW)
    weights = reads(list_trials(trials, keys), 70)
    p, pi = per_key(trials.unit[0, 0, 0], keys), per_key(log_pi[0, 0, 0].exp(), keys)
    assert bool((weights[:, pi == 1] == 1).all())
    hits = (weights * trials.count[0, 0, :, None] * p)[:, pi < 1]
    torch.testing.assert_close(hits, hits.round(), rtol=0, atol=1e-4)  # float32 log weights
    assert torch.equal(hits.round().sum(1).long(), trials.count[0, 0])
    assert float(hits.max()) > 1.5


@given(st.integers(0, 200), st.sampled_from([0.02, 0.2, 0.5, 0.9, 0.98, 1.0]))
def test_the_draws_with_replacement_are_the_fewest_that_reach_the_budget(
    seed: int, share: float
) -> None:
    log_pi, keys = problem(seed, 1, share)
    sizes = keys.size[:, :, None]
    trials = with_replacement(log_pi, sizes, DRAW)
    p, size, m = trials.unit[0, 0, 0], keys.size[0, 0], trials.count[0, 0, 0]
    pi = log_pi[0, 0, 0].exp()
    wanted = float((pi * size)[pi < 1].sum())
    got = float(expected_distinct(p, size, m))
    if wanted < 0.5:
        assert int(m) == 0
    elif int(m) < 4 * round(wanted):
        assert got >= wanted - 1e-5
        assert float(expected_distinct(p, size, m - 1)) < wanted
    assert got >= wanted - math.exp(-4) * float(size[(pi < 1) & (pi > 0)].sum()) - 1e-9


@pytest.mark.parametrize("sampler", ["poisson", "replacement"])
@pytest.mark.parametrize("num_tokens", [2048, 4097])
def test_law_5_the_asked_density_is_met(sampler: str, num_tokens: int) -> None:
    """Within .02; Poisson's standard deviation per row is at most sqrt(m_S) / S = .009 here."""
    q, k, v = Shape(1, 2, 1, num_tokens, num_tokens, 16, 1).tensors()
    for density in (0.03, 0.1, 0.3, 0.6, 0.95, 1.0):
        method = gs.InstaGen(density=density, sampler=sampler, iterations=3)
        plan = method.plan(q, k, v)
        plan.validate()
        assert abs(plan.density - density) <= 0.02
        if sampler == "poisson":
            spread = (density * num_tokens / 2) ** 0.5 / num_tokens
            rows = plan.keys.count.double() / num_tokens
            assert float((rows - density).abs().max()) <= max(5 * spread, 0.02)


@pytest.mark.parametrize("sampler", ["poisson", "replacement"])
@given(st.integers(1, 300), st.integers(0, 50), st.booleans())
def test_no_row_is_empty(sampler: str, length: int, seed: int, padded: bool) -> None:
    q, k, v = Shape(2, 1, 2, length, length, 8, seed).tensors()
    valid = torch.arange(length) < torch.tensor([[length], [max(1, length // 3)]])
    call = gs.Call(seed=seed, key_valid=valid if padded else None)
    plan = gs.InstaGen(exact=0.0, sampled=0.02, sampler=sampler, iterations=2).plan(q, k, v, call)
    plan.validate()
    assert (plan.keys.count >= 1).all()


def test_poisson_forces_one_cluster_where_the_exact_set_is_empty() -> None:
    q, k, v = Shape(1, 1, 1, 512, 512, 16, 1).tensors()
    plan = gs.InstaGen(exact=0.0, sampled=0.2, sampler="poisson").plan(q, k, v)
    assert ((plan.weights() == 1).sum(-1) >= 1).all()
    plan = gs.InstaGen(exact=0.0, sampled=0.2, sampler="replacement").plan(q, k, v)
    assert not ((plan.weights() == 1).sum(-1) >= 1).all()


@pytest.mark.parametrize("sampler", ["poisson", "replacement"])
@pytest.mark.parametrize(
    "shares", [{"density": 1.0}, {"exact": 0.0, "sampled": 1.0}, {"exact": 0.7, "sampled": 0.3}]
)
def test_a_full_budget_is_dense(sampler: str, shares: dict[str, float]) -> None:
    """With replacement too: all keys are read where the budget covers the residual."""
    q, k, v = Shape(2, 2, 2, 333, 333, 16, 2).tensors()
    plan = gs.InstaGen(sampler=sampler, **shares).plan(q, k, v)
    assert plan.density == 1.0
    assert bool((plan.weights() == 1).all())
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_trials_cut_nothing_off_and_slack_repeats_a_listed_key() -> None:
    log_pi, keys = problem(0, 200, 0.5)
    trials = poisson(log_pi, keys.size[:, :, None], DRAW)
    listed = list_trials(trials, keys)
    room = listed.index.numel() // 200
    assert room == int((trials.taken.sum(-1) + trials.count).max())
    slack = listed.index.view(200, room)[0, int(listed.count[0, 0, 0]) :]
    assert set(slack.tolist()) == {int(listed.index[int(listed.count[0, 0, 0]) - 1])}
    none = replace(trials, taken=torch.zeros_like(trials.taken), count=trials.count * 0)
    assert int(list_trials(none, keys).count.sum()) == 0
