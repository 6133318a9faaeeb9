"""k-means, block means and tile packing."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import Shape, shapes
from gossamer.group import Draw, block_means, kmeans, pack_tiles, sort_by_group
from gossamer.group.kmeans import kmeans as run_kmeans

DRAW = Draw(seed=0, layer=0, step=0, heads=torch.arange(64), salt=0)


@given(shapes(self_attention=True), st.integers(1, 12))
def test_centroids_are_the_means_of_their_members(shape: Shape, num_clusters: int) -> None:
    _q, x, _v = shape.tensors()
    clusters = kmeans(x, num_clusters, draw=DRAW, iterations=3)
    assert clusters.sizes.sum(-1).eq(shape.num_keys).all()
    for c in range(num_clusters):
        member = (clusters.labels == c)[..., None]
        assert torch.equal(member.sum((2, 3)), clusters.sizes[..., c])
        mean = (x * member).sum(2) / member.sum(2).clamp(min=1)
        filled = clusters.sizes[..., c] > 0
        torch.testing.assert_close(
            clusters.centroids[:, :, c][filled], mean[filled], rtol=1e-4, atol=1e-5
        )


def blobs(num_clusters: int, each: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return well separated blobs [1, 1, N, 8] in random order and their labels [N]."""
    g = torch.Generator().manual_seed(seed)
    centres = 10 * torch.randn(num_clusters, 8, generator=g)
    label = torch.arange(num_clusters).repeat_interleave(each)
    label = label[torch.randperm(len(label), generator=g)]
    x = centres[label] + 0.1 * torch.randn(len(label), 8, generator=g)
    return x[None, None], label


def inertia(x: torch.Tensor, clusters: object) -> float:
    """Mean squared distance of tokens to their centroid."""
    index = clusters.labels[..., None].expand_as(x)
    return float((x - clusters.centroids.gather(2, index)).square().sum(-1).mean())


