"""Top-k, mass and the sampler's probabilities."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.group import Sorted
from gossamer.select import (
    inclusion_by_importance,
    inclusion_uniform,
    list_draws,
    list_keys,
    systematic,
    take_clusters,
    top_blocks,
    top_mass,
)


def scores(seed: int, rows: int, columns: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(1, 1, rows, columns, generator=torch.Generator().manual_seed(seed))


def test_causal_rows_choose_among_what_they_see() -> None:
    """Row i keeps min(3, i + 1) blocks (MInference #108)."""
    visible = torch.ones(8, 8).tril().bool()
    kept = top_blocks(scores(0, 8, 8).masked_fill(~visible, -torch.inf), torch.full((1, 1, 8), 3))
    assert kept.sum(-1).flatten().tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert not (kept & ~visible).any()


def test_each_row_gets_its_own_blocks() -> None:
    """A flattened top-k would leave six of these rows empty (FlashVSR #42)."""
    biased = scores(0, 8, 8) + 3.0 * torch.arange(8)[:, None]
    assert (top_blocks(biased, torch.full((1, 1, 8), 2)).sum(-1) == 2).all()


def test_more_blocks_than_there_are() -> None:
    assert top_blocks(scores(0, 2, 3), torch.full((1, 1, 2), 16)).all()


def test_forced_blocks_are_paid_from_the_budget() -> None:
    forced = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    forced[..., [0, 4]] = True
    assert torch.equal(top_blocks(scores(0, 1, 5), torch.tensor([[[2]]]), forced=forced), forced)


def test_ties_go_to_the_lower_index() -> None:
    kept = top_blocks(torch.zeros(1, 1, 1, 6), torch.tensor([[[2]]]))
    assert kept.flatten().tolist() == [True, True, False, False, False, False]


@given(st.integers(0, 999), st.integers(1, 30), st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]))
def test_mass_is_the_smallest_set_that_reaches_it(seed: int, columns: int, mass: float) -> None:
    log_mass = scores(seed, 3, columns)
    kept = top_mass(log_mass, mass)
    share = torch.softmax(log_mass.double(), -1)
    for row in range(3):
        chosen = share[0, 0, row][kept[0, 0, row]].sort().values
        assert chosen.sum() >= mass - 1e-6  # the crossing column is in
        assert len(chosen) == 1 or mass == 1.0 or chosen[1:].sum() < mass + 1e-6


def test_mass_keeps_a_minimum_and_never_the_impossible() -> None:
    log_mass = torch.tensor([[[[9.0, 0.0, -1.0, -torch.inf]]]])
    kept = top_mass(log_mass, 0.5, at_least=torch.tensor([[[3]]]))
    assert kept.flatten().tolist() == [True, True, True, False]
    assert not top_mass(torch.full((1, 1, 1, 3), -torch.inf), 0.5).any()


def test_clusters_are_taken_whole_and_the_crossing_one_as_asked() -> None:
    order = torch.tensor([[[[3.0, 2.0, 1.0, 0.0]]]])
    sizes = torch.tensor([[[[4, 5, 0, 6]]]])
    budget = torch.tensor([[[7]]])
    for crossing, want in {
        "exclude": [4, 0, 0, 0],
        "include": [4, 5, 0, 0],
        "cut": [4, 3, 0, 0],
    }.items():
        assert take_clusters(order, sizes, budget, crossing=crossing).flatten().tolist() == want


def brute_force_pi(score: list[float], size: list[int], certain: list[bool], m: int) -> list[float]:
    """Solve sum(min(1, lambda * s)) = m by bisection on log lambda, key by key."""
    keys = [s for s, n, c in zip(score, size, certain, strict=True) for _ in range(n) if not c]
    values = torch.tensor(keys, dtype=torch.float64)
    low, high = -200.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        total = (values + middle).clamp(max=0).exp().sum()
        low, high = (middle, high) if total < m else (low, middle)
    return [min(0.0, s + high) for s in score]


