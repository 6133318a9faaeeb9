"""Exact selection: the mass is that of float64 softmax, and no other choice covers more of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from cases import Shape, shapes
from gossamer.select import exact as module
from gossamer.select.exact import Tiles, chunk_sizes, exact_mass, stream_pooled, top_keys
from oracle import attention


def brute_mass(q: torch.Tensor, k: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """The definition, one tile after another, in float64; -inf for keys that none sees."""
    batch, heads = q.shape[:2]
    seen = visible(tiles, batch)
    index = tiles.queries(batch, heads, q.device)
    mass = torch.full((batch, heads, tiles.num_tiles, tiles.num_keys), -torch.inf).double()
    for b in range(batch):
        for h in range(heads):
            logits = tiles.scale * q[b, h].double() @ k[b, h * k.shape[1] // heads].double().T
            for t in range(tiles.num_tiles):
                rows = [int(i) for i in index[b, h, t] if i >= 0]
                total = torch.zeros(tiles.num_keys).double()
                for i in rows:
                    see = seen[b, i]
                    if see.any() and counts(tiles, b, i):
                        total[see] += torch.softmax(logits[i, see], dim=0)
                near = within(tiles, b, max(rows, default=-1))
                mass[b, h, t, near] = total[near]
    return mass


def visible(tiles: Tiles, batch: int) -> torch.Tensor:
    """Which key each query sees, [B, N, S]."""
    seen = torch.ones(batch, tiles.num_queries, tiles.num_keys, dtype=torch.bool)
    if tiles.causal:
        seen = seen.tril(tiles.num_keys - tiles.num_queries)
    return seen if tiles.key_valid is None else seen & tiles.key_valid[:, None]


def counts(tiles: Tiles, b: int, query: int) -> bool:
    if tiles.key_valid is None or tiles.num_queries != tiles.num_keys:
        return True
    return bool(tiles.key_valid.expand(b + 1, -1)[b, query])


def within(tiles: Tiles, b: int, last: int) -> torch.Tensor:
    """Which keys are valid and, where causal, not behind the tile's last query."""
    key = torch.arange(tiles.num_keys)
    near = torch.ones_like(key, dtype=torch.bool)
    if tiles.causal:
        near = key <= last + tiles.num_keys - tiles.num_queries
    return near if tiles.key_valid is None else near & tiles.key_valid[b]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, Tiles]:
    shape = draw(shapes(max_tokens=70))
    g = shape.generator()
    causal, padded = draw(st.booleans()), draw(st.booleans())
    tile = draw(st.sampled_from([1, 8, 32, 128]))
    valid = None
    if padded:
        valid = torch.rand(shape.batch, shape.num_keys, generator=g) < 0.7
    index = None
    if draw(st.booleans()):
        places = -(-shape.num_queries // tile) * tile + tile
        order = torch.rand(shape.batch, shape.heads, places, generator=g).argsort(-1)
        index = torch.where(order < shape.num_queries, order, -1)
        index = index.view(shape.batch, shape.heads, -1, tile).int()
    tiles = Tiles(
        num_queries=shape.num_queries,
        num_keys=shape.num_keys,
        tile=tile,
        query_index=index,
        causal=causal,
        key_valid=valid,
        scale=shape.dim**-0.5,
    )
    return shape, tiles


@given(problems(), st.sampled_from([64 << 20, 40_000, 3_000, 1]))
def test_mass_and_attention_are_those_of_the_definition(
    problem: tuple[Shape, Tiles], chunk: int
) -> None:
    """Whatever is held at once: all heads, some tiles, or a part of the keys."""
    shape, tiles = problem
    q, k, v = shape.tensors(torch.float64)
    if tiles.key_valid is not None:
        hidden = ~tiles.key_valid[:, None, :, None]
        k, v = k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)
        if tiles.num_queries == tiles.num_keys:
            q = q.masked_fill(hidden, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        got = exact_mass(q, k, v, tiles)
    torch.testing.assert_close(got.mass, brute_mass(q, k, tiles), rtol=1e-10, atol=1e-12)
    want = attention(*(x.nan_to_num(0.0) for x in (q, k, v)), visible(tiles, shape.batch)[:, None])
    rows = torch.ones(shape.batch, 1, tiles.num_queries, dtype=torch.bool)
    if tiles.key_valid is not None and tiles.num_queries == tiles.num_keys:
        rows = tiles.key_valid[:, None]
    lse = want.lse.masked_fill(~rows, -torch.inf)
    torch.testing.assert_close(got.lse, lse, rtol=1e-10, atol=1e-10)
    assert got.out is not None
    out = want.out.masked_fill(~rows[..., None], 0.0)
    torch.testing.assert_close(got.out, out, rtol=1e-10, atol=1e-10)


@given(problems())
def test_mass_sums_to_the_queries_that_see_a_key(problem: tuple[Shape, Tiles]) -> None:
    shape, tiles = problem
    q, k, _ = shape.tensors(torch.float64)
    mass = exact_mass(q, k, None, tiles).mass
    total = mass.clamp(min=0).sum((2, 3))
    sees = visible(tiles, shape.batch).any(-1)
    if tiles.key_valid is not None and tiles.num_queries == tiles.num_keys:
        sees = sees & tiles.key_valid
    torch.testing.assert_close(total, sees.sum(-1, keepdim=True).double().expand_as(total))


def test_a_query_that_sees_nothing_gives_no_mass() -> None:
    """Log-sum-exp -inf: exp(-inf + inf) must not become NaN."""
    q, k, v = Shape(2, 1, 1, 40, 10, 8, 0).tensors()
    valid = torch.ones(2, 10, dtype=torch.bool)
    valid[1] = False
    tiles = Tiles(num_queries=40, num_keys=10, tile=16, causal=True, key_valid=valid, scale=1.0)
    got = exact_mass(q, k, v, tiles)
    assert got.out is not None
    assert not got.mass.isnan().any()
    assert (got.lse[0, 0, :30] == -torch.inf).all()
    assert (got.out[0, 0, :30] == 0).all()
    assert (got.mass[1] == -torch.inf).all()


def test_logits_beyond_exps_range_are_no_trouble() -> None:
    q, k, v = (1e3 * x for x in Shape(1, 1, 1, 64, 64, 8, 0).tensors())
    tiles = Tiles(num_queries=64, num_keys=64, tile=64, scale=1.0)
    got = exact_mass(q, k, v, tiles)
    torch.testing.assert_close(got.mass.sum(), torch.tensor(64.0))


@given(
    st.integers(1, 40), st.integers(1, 6), st.data(), st.sampled_from([torch.float32, torch.int64])
)
def test_the_best_keys_are_those_of_a_stable_sort(
    num_keys: int, rows: int, data: st.DataObject, kind: torch.dtype
) -> None:
    """Ties, many of them among few whole numbers, go to the lower index."""
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    score = torch.randint(0, 4, (rows, num_keys), generator=g).float()
    if kind == torch.float32:
        score = torch.rand(rows, num_keys, generator=g)
    width = data.draw(st.integers(1, num_keys))
    count = torch.randint(0, width + 1, (rows,), generator=g)
    got = top_keys(score, count, width)
    for row, num, line in zip(got.tolist(), count.tolist(), score.tolist(), strict=True):
        want = sorted(sorted(range(num_keys), key=lambda j: (-line[j], j))[:num])
        assert row[:num] == want
        assert num == 0 or set(row[num:]) <= {row[num - 1]}


@given(problems(), st.integers(1, 70))
def test_no_choice_of_as_many_keys_covers_more_mass(
    problem: tuple[Shape, Tiles], number: int
) -> None:
    """Pooled scores and chance among them: top-K of the sums maximises the sum of K."""
    shape, tiles = problem
    q, k, _ = shape.tensors(torch.float64)
    mass = exact_mass(q, k, None, tiles).mass
    pooled = torch.empty_like(mass)
    for part, score in stream_pooled(q, k, tiles):
        pooled[part.batch, part.head, part.tile] = score
    assert torch.equal(pooled == -torch.inf, mass == -torch.inf)
    count = (mass > -torch.inf).sum(-1).clamp(max=number)
    width = min(number, tiles.num_keys)
    chance = torch.rand(mass.shape, generator=shape.generator()).double()

    def covered(score: torch.Tensor) -> torch.Tensor:
        index = top_keys(score.masked_fill(mass == -torch.inf, -torch.inf), count, width)
        chosen = mass.gather(-1, index.long())
        return chosen.masked_fill(torch.arange(width) >= count[..., None], 0.0).sum(-1)

    best = covered(mass)
    assert (best >= covered(pooled) - 1e-12).all()
    assert (best >= covered(chance) - 1e-12).all()


@pytest.mark.parametrize(
    ("lines", "group", "length"),
    [(2, 1, 75_600), (8, 4, 75_600), (24, 1, 16_896), (40, 1, 364_000), (4, 1, 300)],
)
def test_scores_of_any_length_fit_64_mib(lines: int, group: int, length: int) -> None:
    """75,600 tokens, 2 heads, D 128: scores, their keys and values in float32 are 145 MiB."""
    tiles = group * -(-length // 128)
    at = chunk_sizes(lines, tiles, 128, length, 4)
    assert at[0] * at[1] * at[2] * 128 * 4 <= 64 << 20
    assert at[0] == 1 or at[1:] == (tiles, length)  # several heads only where all of each fits
    assert length > 75_600 or at[2] == length  # one pass over the keys
    extra = (64 << 20) * 3 + at[0] * length * 128 * 4 * 2
    assert extra < 1 << 30


def test_tiles_of_other_lengths_are_refused() -> None:
    q, k, _ = Shape(1, 1, 1, 10, 12, 8, 0).tensors()
    with pytest.raises(gs.PlanError, match="11 queries and 12 keys, but q has 10 and k 12"):
        exact_mass(q, k, None, Tiles(num_queries=11, num_keys=12, scale=1.0))
