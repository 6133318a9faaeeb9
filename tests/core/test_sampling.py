"""Law 8: sampling is unbiased, and what InstaGen shares over batch rows and branches."""

import pytest
import torch

import gossamer as gs
from cases import Shape


def clustered(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v with structure: 24 themes, [1, 2, 384, 16]."""
    g = torch.Generator().manual_seed(seed)
    themes = torch.randn(2, 24, 16, generator=g)
    label = torch.randint(24, (2, 384), generator=g)
    values = torch.randn(2, 24, 16, generator=g)
    x, v = (t.gather(1, label[..., None].expand(-1, -1, 16))[None] for t in (themes, values))
    noise = [0.5 * torch.randn(x.shape, generator=g) for _ in range(3)]
    return x + noise[0], x + noise[1], v + noise[2]


def pooled_z(method: gs.Method, seeds: int, *, weighted: bool = True) -> list[float]:
    """Return t statistics of the estimated softmax sums over seeds, denominators and numerators.

    A seed's number is the mean over heads and queries of the relative error of the denominator, or
    a fixed random combination of the numerators' errors. The seeds' numbers are independent, with
    mean 0 if and only if the sums are unbiased (in this combination), whatever their distribution
    within a call: so their mean over its standard error is a t value.
    """
    q, k, v = (x[:, :, ::2] for x in clustered())
    e = (q @ k.mT * 16**-0.5).double().exp()
    full = torch.cat([e @ v.double(), e.sum(-1, keepdim=True)], -1)
    g = torch.Generator().manual_seed(11)
    signs = torch.randint(2, full[..., :-1].shape, generator=g) * 2.0 - 1
    numbers = []
    for seed in range(seeds):
        weights = method.plan(q, k, v, gs.Call(seed=seed)).weights().double()
        weights = weights if weighted else (weights > 0).double()
        estimate = e * weights
        error = torch.cat([estimate @ v.double(), estimate.sum(-1, keepdim=True)], -1) - full
        error = error / full[..., -1:]
        numbers.append(torch.stack([error[..., -1].mean(), (error[..., :-1] * signs).mean()]))
    t = torch.stack(numbers)
    return (t.mean(0) / (t.std(0) / seeds**0.5)).tolist()


SAMPLERS = ["importance", "uniform", "poisson", "replacement"]
# Two-sided t with 199 degrees of freedom: false alarm 5e-4 for each of a method's two statistics,
# 1e-3 together. Seeds are fixed, so a red test is a change, not luck.
ALARM = 3.54


@pytest.mark.parametrize(
    ("sampler", "exact", "sampled"),
    [
        ("importance", 0.1, 0.15),
        ("importance", 0.0, 0.2),
        ("uniform", 0.1, 0.15),
        ("poisson", 0.0, 0.2),  # one cluster is forced
        ("replacement", 0.1, 0.15),
    ],
)
def test_weighted_sums_are_unbiased(sampler: str, exact: float, sampled: float) -> None:
    """Law 8: the mean over 200 seeds of numerator and denominator is the full sum."""
    method = gs.InstaGen(exact=exact, sampled=sampled, sampler=sampler, iterations=2)
    assert max(abs(z) for z in pooled_z(method, 200)) < ALARM


@pytest.mark.parametrize("scorer", ["svoo", "variance"])
def test_any_scorer_is_unbiased(scorer: str) -> None:
    method = gs.InstaGen(density=0.25, scorer=scorer, iterations=2)
    assert max(abs(z) for z in pooled_z(method, 200)) < ALARM


def test_the_statistic_tells_a_biased_sample() -> None:
    """The same keys without their weights are far outside."""
    method = gs.InstaGen(density=0.25, iterations=3)
    assert abs(pooled_z(method, 20, weighted=False)[0]) > 10 * ALARM


def test_importance_beats_uniform_beats_top_k_where_attention_is_spread() -> None:
    """The paper's central claim, on attention of high entropy."""
    q, k, v = (x * s for x, s in zip(clustered(3), (0.7, 0.7, 1.0), strict=True))
    exact = gs.sparse_attention(q, k, v, gs.Dense())

    def error(method: gs.Method) -> float:
        runs = [gs.sparse_attention(q, k, v, method, gs.Call(seed=s)) for s in range(8)]
        return float(torch.stack([(r - exact).norm() / exact.norm() for r in runs]).mean())

    importance = error(gs.InstaGen(density=0.25))
    uniform = error(gs.InstaGen(density=0.25, sampler="uniform"))
    top = error(gs.SVG2(density=0.25))
    assert importance < uniform < top


def test_no_sample_is_top_k() -> None:
    q, k, v = clustered()
    top = gs.SVG2(density=0.3).plan(q, k, v)
    ours = gs.InstaGen(density=0.3, sampled=0.0).plan(q, k, v)
    assert torch.equal(top.weights(), ours.weights())


def test_without_a_sample_the_crossing_cluster_is_included() -> None:
    q, k, v = clustered()
    plan = gs.InstaGen(exact=0.2, sampled=0.0).plan(q, k, v)
    assert (plan.keys.count >= round(0.2 * 384)).all()


def test_row_sizes_are_exact() -> None:
    """What whole clusters leave of the exact budget goes to the sample."""
    q, k, v = clustered()
    plan = gs.InstaGen(exact=0.07, sampled=0.11).plan(q, k, v)
    assert (plan.keys.count == round(0.18 * 384)).all()


def test_exact_and_promoted_keys_weigh_one_and_sampled_keys_more() -> None:
    q, k, v = clustered()
    weights = gs.InstaGen(exact=0.25, sampled=0.1).plan(q, k, v).weights()
    read = weights[weights > 0]
    assert float(read.min()) == 1.0
    assert float((read == 1.0).double().mean()) > 0.3
    assert float(read.max()) > 2.0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_sample_is_shared_by_batch_rows_and_branches(sampler: str) -> None:
    """Batched and separate guidance agree, and their errors cancel in the difference."""
    q, k, v = clustered()
    method = gs.InstaGen(density=0.2, sampler=sampler)
    both = [torch.cat([x, x]) for x in (q, k, v)]
    batched = method.plan(*both, gs.Call(branch="cond_uncond")).weights()
    cond = method.plan(q, k, v, gs.Call(branch="cond")).weights()
    uncond = method.plan(q, k, v, gs.Call(branch="uncond")).weights()
    assert torch.equal(batched[0], batched[1])
    assert torch.equal(cond, uncond)
    assert torch.equal(batched[:1], cond)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}, {"layer": 1}, {"head_offset": 8}])