@given(st.data(), st.integers(1, 12), st.integers(0, 999))
def test_importance_probabilities_are_the_exact_solution(
    data: st.DataObject, clusters: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    size = torch.randint(0, 9, (clusters,), generator=g)
    certain = torch.rand(clusters, generator=g) < 0.2
    rest = int(size[~certain].sum())
    budget = data.draw(st.integers(0, rest))
    score = data.draw(st.sampled_from([0.5, 5.0, 40.0])) * torch.randn(clusters, generator=g)
    log_pi = inclusion_by_importance(
        score.view(1, 1, 1, -1),
        size.view(1, 1, 1, -1),
        certain.view(1, 1, 1, -1),
        torch.tensor([[[budget]]]),
    ).flatten()
    drawn = ~certain & (size > 0)
    assert torch.equal(
        log_pi[certain & (size > 0)].exp(),
        torch.ones(int((certain & (size > 0)).sum()), dtype=torch.float64),
    )
    assert (log_pi <= 0).all()
    total = (log_pi.exp() * size)[drawn].sum()
    assert float(total) == pytest.approx(budget, abs=1e-9)
    if 0 < budget < rest:
        want = brute_force_pi(score.tolist(), size.tolist(), certain.tolist(), budget)
        torch.testing.assert_close(
            log_pi[drawn], torch.tensor(want, dtype=torch.float64)[drawn], rtol=1e-9, atol=1e-9
        )


def test_a_cluster_that_holds_the_whole_budget_is_read_whatever_rounding_says() -> None:
    """All others lie so far below that its log lambda + log s may round to above 0."""
    for seed in range(50):
        best = float(3 * torch.randn((), generator=torch.Generator().manual_seed(seed)))
        score = torch.tensor([[[[best, best - 60, best - 90]]]])
        size = torch.tensor([[[[seed + 1, 7, 9]]]])
        none = torch.zeros(1, 1, 1, 3, dtype=torch.bool)
        log_pi = inclusion_by_importance(score, size, none, torch.tensor([[[seed + 1]]]))
        assert float(log_pi[0, 0, 0, 0]) == pytest.approx(0, abs=1e-12)


def test_a_spread_of_logits_zeroes_no_cluster() -> None:
    """In float32 with a subtracted maximum, half of these would have probability 0."""
    score = torch.linspace(0, -300, 50).view(1, 1, 1, -1)
    size = torch.full((1, 1, 1, 50), 10)
    none = torch.zeros(1, 1, 1, 50, dtype=torch.bool)
    log_pi = inclusion_by_importance(score, size, none, torch.tensor([[[30]]]))
    assert log_pi.isfinite().all()
    assert float((log_pi.exp() * size).sum()) == pytest.approx(30, abs=1e-9)


def test_uniform_probabilities() -> None:
    size = torch.tensor([[[[3, 0, 4, 5]]]])
    certain = torch.tensor([[[[True, False, False, False]]]])
    log_pi = inclusion_uniform(size, certain, torch.tensor([[[3]]]))
    torch.testing.assert_close(log_pi.exp().flatten(), torch.tensor([1, 0, 1 / 3, 1 / 3]).double())


def sorted_keys(sizes: list[int], seed: int = 0) -> Sorted:
    """Return keys in random clusters of these sizes."""
    size = torch.tensor([[sizes]])
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed))
    start = size.cumsum(-1) - size
    for c in range(len(sizes)):  # within a cluster, keys stand in their own order
        part = slice(int(start[0, 0, c]), int(start[0, 0, c] + size[0, 0, c]))
        order[part] = order[part].sort().values
    return Sorted(order[None, None], start, size)


@given(st.integers(0, 999), st.integers(1, 8))
def test_systematic_sampling_draws_exactly_its_budget(seed: int, clusters: int) -> None:
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 12, (clusters,), generator=g).tolist()
    if sum(sizes) == 0:
        sizes[0] = 1
    keys = sorted_keys(sizes, seed)
    budget = int(torch.randint(0, sum(sizes) + 1, (), generator=g))
    none = torch.zeros(1, 1, 1, clusters, dtype=torch.bool)
    score = 4 * torch.randn(1, 1, 1, clusters, generator=g)
    log_pi = inclusion_by_importance(score, keys.size[:, :, None], none, torch.tensor([[[budget]]]))
    for phase in (0.0, 0.25, 1 - 2.0**-32):
        draws = systematic(
            log_pi, keys.size[:, :, None], torch.full((1, 1, 1), phase, dtype=torch.float64)
        )
        listed = list_draws(draws, keys, width=max(budget, 1))
        assert listed.count.item() == budget
        index = listed.index[:budget]
        assert torch.equal(index, index.unique())  # ascending, without repeats
        label = torch.empty(sum(sizes), dtype=torch.int64)
        label[keys.order[0, 0]] = torch.arange(clusters).repeat_interleave(torch.tensor(sizes))
        want = -log_pi[0, 0, 0][label[index.long()]]
        torch.testing.assert_close(listed.log_weight[:budget].double(), want, rtol=1e-6, atol=1e-6)


