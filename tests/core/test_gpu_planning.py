"""On a GPU: the kernels that plan, against the CPU's versions."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gossamer.call import Call
from gossamer.group import Clusters, Draw, Sorted, antidiagonal, kmeans, sort_by_group
from gossamer.group.antidiagonal import Strides, antidiagonal_mass
from gossamer.group.pddp import pddp
from gossamer.methods.mc_sparse import MCSparse
from gossamer.order import WaveAlign
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan
from gossamer.select import list_keys, list_sampled, row_phases, take_clusters
from gossamer.select.exact import Tiles, exact_mass, top_keys
from gossamer.select.saliency import block_saliency

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


HEADS, LENGTH, DIM = 12, 20_000, 128
ITERATE = partial(kmeans, iterations=2)


def draw(device: str) -> Draw:
    return Draw(seed=0, layer=0, step=0, heads=torch.arange(HEADS, device=device), salt=0)


def kmeans_tokens(dtype: torch.dtype, length: int = LENGTH) -> torch.Tensor:
    """Return tokens around a few hundred centres that lie far from zero together, on the CPU."""
    g = torch.Generator().manual_seed(0)
    centre = torch.randn(HEADS, 400, DIM, generator=g)
    pick = torch.randint(400, (length,), generator=g)
    noise = torch.randn(1, HEADS, length, DIM, generator=g)
    return (3.0 + centre[None, :, pick] + noise).to(dtype)


def inertia(x: torch.Tensor, centroids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    own = centroids.gather(2, labels[..., None].expand_as(x))
    return (x.double() - own).square().sum()


def assert_equal(got: Clusters, want: Clusters) -> None:
    for name in ("labels", "sizes", "centroids"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("num_clusters", [300, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kmeans_gives_the_nearest_centroids_and_means(
    dtype: torch.dtype, num_clusters: int
) -> None:
    """Each label is the nearest of centroids moved by u |c - o| at most, but for float32 sums.

    u is the unit roundoff of the tokens' type and o the centroid nearest to zero. Three TF32
    products keep 21 bits.
    """
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype]
    eps = 2.0**-23 if unit else 2.0**-21
    x = kmeans_tokens(dtype)
    g = torch.Generator().manual_seed(1)
    pick = torch.randint(LENGTH, (num_clusters,), generator=g)
    init = x[:, :, pick].float() + 0.1 * torch.randn(num_clusters, DIM, generator=g)
    want = kmeans(x, num_clusters, draw=draw("cpu"), init=init, iterations=1)
    got = kmeans(x.cuda(), num_clusters, draw=draw("cuda"), init=init.cuda(), iterations=1)
    labels, centroids = got.labels.cpu(), got.centroids.cpu()
    for h in range(HEADS):
        c, token, label = init[0, h].cuda().double(), x[0, h].cuda().double(), got.labels[0, h]
        distance = torch.cdist(token, c, compute_mode="donot_use_mm_for_euclid_dist")
        reach = (c - c[c.square().sum(-1).argmin()]).norm(dim=-1)
        moved = unit * reach + (2.0**-25 * DIM**0.5 if dtype == torch.float16 else 0.0)
        size = token.norm(dim=-1).amax() + c.norm(dim=-1).amax()
        rounding = 4 * (DIM + 2) * eps * size * reach.amax()
        limit = ((distance + moved).square() + rounding).sqrt().amin(-1) + moved[label]
        excess = (distance.gather(1, label[:, None])[:, 0] - limit).max()
        assert excess <= 0, f"head {h}: {float(excess)} beyond the bound"
        sums = torch.zeros(num_clusters, DIM, dtype=torch.float64)
        sums.index_add_(0, labels[0, h], x[0, h].double())
        count = torch.bincount(labels[0, h], minlength=num_clusters)
        assert torch.equal(count, got.sizes[0, h].cpu())
        mean = torch.where(count[:, None] == 0, init[0, h].double(), sums / count[:, None])
        allowed = (8 + 15) * 2.0**-24 * float(x.abs().amax())  # pairwise sums, pieces of 64
        assert (centroids[0, h].double() - mean).abs().amax() <= allowed
    agreeing = (labels == want.labels).double().mean()
    assert agreeing > (0.97 if dtype == torch.bfloat16 else 0.995)
    ratio = inertia(x, init, labels) / inertia(x, init, want.labels)
    assert abs(ratio - 1) < 2.0**-12


def test_kmeans_leaves_padding_out() -> None:
    x = kmeans_tokens(torch.bfloat16)
    valid = torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.8
    padded = x.masked_fill(~valid[:, None, :, None], torch.nan).cuda()
    active = torch.tensor([200], device="cuda")
    got = ITERATE(padded, 300, draw=draw("cuda"), valid=valid.cuda(), active=active)
    alone = ITERATE(x[:, :, valid[0]].cuda(), 200, draw=draw("cuda"))
    assert torch.equal(got.labels[:, :, valid[0].cuda()], alone.labels)
    assert torch.equal(got.centroids[:, :, :200], alone.centroids)
    assert torch.equal(got.sizes[:, :, :200], alone.sizes)
    assert (got.sizes[:, :, 200:] == 0).all()


def test_kmeans_gives_the_same_again_without_waiting_and_in_a_graph() -> None:
    x = kmeans_tokens(torch.bfloat16).cuda()
    init = x[:, :, ::40].float()
    first = ITERATE(x, init.shape[2], draw=draw("cuda"), init=init)
    heads = draw("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(2)  # a wait is an error
    try:
        again = ITERATE(x, init.shape[2], draw=heads, init=init)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    assert_equal(again, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ITERATE(x, init.shape[2], draw=heads, init=init)
    x.copy_(x.flip(2))
    graph.replay()
    assert_equal(captured, ITERATE(x, init.shape[2], draw=heads, init=init))


def test_kmeans_is_not_compiled_anew_for_other_lengths() -> None:
    pytest.importorskip("triton")
    from gossamer.group.gpu import bucket, lloyd

    def compiled() -> list[int]:
        names = [(lloyd, "prepare"), (lloyd, "assign"), (lloyd, "add"), (lloyd, "finish")]
        names += [(bucket, name) for name in ("rank", "sum_chunks", "begin", "place")]
        device = torch.cuda.current_device()
        return [len(getattr(module, name).device_caches[device][0]) for module, name in names]

    ITERATE(kmeans_tokens(torch.bfloat16, 2000).cuda(), 30, draw=draw("cuda"))
    before = compiled()
    for length, number in ((2001, 33), (1, 1), (4096, 1000), (515, 16)):
        ITERATE(kmeans_tokens(torch.bfloat16, length).cuda(), number, draw=draw("cuda"))
    assert compiled() == before


def test_kmeans_of_very_uneven_clusters() -> None:
    """One cluster of nearly all tokens is cut into pieces like any other."""
    x = kmeans_tokens(torch.bfloat16)
    init = torch.full((1, HEADS, 1000, DIM), 1e4)
    init[:, :, 500:502] = x[:, :, :2].float()
    want = ITERATE(x, 1000, draw=draw("cpu"), init=init)
    got = ITERATE(x.cuda(), 1000, draw=draw("cuda"), init=init.cuda())
    assert (got.labels.cpu() == want.labels).double().mean() > 0.97
    assert torch.equal(got.centroids[:, :, :500].cpu(), init[:, :, :500])


def without_waiting(run: Callable[[], Any]) -> Any:
    """Run once to compile, then again where a wait for the device is an error."""
    run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(2)
    try:
        return run()
    finally:
        torch.cuda.set_sync_debug_mode(0)


@pytest.mark.parametrize("mask", ["plain", "permuted", "causal", "padded", "grouped heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mass_and_attention_are_those_of_float64(dtype: torch.dtype, mask: str) -> None:
    """The masses sum products that are exact; outputs carry the rounding of their dtype.

    Without a mask the log-sum-exp is cuDNN's, so this checks what it means by it, too.
    """
    heads, num_queries = 4, 1100
    kv_heads, num_keys = (2, 1100) if mask == "grouped heads" else (4, 1100)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, num_queries, DIM, generator=g).to(dtype)
    k, v = (torch.randn(2, kv_heads, num_keys, DIM, generator=g).to(dtype) for _ in "kv")
    valid = index = None
    if mask == "padded":
        valid = torch.arange(num_keys) < torch.tensor([[1100], [777]])
        hidden = ~valid[:, None, :, None]
        q, k, v = (x.masked_fill(hidden, torch.nan) for x in (q, k, v))
    if mask == "permuted":
        order = torch.rand(2, heads, 1152, generator=g).argsort(-1)
        index = torch.where(order < num_queries, order, -1).view(2, heads, -1, 128).int()
    tiles = Tiles(
        num_queries=num_queries,
        num_keys=num_keys,
        query_index=index,
        causal=mask == "causal",
        key_valid=valid,
        scale=DIM**-0.5,
    )
    there = replace(
        tiles,
        query_index=None if index is None else index.cuda(),
        key_valid=None if valid is None else valid.cuda(),
    )
    want = exact_mass(q.double(), k.double(), v.double(), tiles)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-21}[dtype]
    for values in (v.cuda(), None):
        got = exact_mass(q.cuda(), k.cuda(), values, there)
        mass, lse = got.mass.cpu(), got.lse.cpu()
        assert torch.equal(mass == -torch.inf, want.mass == -torch.inf)
        assert torch.equal(lse == -torch.inf, want.lse == -torch.inf)
        torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mass.double(), want.mass, rtol=1e-4, atol=1e-6)
        if got.out is not None:
            out = got.out.cpu().double()
            torch.testing.assert_close(out, want.out, rtol=4 * unit, atol=4 * unit)


@pytest.mark.parametrize("length", [5_000, 75_600])
@pytest.mark.parametrize("kind", ["spread", "ties", "equal", "sorted"])
def test_mass_top_keys_are_those_of_a_sort(length: int, kind: str) -> None:
    score = torch.randn(300, length, generator=torch.Generator().manual_seed(0)).cuda()
    score = {
        "spread": (4 * score).exp(),
        "ties": (3 * score).round(),
        "equal": score * 0.0,
        "sorted": score.sort(-1).values,
    }[kind]
    width = length * 3 // 20
    count = torch.full((300,), width, device="cuda")
    count[1::3] = width // 2
    got = without_waiting(lambda: top_keys(score, count, width))
    order = score.sort(dim=-1, descending=True, stable=True).indices
    for row in range(0, 300, 7):
        want = order[row, : int(count[row])].sort().values.int()
        assert torch.equal(got[row, : len(want)], want)
        assert bool((got[row, len(want) :] == want[-1]).all())


def test_mass_plan_of_full_size_takes_the_keys_of_greatest_mass_in_less_than_a_gibibyte() -> None:
    """12 heads, 75,600 tokens: an anchor holds little beyond its plan and full attention."""
    q, k, v = (torch.randn(1, 12, 75_600, DIM, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    method = MCSparse(density=0.15)
    method.anchor(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan, out = without_waiting(partial(method.anchor, q, k, v))
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    assert peak - kept < 1 << 30, f"{(peak - kept) / 2**20:.0f} MiB beside {kept - before} bytes"
    assert isinstance(plan.keys, KeyTokens)
    assert plan.query_index is not None
    lists = plan.keys.index.view(12, 591, -1)
    for head, tile in ((0, 0), (5, 300), (11, 590)):
        query = plan.query_index[0, head, tile].long()
        rows = q[0, head, query[query >= 0]].double()
        p = torch.softmax(rows @ k[0, head].double().T * DIM**-0.5, -1)
        best = p.sum(0).topk(lists.shape[-1]).values.sum()
        chosen = lists[head, tile].long()
        assert bool((chosen[1:] > chosen[:-1]).all())
        assert float(p.sum(0)[chosen].sum() / best) > 1 - 1e-5
        want = p @ v[0, head].double()
        error = out[0, head, query[query >= 0]].double() - want
        assert float(error.norm() / want.norm()) < 2.0**-7
    again = method.plan(q, k, v)
    assert torch.equal(plan.query_index, again.query_index)


@pytest.mark.parametrize("causal", [False, True])
def test_mass_saliency_is_the_cpus(causal: bool) -> None:
    q, k = torch.randn(2, 1, 2, 1000, DIM, generator=torch.Generator().manual_seed(0)).half()
    options = {"scale": DIM**-0.5, "tile": 128, "block": 64, "causal": causal}
    got = block_saliency(q.cuda(), k.cuda(), **options).cpu()
    torch.testing.assert_close(got, block_saliency(q, k, **options), rtol=1e-4, atol=1e-9)


def scatter(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the squared distances of tokens from the mean of their tile, summed by head."""
    rows = x.float().gather(2, order[..., None].expand_as(x))
    return sum(
        (tile - tile.mean(2, keepdim=True)).square().sum((2, 3)) for tile in rows.split(128, dim=2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1000, 20_000])
