"""INTRA against its definition in plain loops, its formal results, and its own rules."""

import itertools
import math

import pytest
import torch

import gossamer as gs
from cases import Shape
from gossamer.methods.intra import Intra
from gossamer.plan.rows import tile_queries
from oracle import assert_matches, attention, tolerance

SCATTER, GATHER = gs.Call(layer=0), gs.Call(layer=2)


def read(method, call, num_queries, num_keys=None, batch=1):
    """Return which keys each query reads, [B|1, N, S] bool; the plan is checked on the way."""
    num_keys = num_queries if num_keys is None else num_keys
    q, k, v = Shape(batch, 1, 2, num_queries, num_keys, 8, 0).tensors()
    plan = method.plan(q, k, v, call)
    plan.validate()
    assert plan.heads == 1
    assert plan.batch == 1 or call.key_valid is not None
    return plan.weights()[:, 0] > 0


def mask(num_queries, num_keys, reads):
    """Return [N, S] bool of a predicate on absolute positions (p, j), keys 0 ≤ j < S."""
    begin = num_keys - num_queries
    rows = [[reads(p, j) for j in range(num_keys)] for p in range(begin, num_keys)]
    return torch.tensor(rows, dtype=torch.bool).view(num_queries, num_keys)


def place(token, grid):
    """Return (frame, row, column) of a token."""
    return token // (grid[1] * grid[2]), token // grid[2] % grid[1], token % grid[2]


# --- Scatter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbourhood", ["patch", "strided"])
@pytest.mark.parametrize("groups", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 257])
def test_scatter_of_a_sequence_takes_every_gth_token(num_tokens, groups, neighbourhood):
    method = Intra(groups=groups, neighbourhood=neighbourhood)
    want = mask(num_tokens, num_tokens, lambda p, j: p % groups == j % groups)
    assert torch.equal(read(method, SCATTER, num_tokens)[0], want)


@pytest.mark.parametrize(
    ("grid", "patch"),
    [
        ((1, 16, 16), (1, 2, 4)),
        ((1, 9, 13), (1, 4, 2)),
        ((1, 2, 11), (1, 4, 2)),  # a patch that reaches past the grid
        ((5, 6, 7), (2, 2, 2)),
        ((3, 4, 9), (1, 1, 8)),
    ],
)
def test_scatter_of_a_grid_takes_one_token_of_each_patch(grid, patch):
    num_tokens = math.prod(grid)

    def inside(token):
        return [x % side for x, side in zip(place(token, grid), patch, strict=True)]

    want = mask(num_tokens, num_tokens, lambda p, j: inside(p) == inside(j))
    call = gs.Call(grid=grid)
    assert torch.equal(read(Intra(patch=patch), call, num_tokens)[0], want)


@pytest.mark.parametrize(
    ("grid", "groups", "patch"),
    [
        ((1, 64, 64), 4, (1, 2, 2)),
        ((1, 64, 64), 8, (1, 2, 4)),
        ((1, 64, 64), 16, (1, 4, 4)),
        ((13, 16, 20), 8, (2, 2, 2)),
        ((1, 2, 64), 16, (1, 2, 8)),  # the most cubic one does not fit
    ],
)
def test_the_default_patch_is_the_most_cubic_that_fits(grid, groups, patch):
    plans = [Intra(groups=groups, patch=shape) for shape in (None, patch)]
    tokens = math.prod(grid)
    q = torch.zeros(1, 1, tokens, 8)
    rows = [method.plan(q, q, q, gs.Call(grid=grid)) for method in plans]
    assert torch.equal(rows[0].keys.index, rows[1].keys.index)
    assert torch.equal(rows[0].query_index, rows[1].query_index)