def test_the_sample_depends_on_seed_step_layer_and_global_head(
    sampler: str, change: dict[str, int]
) -> None:
    q, k, v = clustered()
    state: dict[str, object] = {}
    method = gs.InstaGen(density=0.2, warm_iterations=1, sampler=sampler)
    method.plan(q, k, v, gs.Call(), state=state)
    base = method.plan(q, k, v, gs.Call(), state=dict(state)).weights()
    other = method.plan(q, k, v, gs.Call(**change), state=dict(state)).weights()
    assert not torch.equal(base, other)
    again = method.plan(q, k, v, gs.Call(**change), state=dict(state)).weights()
    assert torch.equal(other, again)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_heads_split_over_ranks_get_the_plans_of_one_rank(sampler: str) -> None:
    q, k, v = Shape(1, 4, 1, 300, 300, 16, 2).tensors()
    method = gs.InstaGen(density=0.2, sampler=sampler)
    whole = method.plan(q, k, v, gs.Call(num_heads=4)).weights()
    for begin, end in ((0, 1), (1, 4)):  # an uneven split
        part = method.plan(
            q[:, begin:end],
            k[:, begin:end],
            v[:, begin:end],
            gs.Call(head_offset=begin, num_heads=4),
        )
        torch.testing.assert_close(part.weights(), whole[:, begin:end])


def test_a_warm_start_uses_the_state_and_another_shape_does_not() -> None:
    q, k, v = clustered()
    state: dict[str, torch.Tensor] = {}
    method = gs.InstaGen(density=0.2)
    method.plan(q, k, v, state=state)
    first = state["key_centroids"]
    method.plan(q, k, v, gs.Call(step=1), state=state)
    assert torch.allclose(state["key_centroids"], first, atol=1.0)
    short = [x[:, :, :200] for x in (q, k, v)]
    mixed = method.plan(*short, state=state)
    fresh = method.plan(*short)
    assert torch.equal(mixed.weights(), fresh.weights())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"exact": 0.0, "sampled": 0.0}, "add up to more than 0"),
        ({"density": 0.2, "exact": 0.3}, "add up to density=0.2"),
        ({"density": 0.2, "exact": 0.1, "sampled": 0.2}, "add up to density=0.2"),
        ({"density": float("nan")}, "density=nan must be a number with 0 < density <= 1"),
        ({"density": 1.5}, "density=1.5 must be a number"),
        ({"exact": -0.1}, "exact=-0.1 must be a number with 0 <= exact <= 1"),
        ({"sampler": "best"}, "sampler='best' must be one of"),
        ({"scorer": "best"}, "scorer='best' must be one of"),
        ({"key_clusters": 0}, "key_clusters=0 must be an integer >= 1"),
        ({"iterations": 0}, "iterations=0 must be an integer >= 1"),
        ({"tile": True}, "tile=True must be an integer >= 1"),
    ],
)
def test_bad_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.get_method("instagen", **params)