def test_pddp_tiles_are_as_tight_as_the_cpus(dtype: torch.dtype, length: int) -> None:
    """Rounding moves tokens next to a cut, which changes no tile's tightness by much."""
    x = kmeans_tokens(dtype, length)
    got, want = pddp(x.cuda()).cpu(), pddp(x)
    assert torch.equal(got.sort(-1).values, torch.arange(length).expand_as(got))
    torch.testing.assert_close(scatter(x, got), scatter(x, want), rtol=0.01, atol=0.0)


def test_pddp_tiles_are_the_cpus_where_directions_are_far_apart() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 5000, 64, generator=g) * 2.0 ** -torch.arange(64)
    got, want = pddp(x.cuda()).cpu(), pddp(x)
    tile = torch.arange(5000) // 128
    by_token = [torch.empty_like(got).scatter_(-1, o, tile.expand_as(o)) for o in (got, want)]
    assert float((by_token[0] == by_token[1]).float().mean()) > 0.95


def test_pddp_gives_the_same_again_for_any_heads_without_waiting() -> None:
    x = kmeans_tokens(torch.bfloat16, 75_600).cuda()
    order = without_waiting(partial(pddp, x))
    assert torch.equal(order.sort(-1).values, torch.arange(75_600, device="cuda").expand_as(order))
    assert torch.equal(pddp(x), order)
    assert torch.equal(pddp(x[:, 7:9]), order[:, 7:9])