# --- Gather -------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(1, 16, 16), (1, 16, 24), (1, 32, 24)])
def test_gather_0_is_the_papers_on_its_own_sizes(grid):
    """A query patch of 8 × 8 and four key tiles of four rows of 16."""
    _, height, width = grid
    want = torch.zeros(height * width, height * width, dtype=torch.bool)
    for cqs in range(height * width // 64):
        r, c = cqs // (width // 8), cqs % (width // 8)
        top = min(max(8 * r - 4, 0), height - 16)
        left = min(max(8 * c - 4, 0), width - 16)
        keys = [(top + i // 16) * width + left + i % 16 for i in range(256)]
        for i in range(64):
            want[(8 * r + i // 8) * width + 8 * c + i % 8, keys] = True
    got = read(Intra(), gs.Call(layer=2, grid=grid), height * width)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("grid", "patch", "window"),
    [
        ((1, 19, 21), (4, 8, 8), (8, 16, 16)),
        ((1, 5, 40), (4, 8, 8), (8, 16, 16)),  # fewer rows than a patch has
        ((1, 17, 9), (1, 3, 2), (1, 7, 5)),
        ((6, 5, 9), (2, 2, 4), (3, 4, 6)),
        ((11, 3, 10), (4, 8, 8), (8, 16, 16)),
        ((2, 3, 2), (1, 1, 1), (1, 1, 1)),
    ],
)
def test_gather_0_takes_any_grid(grid, patch, window):
    window = [min(x) for x in zip(window, grid, strict=True)]
    patch = [min(x) for x in zip(patch, window, strict=True)]
    if window == list(grid):
        patch = grid

    def reads(p, j):
        sides = zip(place(p, grid), place(j, grid), grid, patch, window, strict=True)
        for query, key, size, a, h in sides:
            first = min(max(query // a * a - (h - a) // 2, 0), size - h)
            if not first <= key < first + h:
                return False
        return True

    tokens = math.prod(grid)
    method = Intra(query_patch=tuple(patch), window=tuple(window))
    got = read(method, gs.Call(layer=2, grid=grid), tokens)[0]
    assert torch.equal(got, mask(tokens, tokens, reads))
    assert got.diagonal().all()
    assert (got.sum(1) == math.prod(window)).all(), "windows are shifted inward, never cut"


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("num_tokens", [9, 64, 257])
def test_gather_1_deals_segments_and_the_cyclic_form_follows_the_proof(num_tokens, groups):
    length = min(groups, math.ceil(num_tokens / groups))
    forms = {
        "segment": lambda j: j // length % groups,
        "window": lambda j: j // length % groups,  # no grid: a sequence
        "cyclic": lambda j: (j // groups + j % groups) % groups,
    }
    for name, group in forms.items():
        method = Intra(groups=groups, gather=name)
        want = mask(num_tokens, num_tokens, lambda p, j, group=group: group(p) == group(j))
        assert torch.equal(read(method, GATHER, num_tokens)[0], want)
        flat = gs.Call(layer=2, grid=(1, 1, num_tokens))
        assert torch.equal(read(method, flat, num_tokens)[0], want)


def test_segments_of_long_sequences_hold_as_many_tokens_as_there_are_groups():
    got = read(Intra(groups=4, gather="segment"), GATHER, 40)[0]
    assert got[0].nonzero().flatten().tolist() == [*range(4), *range(16, 20), *range(32, 36)]


# --- Formal results -----------------------------------------------------------------------------

SIZES = [
    (n, r) for r in (1, 2, 3, 4, 5, 7) for n in (1, 2, 3, 4, 6, 7, 8, 9, 12, 15, 16, 17, 20, 23)
]
SIZES += [(n, r) for r in (2, 3, 5, 7) for n in range(r * r - 2, r * r + 3)] + [(99, 9), (80, 9)]


@pytest.mark.parametrize("gather", ["segment", "cyclic"])
def test_two_layers_reach_everything_exactly_where_there_are_as_many_neighbourhoods(gather):
    """⌊N/R⌋ ≥ R, full neighbourhoods counted; a single token reaches itself."""
    for num_tokens, groups in SIZES:
        method = Intra(groups=groups, gather=gather)
        first, second = (read(method, call, num_tokens)[0].float() for call in (SCATTER, GATHER))
        want = num_tokens // groups >= groups or num_tokens == 1
        for one, two in ((first, second), (second, first)):
            assert bool((two @ one > 0).all()) == want, (num_tokens, groups)


@pytest.mark.parametrize("gather", ["segment", "cyclic"])
def test_every_scatter_group_meets_every_gather_group_in_floor_t_over_r_tokens(gather):
    for num_tokens, groups in SIZES:
        neighbourhoods = num_tokens // groups
        if neighbourhoods < groups:
            continue
        method = Intra(groups=groups, gather=gather)
        scatter, other = (read(method, call, num_tokens)[0].float() for call in (SCATTER, GATHER))
        overlap = scatter @ other.T  # |S_r and G_b| for the groups of each two tokens
        least, most = int(overlap.min()), int(overlap.max())
        assert least >= neighbourhoods // groups, (num_tokens, groups)
        assert most <= -(-math.ceil(num_tokens / groups) // groups), (num_tokens, groups)
        if num_tokens % groups == 0:
            assert least == neighbourhoods // groups, "no partition of equal sizes does better"


def test_scatter_covers_every_pair_of_neighbourhoods_alike():
    for neighbourhoods, size in itertools.product([2, 3, 5, 8], [1, 2, 3, 7]):
        num_tokens = neighbourhoods * size
        got = read(Intra(groups=size), SCATTER, num_tokens)[0].float()
        of = torch.arange(num_tokens) // size
        one_hot = torch.nn.functional.one_hot(of).float()
        pairs = one_hot.T @ got @ one_hot
        assert (pairs == size).all()
        assert got.sum() == num_tokens**2 / size


@pytest.mark.parametrize("grid", [(1, 32, 32), (1, 24, 40), (8, 16, 16)])
def test_windows_hold_every_position_of_the_patches(grid):
    """Each Scatter group meets each window, so windows reconnect the groups of images too."""
    method = Intra(query_patch=(2, 8, 8), window=(4, 16, 16))
    tokens = math.prod(grid)
    got = [read(method, gs.Call(layer=layer, grid=grid), tokens)[0].float() for layer in (0, 2)]
    assert (got[0] @ got[1].T > 0).all()


# --- Layers -------------------------------------------------------------------------------------


def kinds(method, num_layers):
    return [method.layer_kind(layer) for layer in range(num_layers)]


def test_layers_alternate_and_global_ones_come_every_eight():
    assert kinds(Intra(), 6) == ["scatter"] * 2 + ["gather"] * 2 + ["scatter"] * 2
    assert kinds(Intra(interleave=1), 3) == ["scatter", "gather", "scatter"]
    assert set(kinds(Intra(schedule="scatter"), 9)) == {"scatter"}
    assert set(kinds(Intra(schedule="gather"), 9)) == {"gather"}
    language = Intra(schedule="g2s4")
    assert [i for i, kind in enumerate(kinds(language, 32)) if kind == "global"] == [0, 8, 16, 24]
    assert kinds(language, 36).count("global") == 5  # Qwen3-8B's
    assert kinds(language, 32).count("window") == 28


def test_plans_are_made_once_per_kind_of_layer():
    session = gs.Session(gs.Recipe(method=Intra(), min_tokens=0))
    made = []
    real = Intra.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Intra, "plan", lambda *a, **k: made.append(1) or real(*a, **k))
        q, k, v = Shape(1, 1, 2, 128, 128, 8, 0).tensors()
        for step, layer in itertools.product(range(2), range(8)):
            session.attention(q, k, v, gs.Call(layer=layer, step=step))
        assert len(made) == 2
        padded = gs.Call(key_valid=torch.arange(128)[None] < 100)
        for _ in range(2):
            session.attention(q, k, v, padded)
        assert len(made) == 4, "padding belongs to the tensors, so these are not kept"
    got = [record.density for record in session.records[:8]]
    assert got == [got[0]] * 2 + [got[2]] * 2 + [got[0]] * 2 + [got[2]] * 2


def test_each_tile_holds_queries_of_one_group_and_groups_share_their_row():
    q, k, v = Shape(1, 1, 1, 3000, 3000, 8, 0).tensors()
    plan = Intra(groups=4).plan(q, k, v)
    assert plan.tile == 128
    assert (plan.keys.num_rows, plan.keys.index.numel()) == (4, 3000)
    queries = plan.query_index[0, 0]
    group = torch.where(queries < 0, plan.tile_row[0, 0][:, None], queries % 4)
    assert (group == plan.tile_row[0, 0][:, None]).all()
    assert plan.num_tiles == 4 * 6  # 750 queries a group
    image = Intra().plan(
        q[:, :, :1024], k[:, :, :1024], v[:, :, :1024], gs.Call(layer=2, grid=(1, 32, 32))
    )
    assert (image.tile, image.num_tiles, image.keys.num_rows) == (64, 16, 16)


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("gather", ["window", "segment", "cyclic"])
@pytest.mark.parametrize(
    "facts", [{}, {"grid": (2, 9, 20)}, {"grid": (1, 15, 24), "text": (0, 37)}, {"causal": True}]
)
@pytest.mark.parametrize("schedule", ["interleave", "g2s4"])
def test_every_tile_holds_a_query(layer, gather, facts, schedule):
    """As many tiles as are filled, known without reading a tensor: no kernel runs empty ones."""
    choice = {"groups": 8, "gather": gather}
    if schedule == "g2s4":
        facts = {name: value for name, value in facts.items() if name == "causal"}
        choice = {}
    tokens = math.prod(facts.get("grid", (1, 1, 360))) + facts.get("text", (0, 0))[1]
    q, k, v = Shape(1, 1, 1, tokens, tokens, 8, 0).tensors()
    method = Intra(schedule=schedule, tile=16, **choice)
    plan = method.plan(q, k, v, gs.Call(layer=layer, **facts))
    queries = tile_queries(plan)
    assert (queries >= 0).any(-1).all()
    assert queries[queries >= 0].sort().values.tolist() == list(range(tokens))


# --- Text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [(0, 5), (30, 41), (72, 80), (11, 12)])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("grid", [None, (1, 6, 12), (2, 4, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_text_keys_are_read_by_all_and_text_queries_keep_scatter_groups(text, layer, grid, causal):
    length = text[1] - text[0]
    tokens = 72 + length
    method = Intra(groups=8, query_patch=(1, 2, 3), window=(2, 4, 5), gather="window")
    latent = [i for i in range(tokens) if not text[0] <= i < text[1]]
    groups, image = (read(method, gs.Call(layer=at, grid=grid), 72)[0] for at in (0, layer))
    want = torch.zeros(tokens, tokens, dtype=torch.bool)
    want[:, text[0] : text[1]] = True
    for at, i in enumerate(latent):
        want[i, latent] = image[at]
    for p in range(length):
        # The group of text query p: the Scatter groups in order of their first token's position.
        want[text[0] + p, latent] = groups[_member(p % 8, grid)]
    if causal:
        want &= torch.ones(tokens, tokens).tril().bool()
    got = read(method, gs.Call(layer=layer, grid=grid, text=text, causal=causal), tokens)[0]
    assert torch.equal(got, want)


def _member(group, grid):
    """Return a token of a Scatter group of 8: patches are 2 × 4, 2 × 2 × 2, or 8 in a row."""
    if grid is None:
        return group
    patch = (1, 2, 4) if grid[0] == 1 else (2, 2, 2)
    f, r, c = group // (patch[1] * patch[2]), group // patch[2] % patch[1], group % patch[2]
    return (f * grid[1] + r) * grid[2] + c


@pytest.mark.parametrize(("side", "dense", "intra"), [(64, 260.9, 50.75), (128, 3507.9, 345.5)])
def test_the_densities_of_flux_are_those_of_the_papers_operation_counts(side, dense, intra):
    """INTRA Table 1, mean of both layers; 512 text tokens first. Its count takes Gather's text
    queries for windowed ones, 256 keys instead of a Scatter group's."""
    tokens = 512 + side * side
    q = torch.zeros(1, 1, tokens, 8)
    calls = [gs.Call(layer=layer, grid=(1, side, side), text=(0, 512)) for layer in (0, 2)]
    density = [Intra().plan(q, q, q, call).density for call in calls]
    own_count = 512 * (side * side / 8 - 256) / tokens**2
    assert density[0] == (side * side / 8 + 512) / tokens
    assert sum(density) / 2 - own_count / 2 == pytest.approx(intra / dense, rel=1e-3)


def test_g2s4_takes_no_text_span():
    q, k, v = Shape(1, 1, 1, 40, 40, 8, 0).tensors()
    for layer in (0, 1):
        with pytest.raises(gs.UnsupportedError, match=r"text=\(0, 4\).*leave the span out"):
            Intra(schedule="g2s4").plan(q, k, v, gs.Call(layer=layer, text=(0, 4)))


# --- Causal, lengths, padding -------------------------------------------------------------------

LENGTHS = [(60, 60), (1, 60), (17, 60), (90, 60), (60, 5), (3, 3)]


@pytest.mark.parametrize(("num_queries", "num_keys"), LENGTHS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("gather", ["segment", "cyclic"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_groups_are_by_absolute_position(num_queries, num_keys, layer, gather, causal, padding):
    """Queries of no visible key in their group read the first valid key, others never do."""
    groups = 8
    valid = torch.ones(3, num_keys, dtype=torch.bool)
    if padding == "left":
        valid = torch.arange(num_keys) >= torch.tensor([[0], [2], [num_keys - 1]])
    elif padding == "right":
        valid = torch.arange(num_keys) < torch.tensor([[num_keys], [3], [1]])
    elif padding == "holes":
        valid = torch.rand(3, num_keys) < torch.tensor([[0.7], [0.3], [0.0]])
    length = min(groups, math.ceil(num_keys / groups))
    form = {
        0: lambda p: p % groups,
        "segment": lambda p: p // length % groups,
        "cyclic": lambda p: (p // groups + p % groups) % groups,
    }[gather if layer else 0]
    call = gs.Call(layer=layer, causal=causal, key_valid=None if padding == "none" else valid)
    method = Intra(groups=groups, gather=gather)
    got = read(method, call, num_queries, num_keys, batch=3).expand(3, -1, -1)
    for b in range(3):
        for i in range(num_queries):
            p = i + num_keys - num_queries
            seen = [j for j in range(num_keys) if valid[b, j] and (j <= p or not causal)]
            want = [j for j in seen if form(j) == form(p)]
            if num_queries != num_keys:
                want = want or seen[:1]
            assert got[b, i].nonzero().flatten().tolist() == want


def test_full_density_is_1_with_padding_and_fewer_queries_than_keys():
    q, k, v = Shape(2, 1, 2, 9, 40, 8, 0).tensors()
    valid = torch.arange(40) < torch.tensor([[40], [3]])
    plan = Intra.at_density(1.0).plan(q, k, v, gs.Call(key_valid=valid))
    plan.validate()
    assert plan.density == 1.0


@pytest.mark.parametrize("grid", [None, (1, 10, 30), (5, 6, 10)])
@pytest.mark.parametrize("layer", [0, 2])
def test_padding_changes_nothing_in_any_layer(grid, layer):
    q, k, v = Shape(2, 2, 2, 300, 300, 8, 1).tensors()
    call = {"layer": layer, "text": (0, 0)}
    alone = gs.sparse_attention(q, k, v, Intra(groups=4, gather="cyclic"), gs.Call(**call))
    nan = [torch.nn.functional.pad(x, (0, 0, 0, 21), value=math.nan) for x in (q, k, v)]
    valid = torch.arange(321)[None] < 300
    padded = gs.sparse_attention(
        *nan, Intra(groups=4, gather="cyclic"), gs.Call(**call, key_valid=valid)
    )
    assert torch.equal(padded[:, :, :300], alone)
    if grid is not None:  # a grid fills the latent tokens: padding lies inside it, or in the text
        valid = torch.arange(300)[None] < 250
        got = read(Intra(), gs.Call(grid=grid, layer=layer, key_valid=valid), 300)[0]
        want = read(Intra(), gs.Call(grid=grid, layer=layer), 300)[0] & valid
        assert torch.equal(got, want)


def test_heads_batch_rows_and_offsets_share_one_plan():
    q, k, v = Shape(3, 2, 2, 200, 200, 8, 1).tensors()
    whole = Intra().plan(q, k, v, gs.Call())
    assert (whole.batch, whole.heads) == (1, 1)
    part = Intra().plan(q[:1, 2:], k[:1, 1:], v[:1, 1:], gs.Call(head_offset=2, seed=9, step=3))
    assert torch.equal(whole.weights(), part.weights())


def test_planning_ignores_values_and_global_random_state():
    before = torch.random.get_rng_state()
    for layer, schedule in itertools.product((0, 2), ("interleave", "g2s4")):
        bad = torch.full((1, 1, 99, 8), math.nan)
        method = Intra(schedule=schedule)
        method.plan(bad, bad, bad, gs.Call(layer=layer, causal=True)).validate()
    assert torch.equal(torch.random.get_rng_state(), before)


# --- g2s4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_queries", "num_keys"), [(80, 80), (30, 80), (1, 77), (90, 70)])
@pytest.mark.parametrize(("block", "groups"), [(16, 2), (10, 3), (256, 2)])
def test_a_global_layer_reads_every_second_block_counted_from_its_own(
    num_queries, num_keys, block, groups
):
    method = Intra(schedule="g2s4", global_block=block, global_groups=groups)

    def reads(p, j):
        return j <= p and (p // block - j // block) % groups == 0

    got = read(method, gs.Call(causal=True), num_queries, num_keys)[0]
    assert torch.equal(got, mask(num_queries, num_keys, reads))


@pytest.mark.parametrize("offset", [0, 100, 300])
def test_published_blocks_are_listed_as_blocks(offset):
    """256 tokens, two of the kernels' blocks; every block is read by later ones of its parity."""
    q, k, v = Shape(1, 1, 1, 1300 - offset, 1300, 8, 0).tensors()
    plan = Intra(schedule="g2s4").plan(q, k, v, gs.Call(causal=True))
    assert plan.keys.block == 128
    want = mask(1300 - offset, 1300, lambda p, j: j <= p and (p // 256 - j // 256) % 2 == 0)
    assert torch.equal(plan.weights()[0, 0] > 0, want)
    assert want[:, 256:512].any(), "absolute parity would leave half the blocks unread"


def test_a_global_layer_falls_back_where_padding_leaves_a_parity_without_keys():
    valid = torch.arange(600)[None] < torch.tensor([[600], [200]])
    q, k, v = Shape(2, 1, 1, 500, 600, 8, 0).tensors()
    plan = Intra(schedule="g2s4").plan(q, k, v, gs.Call(causal=True, key_valid=valid))
    plan.validate()
    got = plan.weights()[:, 0] > 0
    assert not (got & ~valid[:, None]).any()
    assert got[1].any(1).all()
    for i, p in enumerate(range(100, 600)):
        same = [j for j in range(p + 1) if (p // 256 - j // 256) % 2 == 0]
        assert got[0, i].nonzero().flatten().tolist() == same


@pytest.mark.parametrize(("num_queries", "num_keys"), [(80, 80), (30, 80), (90, 70)])
def test_a_window_layer_reads_its_span_and_the_first_tokens(num_queries, num_keys):
    method = Intra(schedule="g2s4", span=11, sink=4)
    call = gs.Call(layer=1, causal=True)
    want = mask(num_queries, num_keys, lambda p, j: j <= p and (j >= p - 11 or j < 4))
    assert torch.equal(read(method, call, num_queries, num_keys)[0], want)
    if num_queries == num_keys:
        want = mask(num_queries, num_keys, lambda p, j: abs(j - p) <= 11 or j < 4)
        assert torch.equal(read(method, gs.Call(layer=1), num_queries)[0], want)
    else:
        with pytest.raises(gs.UnsupportedError, match="not causal"):
            read(method, gs.Call(layer=1), num_queries, num_keys)


def test_g2s4_defaults_are_the_published_ones():
    method = Intra(schedule="g2s4")
    q = torch.zeros(1, 1, 4096, 8)
    densities = [
        method.plan(q, q, q, gs.Call(layer=layer, causal=True)).density for layer in (0, 1)
    ]
    visible = 4096 * 4097 / 2
    window = sum(min(p + 1, 576 + 64) for p in range(4096)) / visible
    own = 16 * 256 * 257 / 2
    others = sum(256 * 256 * (u // 2) for u in range(16))
    assert densities == pytest.approx([(own + others) / visible, window], rel=1e-12)
    q = torch.zeros(1, 1, 2000, 8)
    plan = method.plan(q, q, q, gs.Call(layer=1, causal=True))
    assert plan.window == (575, 0, 64)
    assert int(plan.keys.count.max()) == 64 + 575 + plan.tile, "kernels walk what rows list"


# --- Density ------------------------------------------------------------------------------------

EVERY = [
    ({}, {"layer": 0}),
    ({}, {"layer": 2}),
    ({"gather": "cyclic"}, {"layer": 2}),
    ({}, {"layer": 0, "causal": True}),
    ({}, {"layer": 2, "causal": True}),
    ({}, {"layer": 0, "grid": True}),
    ({}, {"layer": 2, "grid": True}),
    ({"neighbourhood": "strided"}, {"layer": 0, "grid": True}),
    ({"schedule": "g2s4"}, {"layer": 0, "causal": True}),
    ({"schedule": "g2s4"}, {"layer": 1, "causal": True}),
    ({"schedule": "g2s4"}, {"layer": 1}),
]


def density_of(density, params, facts, num_tokens, grid):
    facts = dict(facts)
    if facts.pop("grid", False):
        num_tokens, facts["grid"] = math.prod(grid), grid
    q = torch.zeros(1, 1, num_tokens, 8)
    return gs.get_method("intra", density=density, **params).plan(q, q, q, gs.Call(**facts)).density


@pytest.mark.parametrize(("density", "groups"), [(0.1, 10), (0.125, 8), (0.15, 7), (0.3, 3)])
def test_a_density_becomes_the_nearest_number_of_groups(density, groups):
    assert gs.get_method("intra", density=density).groups == groups
    table = {1.0: 1, 0.76: 1, 0.75: 2, 0.6: 2, 0.5: 2, 0.42: 2, 0.41: 3, 0.001: 1000}
    for asked, nearest in table.items():
        assert Intra.at_density(asked).groups == nearest


SIZED = [
    (params, facts, size)
    for params, facts in EVERY
    for size in ([(13, 16, 20), (1, 64, 64)] if "grid" in facts else [2048, 4097])
]


@pytest.mark.parametrize(("params", "facts", "size"), SIZED)
def test_all_layers_meet_the_same_nearest_density(params, facts, size):
    num_tokens, grid = (math.prod(size), size) if "grid" in facts else (size, None)
    for density in (0.1, 0.15, 0.25, 0.5):
        groups = Intra.at_density(density).groups
        got = density_of(density, params, facts, num_tokens, grid)
        # A block of 256 is the coarsest step that there is: diagonal ones are half visible.
        blocks = params.get("schedule") == "g2s4" and facts["layer"] == 0
        allowed = 0.02 + (256 / num_tokens if blocks else 0)
        assert abs(got - 1 / groups) <= allowed, (density, got)


@pytest.mark.parametrize(("params", "facts"), EVERY)
@pytest.mark.parametrize("grid", [(2, 5, 11), (1, 9, 14), (4, 6, 10)])
def test_density_grows_with_the_budget_to_exactly_1(params, facts, grid):
    densities = [0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0]
    for num_tokens in (37, 600):
        got = [density_of(d, params, facts, num_tokens, grid) for d in densities]
        assert got == sorted(got)
        assert got[-1] == 1.0


@pytest.mark.parametrize(("params", "facts"), EVERY)
def test_density_1_is_dense_attention_in_every_layer(params, facts):
    facts = dict(facts)
    if facts.pop("grid", False):
        facts["grid"] = (3, 10, 9)
    q, k, v = Shape(2, 2, 2, 270, 270, 16, 3).tensors()
    call = gs.Call(**facts)
    seen = torch.ones(270, 270).tril()[None, None] if call.causal else None
    plan = Intra.at_density(1.0, **params).plan(q, k, v, call)
    plan.validate()
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v, seen), tolerance(q, k, v))


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("text", [None, (4, 30)])
def test_the_kernel_computes_what_the_weights_say(layer, text):
    q, k, v = Shape(2, 1, 3, 296, 296, 16, 3).tensors()
    call = gs.Call(layer=layer, text=text, grid=(3, 10, 9) if text else (4, 2, 37))
    plan = Intra(groups=8, window=(2, 5, 7)).plan(q, k, v, call)
    plan.validate()
    want = attention(q, k, v, plan.weights())
    assert_matches(gs.attend(q, k, v, plan), want, tolerance(q, k, v))


# --- Parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"groups": 0}, "groups=0 must be an integer >= 1"),
        ({"groups": True}, "groups=True"),
        ({"interleave": 0}, "interleave=0"),
        ({"tile": 0}, "tile=0"),
        ({"schedule": "g4"}, "schedule='g4' must be one of interleave, scatter, gather, g2s4"),
        ({"neighbourhood": "cube"}, "must be one of patch, strided"),
        ({"gather": "none"}, "must be one of window, segment, cyclic"),
        ({"patch": (2, 2)}, r"patch=\(2, 2\) must be \(frames, rows, columns\)"),
        ({"window": (1, 0, 4)}, r"window=\(1, 0, 4\)"),
        ({"query_patch": None}, "query_patch=None"),
        ({"query_patch": "8x8"}, "query_patch='8x8'"),
        ({"patch": (1, 2, 2)}, "holds 4 tokens, but groups=8"),
        ({"span": -1}, "span=-1 must be an integer >= 0"),
        ({"sink": 0.5}, "sink=0.5"),
        ({"fit": 1}, "fit=1 must be True or False"),
        ({"fit": True, "window": (1, 16, 16)}, "fit=True chooses window"),
        ({"density": 0.2, "groups": 5}, "density chooses the number of groups"),
        ({"density": 0.2, "patch": (1, 2, 4)}, "fit=True chooses patch"),
    ],
)
def test_bad_parameters_are_refused(params, message):
    with pytest.raises(gs.PlanError, match=message):
        gs.get_method("intra", **params)


@pytest.mark.parametrize(
    "method", [Intra(), Intra(patch=(1, 2, 4)), Intra(schedule="g2s4"), Intra.at_density(0.2)]
)
def test_parameters_round_trip_through_a_recipe(method):
    assert Intra(**method.params()) == method
    recipe = gs.Recipe(method=method)
    assert gs.Recipe.from_toml(recipe.to_toml()) == recipe


def test_planning_a_long_video_needs_little_memory():
    """Lists, not masks: what the plan holds is a few numbers per token."""
    q = torch.zeros(1, 1, 1, 128).expand(1, 2, 75_600, 128)
    for layer in (0, 2):
        plan = Intra().plan(q, q, q, gs.Call(layer=layer, grid=(21, 45, 80)))
        assert plan.keys.index.numel() <= 16 * 75_600
