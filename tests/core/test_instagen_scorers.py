"""The scorers of InstaGen: co-clustering by profiles, second-order scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gossamer as gs
from cases import shapes
from gossamer.group import ClusterSettings, Pairs, cluster_pairs
from gossamer.group.cocluster import co_cluster
from gossamer.group.moments import cluster_means, cluster_variances
from gossamer.select.scores import second_order_scores
from gossamer.testing import Shape, assert_matches, attention, tolerance

SCORERS = ["svg2", "svoo", "variance"]
SETTINGS = ClusterSettings(query_clusters=6, key_clusters=9, iterations=4, warm_iterations=2)


def clustered_pairs(shape: Shape, call: gs.Call, scale: float = 0.3) -> tuple[Tensor, ...]:
    q, k, v = shape.tensors()
    return q, k, v, cluster_pairs(q, k, call, scale, SETTINGS, None)


def some_valid(shape: Shape) -> Tensor:
    return torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.7


@pytest.mark.parametrize("scorer", SCORERS)
@given(shapes(self_attention=True), st.booleans())
def test_a_full_budget_is_exact(scorer: str, shape: Shape, padded: bool) -> None:
    q, k, v = shape.tensors()
    valid = torch.arange(shape.num_keys) < torch.tensor([[max(1, shape.num_keys // 2)]])
    call = gs.Call(key_valid=valid if padded else None)
    for method in (
        gs.InstaGen(density=1.0, scorer=scorer, iterations=2),
        gs.InstaGen(exact=0.0, sampled=1.0, scorer=scorer, iterations=2),
    ):
        plan = method.plan(q, k, v, call)
        assert plan.density == 1.0
        seen = valid[:, None, None] if padded else None
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


@pytest.mark.parametrize("scorer", SCORERS)
@given(shapes(), st.sampled_from(["importance", "poisson", "replacement"]), st.booleans())
def test_plans_are_valid_and_weights_finite(
    scorer: str, shape: Shape, sampler: str, padded: bool
) -> None:
    q, k, v = shape.tensors()
    valid = some_valid(shape)
    valid[:, 0] = True
    call = gs.Call(key_valid=valid) if padded else gs.Call()
    if padded:
        k = k.masked_fill(~valid[:, None, :, None], torch.nan)
    plan = gs.InstaGen(density=0.3, scorer=scorer, sampler=sampler, iterations=2).plan(
        q, k, v, call
    )
    plan.validate()
    assert plan.keys.log_weight is not None
    assert plan.keys.log_weight.isfinite().all()


@pytest.mark.parametrize("scorer", SCORERS)
def test_degenerate_tokens_have_finite_scores(scorer: str) -> None:
    same = torch.ones(1, 2, 150, 16)
    two = same.clone()
    two[:, :, ::3] = -1.0
    outlier = torch.randn(1, 2, 150, 16)
    outlier[:, :, 7] = 1e4
    for x in (same, two, outlier, same * 0, outlier.half(), outlier.bfloat16()):
        plan = gs.InstaGen(density=0.2, scorer=scorer).plan(x, x, x)
        plan.validate()
        assert plan.keys.log_weight is not None
        assert plan.keys.log_weight.isfinite().all()


@given(shapes(), st.booleans())
def test_means_and_variances_of_clusters(shape: Shape, padded: bool) -> None:
    call = gs.Call(key_valid=some_valid(shape) if padded else None)
    _, k, _, pairs = clustered_pairs(shape, call)
    ordered = pairs.keys._replace(
        **{n: x[:, :: shape.group] for n, x in pairs.keys._asdict().items()}
    )
    mean = cluster_means(k, ordered)
    variance = cluster_variances(k, ordered, mean)
    valid = torch.ones(shape.batch, shape.num_keys, dtype=torch.bool)
    valid = valid if call.key_valid is None else call.key_valid
    labels = pairs.key_clusters.labels
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            for c in range(mean.shape[2]):
                of = k[b, h][(labels[b, h] == c) & valid[b]].double()
                if len(of):
                    torch.testing.assert_close(
                        mean[b, h, c].double(), of.mean(0), rtol=1e-5, atol=1e-5
                    )
                    want = of.var(0, correction=0)
                    torch.testing.assert_close(
                        variance[b, h, c].double(), want, rtol=1e-4, atol=1e-5
                    )
                else:
                    assert not mean[b, h, c].any()


@given(shapes(), st.booleans())
def test_second_order_scores(shape: Shape, padded: bool) -> None:
    """Mean logit plus half of sum_d (scale q_d)^2 var_d, at most sqrt(n - 1) of its root."""
    call = gs.Call(key_valid=some_valid(shape) if padded else None)
    _, k, _, pairs = clustered_pairs(shape, call)
    got = second_order_scores(k, pairs, 0.3)
    valid = torch.ones(shape.batch, shape.num_keys, dtype=torch.bool)
    valid = valid if call.key_valid is None else call.key_valid
    queries = pairs.queries.centroids.double() * 0.3
    for b in range(shape.batch):
        for h in range(shape.heads):
            labels = pairs.key_clusters.labels[b, h // shape.group]
            for c in range(got.shape[3]):
                of = k[b, h // shape.group][(labels == c) & valid[b]].double()
                if len(of) == 0:
                    continue
                spread = queries[b, h].square() @ of.var(0, correction=0)
                more = torch.minimum(spread / 2, (spread * (len(of) - 1)).sqrt())
                want = queries[b, h] @ of.mean(0) + more
                torch.testing.assert_close(got[b, h, :, c].double(), want, rtol=1e-4, atol=1e-4)


def test_second_order_scores_are_nearer_the_log_mean_exp() -> None:
    g = torch.Generator().manual_seed(5)
    k = torch.randn(1, 2, 600, 16, generator=g)
    q = 2 * torch.randn(1, 2, 200, 16, generator=g)
    pairs = cluster_pairs(q, k, gs.Call(), 0.25, SETTINGS, None)
    logits = pairs.queries.centroids @ k.mT * 0.25
    true = torch.empty_like(pairs.log_scores)
    for c in range(true.shape[3]):
        of = (pairs.key_clusters.labels == c)[:, :, None]
        number = of.sum(-1).double().log().float()
        true[..., c] = logits.masked_fill(~of, -torch.inf).logsumexp(-1) - number
    first = (pairs.log_scores - true).abs().mean()
    second = (second_order_scores(k, pairs, 0.25) - true).abs().mean()
    assert float(second) < float(first) / 2


def profile_labels(x: Tensor, others: Tensor, sizes: Tensor, start: Tensor) -> Tensor:
    """Assign x [N, D] to the nearest of the profiles of `start` [C, D], by plain loops.

    A profile has one number for each other centroid that has tokens.
    """
    others = others[sizes > 0].double()

    def profile(t: Tensor) -> Tensor:
        return torch.nn.functional.normalize(t.double() @ others.mT, dim=-1)

    return (profile(x) @ profile(start).mT).argmax(-1)


@pytest.mark.parametrize("group", [1, 2])
def test_co_clusters_are_those_of_the_profiles(group: int) -> None:
    """Queries by the key centroids, then keys by the new query centroids of all their heads."""
    shape = Shape(2, 2, group, 130, 90, 12, 4)
    call = gs.Call()
    q, k, _, before = clustered_pairs(shape, call)
    after = co_cluster(q, k, call, before, 0.3, iterations=1)
    for b in range(2):
        for h in range(2):
            keys = before.key_clusters
            heads = range(h * group, (h + 1) * group)
            for head in heads:
                start = before.queries.centroids[b, head]
                assert (before.queries.sizes[b, head] > 0).all()
                want = profile_labels(q[b, head], keys.centroids[b, h], keys.sizes[b, h], start)
                assert torch.equal(after.queries.labels[b, head], want)
            seen_by = torch.cat([after.queries.centroids[b, head] for head in heads])
            sizes = torch.cat([after.queries.sizes[b, head] for head in heads])
            want = profile_labels(k[b, h], seen_by, sizes, keys.centroids[b, h])
            assert torch.equal(after.key_clusters.labels[b, h], want)


@given(shapes(self_attention=True), st.booleans())
def test_co_clusters_are_consistent(shape: Shape, padded: bool) -> None:
    """Centroids are means of the tokens themselves, and scores are their logits."""
    valid = some_valid(shape) if padded else None
    q, k, _, before = clustered_pairs(shape, gs.Call(key_valid=valid))
    if padded:
        q, k = (x.masked_fill(~some_valid(shape)[:, None, :, None], torch.nan) for x in (q, k))
    after: Pairs = co_cluster(q, k, gs.Call(key_valid=valid), before, 0.3, iterations=2)
    counted = shape.num_keys if valid is None else valid.sum(-1)[:, None]
    assert (after.queries.sizes.sum(-1) == counted).all()
    assert (after.keys.size.sum(-1) == counted).all()
    for b in range(shape.batch):
        seen = slice(None) if valid is None else valid[b]
        for c in range(after.queries.sizes.shape[2]):
            of = q[b, 0, seen][after.queries.labels[b, 0, seen] == c]
            if len(of):
                torch.testing.assert_close(
                    after.queries.centroids[b, 0, c], of.mean(0), rtol=1e-4, atol=1e-5
                )
    keys = after.key_clusters.centroids.repeat_interleave(shape.group, dim=1)
    want = after.queries.centroids @ keys.mT * 0.3
    torch.testing.assert_close(after.log_scores, want, rtol=1e-4, atol=1e-4)
    assert after.log_scores.isfinite().all()