def test_pddp_padding_decides_nothing() -> None:
    x = kmeans_tokens(torch.bfloat16, 9000)
    valid = torch.rand(1, 9000, generator=torch.Generator().manual_seed(0)) < 0.8
    alone = pddp(x[:, :, valid[0]].cuda())
    padded = x.masked_fill(~valid[:, None, :, None], torch.nan).cuda()
    order = pddp(padded, valid=valid.cuda())
    real = valid[0].nonzero()[:, 0].cuda()
    assert torch.equal(order[..., : len(real)], real[alone])


def test_pddp_equal_tokens_keep_their_order() -> None:
    x = torch.full((1, 2, 75_600, DIM), 0.1, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(pddp(x), torch.arange(75_600, device="cuda").expand(1, 2, -1))


def select_inputs(
    rows: int, clusters: int, length: int, device: str = "cuda"
) -> tuple[torch.Tensor, Sorted, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `list_sampled` takes, for 8% exact and 8% sampled; runs of keys are alike."""
    g = torch.Generator().manual_seed(0)
    runs = torch.randint(clusters, (1, HEADS, -(-length // 12)), generator=g)
    of = runs.repeat_interleave(12, dim=2)[..., :length].to(device)
    keys = sort_by_group(of, clusters)
    scores = 2.0 * torch.randn(1, HEADS, rows, clusters, generator=g).to(device)
    exact = torch.full((1, HEADS, 1), round(0.08 * length), device=device)
    phase = row_phases(2, Call(seed=1), HEADS, rows, torch.device(device))[None]
    return scores, keys, exact, exact * 2, phase


def select_list(inputs: tuple[Any, ...], *, uniform: bool = False) -> KeyTokens:
    return list_sampled(*inputs, uniform=uniform, width=2 * round(0.08 * LENGTH))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("clusters", [100, 1000, 2363])
def test_select_samples_as_the_cpu_does(clusters: int, uniform: bool) -> None:
    """Sums round differently: a threshold within 1e-12 of a key's end may read its neighbour."""
    inputs = select_inputs(70, clusters, LENGTH)
    here = select_inputs(70, clusters, LENGTH, "cpu")
    torch.testing.assert_close(inputs[-1].cpu(), here[-1], rtol=0, atol=0)
    got = select_list(inputs, uniform=uniform).to("cpu")
    want = select_list(here, uniform=uniform)
    assert torch.equal(got.count, want.count)
    width = got.index.numel() // got.count.numel()
    same = (got.index.view(-1, width) == want.index.view(-1, width)).all(1)
    assert int((~same).sum()) <= 1
    weights = (x.log_weight.view(-1, width)[same] for x in (got, want))
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("crossing", ["exclude", "include", "cut"])
@pytest.mark.parametrize("clusters", [100, 2363])
def test_select_takes_and_lists_as_the_cpu_does(crossing: str, clusters: int) -> None:
    scores, keys, exact, _, _ = select_inputs(70, clusters, LENGTH)
    there = Sorted(*(x.cpu() for x in keys))
    taken = take_clusters(scores, keys.size[:, :, None], exact, crossing=crossing)
    want = take_clusters(scores.cpu(), there.size[:, :, None], exact.cpu(), crossing=crossing)
    assert torch.equal(taken.cpu(), want)
    for width in (None, LENGTH // 2):
        got = list_keys(taken, keys, width=width).to("cpu")
        listed = list_keys(want, there, width=width)
        for name in ("start", "count", "index"):
            assert torch.equal(getattr(got, name), getattr(listed, name)), name


def test_select_gives_the_same_again_without_waiting_and_in_a_graph() -> None:
    inputs = select_inputs(70, 1000, LENGTH)
    first = select_list(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode(2)  # a wait is an error
    try:
        second = select_list(inputs)
    finally:
        torch.cuda.set_sync_debug_mode(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        third = select_list(inputs)
    third.index.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for again in (second, third):
        for name in ("start", "count", "index", "log_weight"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


def test_select_is_not_compiled_anew_for_other_lengths() -> None:
    from gossamer.select.gpu import decide, listing

    kernels = (decide.decide, decide.lay_out, decide.phases)
    kernels += (listing.name, listing.mark, listing.turn, listing.emit)
    variants: Callable[[], list[int]] = lambda: [len(x.device_caches[0][0]) for x in kernels]  # noqa: E731
    for rows, length, known in ((64, 4096, False), (71, 5003, True), (1, 16_000, True)):
        scores, keys, exact, total, phase = select_inputs(rows, 300, length)
        before = variants()
        list_sampled(scores, keys, exact, total, phase, uniform=False, width=round(0.2 * length))
        assert not known or variants() == before


@pytest.mark.parametrize("clusters", [1000, 2363])
def test_select_of_full_size_takes_less_than_a_gibibyte(clusters: int) -> None:
    """12 heads, 591 rows, 75,600 keys."""
    scores, keys, exact, total, phase = select_inputs(591, clusters, 75_600)
    make = partial(list_sampled, scores, keys, exact, total, phase, uniform=False, width=2 * 6048)
    make()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = make()
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    assert peak - kept < 1 << 30, f"{(peak - kept) / 2**20:.0f} MiB"
    assert kept - before < 750 << 20
    assert (plan.count == 2 * 6048).all()


def wavealign_plan(tiles: int, rows: int, *, blocks: bool) -> SparsePlan:
    """A plan of `rows` key rows around 20 kinds, a fifth of all blocks or of all keys, on the CPU.

    Two batch rows of three heads; the first head's rows are all the same, and tiles beyond `rows`
    read any row.
    """
    g = torch.Generator().manual_seed(0)
    kind = torch.rand(2, 3, 20, rows, generator=g) < 0.2
    of = torch.randint(20, (2, 3, rows), generator=g)
    of[:, 0] = 0
    mask = kind.gather(2, of[..., None].expand(2, 3, rows, rows))
    mask[:, 1:] ^= torch.rand(2, 2, rows, rows, generator=g) < 0.05
    keys: KeyBlocks | KeyTokens = KeyBlocks.from_mask(mask, block=128)
    if not blocks:
        count = 3 * mask.sum(-1)  # keys 5, 6 and 7 of each block
        index = keys.index.repeat_interleave(3, dim=-1) * 128 + torch.arange(5, 8).repeat(rows)
        keys = KeyTokens.from_lists(index[..., : int(count.max())], count=count)
    row = torch.randint(rows, (2, 3, tiles), generator=g)
    row[..., :rows] = torch.arange(rows)
    tile_row = None if tiles == rows else row.int()
    length = 128 * tiles
    return SparsePlan(
        num_queries=length, num_keys=128 * rows, tile=128, keys=keys, tile_row=tile_row
    )


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("wave", [1, 132])
def test_wavealign_orders_as_torch_does(blocks: bool, wave: int) -> None:
    """Rounding may swap tiles whose angles are next to equal."""
    plan = wavealign_plan(400, 400, blocks=blocks)
    order = WaveAlign(skip="never", wave=wave)
    got, want = order.order(plan.to("cuda")).launch_order, order.order(plan).launch_order
    assert got is not None
    assert want is not None
    assert torch.equal(got[:, 0].cpu(), torch.arange(400).expand(2, -1).int())  # all the same
    moved = (got.cpu().argsort(-1) - want.argsort(-1)).abs()
    assert float((moved <= 2).double().mean()) > 0.99


@pytest.mark.parametrize("blocks", [True, False])
def test_wavealign_gives_the_same_again_without_waiting(blocks: bool) -> None:
    plan = wavealign_plan(1500, 1160, blocks=blocks).to("cuda")
    order = partial(WaveAlign(skip="never", wave=1).order, plan)
    first = order().launch_order
    again = without_waiting(order).launch_order
    assert first is not None
    assert torch.equal(first, again)
    tiles = torch.arange(1500, device="cuda").expand_as(first)
    assert torch.equal(first.sort(-1).values.long(), tiles)
    # Tiles that read the same row get the same bits, and stand side by side.
    assert plan.tile_row is not None
    row = plan.tile_row.gather(2, first.long())
    changes = (row[..., 1:] != row[..., :-1]).sum(-1)
    assert (changes[:, 1:] == 1159).all()


def test_wavealign_of_full_size_takes_less_than_a_hundred_mebibytes() -> None:
    """4 heads, 2,848 tiles and blocks: 364K tokens."""
    count = torch.full((1, 4, 2848), 570, dtype=torch.int32)
    index = torch.rand(1, 4, 2848, 2848, generator=torch.Generator().manual_seed(0))
    index = index.argsort(-1)[..., :570].sort(-1).values.int()
    keys = KeyBlocks(block=128, count=count, index=index)
    plan = SparsePlan(num_queries=2848 * 128, num_keys=2848 * 128, tile=128, keys=keys).to("cuda")
    order = partial(WaveAlign(skip="never").order, plan)
    order()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    order()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 100 << 20, f"{peak / 2**20:.0f} MiB"


def test_wavealign_is_not_compiled_anew_for_other_lengths() -> None:
    from gossamer.order.gpu import wavealign

    kernels = [wavealign.configuration(name)[0] for name in wavealign.KERNELS]
    variants: Callable[[], list[int]] = lambda: [len(x.device_caches[0][0]) for x in kernels]  # noqa: E731
    for tiles, rows, known in (
        (60, 48, False),
        (48, 48, False),
        (113, 101, True),
        (128, 128, True),
    ):
        before = variants()
        for blocks in (True, False):
            plan = wavealign_plan(tiles, rows, blocks=blocks).to("cuda")
            WaveAlign(skip="never").order(plan)
        assert not known or variants() == before


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4096, 4001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_antidiagonal_masses_of_halves_are_those_of_float32(
    dtype: torch.dtype, length: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product on the tensor cores, to which the means of missing tokens come rounded."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, length, 64, generator=generator).to(dtype)
    k = torch.randn(2, 2, length, 64, generator=generator).to(dtype)
    valid = torch.rand(2, length, generator=generator) < 0.9
    strides = Strides(stride=16, tile=128, block=128, scale=0.125, causal=causal)
    there = valid.cuda()
    got = antidiagonal_mass(q.cuda(), k.cuda(), strides, valid_q=there, valid_k=there)
    means = antidiagonal.block_means

    def rounded(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mean, count = means(*args, **options)
        return mean.to(dtype).float(), count

    monkeypatch.setattr(antidiagonal, "block_means", rounded)
    want = antidiagonal_mass(q.float(), k.float(), strides, valid_q=valid, valid_k=valid)
    # Sums of 16 x 64 products in float32, here and there, are off by at most `terms` rounding units
    # of the sum of their sizes, which no row exceeds its norms' product. Logits off by d make a
    # mass wrong by a factor of at most exp(2 d).
    terms = 16 * q.shape[-1]
    sizes = [x.float().norm(dim=-1).square().amax().sqrt() * 4 for x in (q, k)]  # of 16 tokens
    off = 2 * terms * 2**-24 * float(sizes[0] * sizes[1]) * strides.scale / strides.stride
    torch.testing.assert_close(got.cpu(), want, rtol=math.expm1(2 * off) + 2**-20, atol=0)