def inclusion_lengths(log_pi: torch.Tensor, keys: Sorted, width: int) -> torch.Tensor:
    """Integrate over the phase: the length of [0, 1) in which each key is read.

    The set read changes only where phase + i meets a running sum of pi, so reading it once between
    every two such points is exact.
    """
    sizes = keys.size[:, :, None]
    pi = log_pi[0, 0, 0].exp().masked_fill(log_pi[0, 0, 0] >= -1e-9, 0.0)
    edges = torch.cat(
        [p.expand(n) for p, n in zip(pi, keys.size[0, 0].tolist(), strict=True)]
    ).cumsum(0)
    edges = torch.cat([torch.tensor([0.0, 1.0]).double(), edges.remainder(1.0)]).unique()
    length = torch.zeros(keys.order.shape[-1], dtype=torch.float64)
    for low, high in pairwise(edges):
        if high - low < 1e-12:
            continue
        phase = ((low + high) / 2).view(1, 1, 1)
        listed = list_draws(systematic(log_pi, sizes, phase), keys, width=width)
        length[listed.index[: listed.count.item()].long()] += high - low
    return length


@pytest.mark.parametrize("sampler", ["importance", "uniform"])
@pytest.mark.parametrize("seed", range(4))
def test_inclusion_lengths_equal_pi(sampler: str, seed: int) -> None:
    """Deterministic: each key is read for exactly pi of all phases, in float64."""
    g = torch.Generator().manual_seed(seed)
    sizes = [int(n) for n in torch.randint(0, 15, (9,), generator=g)] + [3]
    keys = sorted_keys(sizes, seed)
    certain = torch.zeros(1, 1, 1, 10, dtype=torch.bool)
    certain[..., seed] = True
    rest = sum(sizes) - sizes[seed]
    budget = torch.tensor([[[rest // 3]]])
    if sampler == "importance":
        score = 2 * torch.randn(1, 1, 1, 10, generator=g)
        log_pi = inclusion_by_importance(score, keys.size[:, :, None], certain, budget)
    else:
        log_pi = inclusion_uniform(keys.size[:, :, None], certain, budget)
    length = inclusion_lengths(log_pi, keys, width=sum(sizes))
    want = torch.empty(sum(sizes), dtype=torch.float64)
    want[keys.order[0, 0]] = log_pi[0, 0, 0].exp().repeat_interleave(torch.tensor(sizes))
    torch.testing.assert_close(length, want, rtol=0, atol=1e-9)


def test_lists_are_packed_without_slack_or_laid_out_with_it() -> None:
    keys = sorted_keys([2, 3, 1])
    taken = torch.tensor([[[[2, 0, 0], [0, 3, 1], [0, 0, 0]]]])
    packed = list_keys(taken, keys)
    assert packed.start.flatten().tolist() == [0, 2, 6]
    assert packed.index.numel() == 6
    roomy = list_keys(taken, keys, width=5)
    assert roomy.start.flatten().tolist() == [0, 5, 10]
    for r, count in enumerate([2, 4, 0]):
        a = packed.index[packed.start[0, 0, r] :][:count]
        b = roomy.index[roomy.start[0, 0, r] :][:count]
        assert torch.equal(a, b)
        slack = roomy.index[roomy.start[0, 0, r] + count : roomy.start[0, 0, r] + 5]
        assert count == 0 or set(slack.tolist()) <= set(b.tolist())


def test_chunks_change_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.select import lists

    keys = sorted_keys([2, 3, 1, 9, 4])
    taken = torch.stack([keys.size[0, 0] * (torch.rand(5) < 0.5) for _ in range(20)])[None, None]
    whole = list_keys(taken, keys)
    monkeypatch.setattr(lists, "_CHUNK_BYTES", 8 * 30)
    assert torch.equal(list_keys(taken, keys).index, whole.index)