def test_iterations_lower_the_inertia_and_ten_do_as_well_as_fifty() -> None:
    x = torch.randn(1, 1, 2000, 8) + blobs(30, 2000 // 30 + 1)[0][:, :, :2000]
    at = {n: inertia(x, kmeans(x, 60, draw=DRAW, iterations=n)) for n in (1, 2, 10, 50)}
    assert at[1] > at[2] > at[10] >= at[50]
    assert at[10] < 1.05 * at[50]


def test_a_warm_start_continues_where_the_last_one_stopped() -> None:
    x, _ = blobs(10, 50)
    cold = kmeans(x, 10, draw=DRAW, iterations=10)
    warm = kmeans(x, 10, draw=DRAW, init=cold.centroids, iterations=1)
    assert torch.equal(warm.labels, cold.labels)
    assert inertia(x, warm) <= inertia(x, cold) + 1e-6


def test_a_converged_head_stops_and_others_go_on() -> None:
    """One head converged must not hold the centroids of another one."""
    settled, _ = blobs(4, 50)
    restless = torch.randn(1, 1, 200, 8)
    both = torch.cat([settled, restless], dim=1)
    together = kmeans(both, 4, draw=DRAW, iterations=6)
    for head, x in enumerate((settled, restless)):
        alone = kmeans(x, 4, draw=DRAW._replace(heads=DRAW.heads + head), iterations=6)
        torch.testing.assert_close(together.centroids[:, head], alone.centroids[:, 0])


def test_empty_clusters_keep_their_centroid_and_have_size_zero() -> None:
    x = torch.ones(1, 1, 50, 4)
    init = torch.tensor([[1.0] * 4, [5.0] * 4, [-3.0] * 4])[None, None]
    clusters = kmeans(x, 3, draw=DRAW, init=init, iterations=4)
    assert clusters.sizes.tolist() == [[[50, 0, 0]]]
    assert torch.equal(clusters.centroids, init)


def test_more_clusters_than_tokens() -> None:
    x = torch.randn(1, 1, 5, 4)
    clusters = kmeans(x, 9, draw=DRAW)
    assert clusters.sizes.sum() == 5
    assert clusters.centroids.isfinite().all()


def test_inactive_clusters_stay_empty() -> None:
    x = torch.randn(2, 1, 60, 4)
    clusters = kmeans(x, 6, draw=DRAW, active=torch.tensor([2, 6]))
    assert (clusters.sizes[0, 0, 2:] == 0).all()
    assert (clusters.sizes[1, 0] > 0).sum() > 2


def test_chunks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = blobs(7, 40)
    whole = run_kmeans(x, 7, draw=DRAW)
    monkeypatch.setattr(sys.modules[run_kmeans.__module__], "_CHUNK_BYTES", 4 * 8 * 13)
    parts = run_kmeans(x, 7, draw=DRAW)
    assert torch.equal(whole.labels, parts.labels)
    torch.testing.assert_close(whole.centroids, parts.centroids)


def test_the_initial_centroids_depend_on_the_global_head_alone() -> None:
    x = torch.randn(1, 1, 100, 4).expand(1, 4, -1, -1)
    every = kmeans(x, 5, draw=DRAW, iterations=1)
    upper = kmeans(x[:, 2:], 5, draw=DRAW._replace(heads=DRAW.heads + 2), iterations=1)
    assert torch.equal(every.centroids[:, 2:], upper.centroids)
    assert not torch.equal(every.centroids[:, :2], upper.centroids)


@given(shapes(), st.sampled_from([1, 7, 32, 500]))
def test_block_means_are_means_of_valid_tokens(shape: Shape, block: int) -> None:
    _q, x, _v = shape.tensors()
    valid = torch.rand(shape.batch, shape.num_keys, generator=shape.generator()) < 0.6
    means, sizes = block_means(
        x.masked_fill(~valid[:, None, :, None], torch.nan), block, valid=valid
    )
    for i, begin in enumerate(range(0, shape.num_keys, block)):
        for b in range(shape.batch):
            kept = valid[b, begin : begin + block]
            assert sizes[b, i] == kept.sum()
            want = x[b, :, begin : begin + block][:, kept].sum(1) / max(1, int(kept.sum()))
            torch.testing.assert_close(means[b, :, i], want, rtol=1e-4, atol=1e-5)
    assert means.shape[2] == -(-shape.num_keys // block)


@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 200),
    st.integers(1, 9),
    st.sampled_from([1, 16, 128]),
    st.integers(0, 99),
)
def test_tiles_hold_each_query_once_and_one_group_each(
    batch: int, heads: int, length: int, num_groups: int, tile: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(num_groups, (batch, heads, length), generator=g)
    queries, rows = pack_tiles(labels, num_groups, tile)
    assert rows.min() >= 0
    assert rows.max() < num_groups
    for b in range(batch):
        for h in range(heads):
            held = queries[b, h][queries[b, h] >= 0]
            assert torch.equal(held.sort().values.long(), torch.arange(length))
            for t in range(queries.shape[2]):
                inside = queries[b, h, t][queries[b, h, t] >= 0].long()
                assert (labels[b, h, inside] == rows[b, h, t]).all()


def test_a_permutation_round_trips_bit_exactly() -> None:
    x = torch.randn(2, 3, 77, 5)
    labels = torch.randint(6, (2, 3, 77))
    order = sort_by_group(labels, 6).order[..., None].expand_as(x)
    back = torch.empty_like(x).scatter_(2, order, x.gather(2, order))
    assert torch.equal(back, x)


def test_sorting_leaves_padding_out() -> None:
    labels = torch.tensor([[[1, 0, 1, 0, 1]]])
    valid = torch.tensor([[True, True, False, True, True]])
    ordered = sort_by_group(labels, 2, valid=valid)
    assert ordered.order.tolist() == [[[1, 3, 0, 4, 2]]]
    assert ordered.start.tolist() == [[[0, 2]]]
    assert ordered.size.tolist() == [[[2, 2]]]
