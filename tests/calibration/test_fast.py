"""FAST: fidelity and budgets against their definitions, row by row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gossamer as gs
from calibration.events import TOKENS, attention_map, show, tensors
from gossamer.calibration import FastObserver, Setup
from gossamer.calibration.fast import sampled_rows
from gossamer.select.fidelity import (
    ORIENTATIONS,
    Curves,
    bucket_steps,
    choose_levels,
    hellinger_fidelity,
    level_density,
    make_levels,
    solve_fast,
    solve_uniform,
    target_shape,
)
from gossamer.select.resize import token_order
from gossamer.select.saliency import entry_levels, threshold_map, threshold_mask

BLOCK = 8
BLOCKS = TOKENS // BLOCK
LEVELS = make_levels(BLOCKS)


def setup(**settings):
    plain = {"num_steps": 4, "num_buckets": 1, "measured": (0, 1, 2, 3), "block": BLOCK}
    return Setup(**plain | settings)


def random_maps(seed=0, heads=2):
    g = torch.Generator().manual_seed(seed)
    return threshold_map(torch.rand(3, 1, 1, heads, BLOCKS, BLOCKS, generator=g)).amin(0).half()


def by_definition(q, k, v, maps, rows, order=None, text=0):
    """Fidelity (eq. 3 and 4) and output error of each head and level, one row after the other."""
    p = attention_map(q, k)
    group = q.shape[1] // k.shape[1]
    values = v.double().repeat_interleave(group, 1)
    fidelity = torch.zeros(q.shape[1], len(LEVELS), dtype=torch.float64)
    error, energy = fidelity.clone(), torch.zeros(q.shape[1], dtype=torch.float64)
    for h in range(q.shape[1]):
        tokens = torch.arange(TOKENS) if order is None else order[h]
        for place, batch in itertools.product(rows.tolist(), range(q.shape[0])):
            row = p[batch, h, tokens[place]]
            dense = row @ values[batch, h]
            energy[h] += dense.square().sum()
            for index, level in enumerate(LEVELS.tolist()):
                mask = threshold_mask(maps[0, 0, h], level)[place // BLOCK]
                kept = torch.zeros(len(row), dtype=torch.bool)
                kept[tokens] = mask.repeat_interleave(BLOCK)
                kept[TOKENS : TOKENS + text] = True
                sparse = row * kept / (row * kept).sum()
                hellinger = (row.sqrt() - sparse.sqrt()).square().sum().sqrt() / math.sqrt(2)
                fidelity[h, index] += 1 - hellinger
                error[h, index] += (sparse @ values[batch, h] - dense).square().sum()
    number = len(rows) * q.shape[0]
    return fidelity / number, error / energy.sum()


def check(observer, want):
    """float32 probabilities against float64: roundings of a sum over all keys, under a root."""
    fidelity, error = (x[0, 0] for x in observer.curves())
    allowed = math.sqrt(TOKENS * torch.finfo(torch.float32).eps)
    assert (fidelity - want[0]).abs().max() <= allowed
    assert (error - want[1]).abs().max() <= allowed
    assert (fidelity[:, -1] == 1).all()  # density 1 has fidelity 1, exactly
    assert (fidelity.diff(dim=-1) >= 0).all()


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(2, 2, 1), (4, 2, 2)])
def test_curves_are_their_definition(heads, kv_heads, batch):
    q, k, v = tensors(1, heads, kv_heads, batch)
    maps = random_maps(heads=heads)
    fast = FastObserver(setup(), maps, LEVELS)
    show(fast, q, k, v)
    check(fast, by_definition(q, k, v, maps, sampled_rows(TOKENS, 16, 0, 0, 0)))


def test_chunks_change_nothing(monkeypatch):
    from gossamer.calibration import fast as module

    q, k, v = tensors(1, 4, 4, 2)
    curves = []
    for limit in (1 << 25, 1):
        monkeypatch.setattr(module, "_CHUNK_BYTES", limit)
        fast = FastObserver(setup(), random_maps(heads=4), LEVELS)
        show(fast, q, k, v)
        curves.append(fast.curves())
    torch.testing.assert_close(*(c[0] for c in curves), rtol=0, atol=1e-6)
    torch.testing.assert_close(*(c[1] for c in curves), rtol=0, atol=1e-6)


def test_text_is_always_read():
    q, k, v = tensors(2, tokens=TOKENS + 6)
    maps = random_maps()
    fast = FastObserver(setup(), maps, LEVELS)
    show(fast, q, k, v, text=(TOKENS, TOKENS + 6))
    rows = sampled_rows(TOKENS, 16, 0, 0, 0)
    check(fast, by_definition(q, k, v, maps, rows, text=6))


def test_heads_in_orders_of_their_own():
    q, k, v = tensors(3)
    maps, axes = random_maps(), torch.tensor([[5, 2]], dtype=torch.uint8)
    fast = FastObserver(setup(permute="axis"), maps, LEVELS, order=axes)
    show(fast, q, k, v)
    tokens = [token_order((2, 4, 6), a, torch.device("cpu")) for a in axes[0].tolist()]
    rows = sampled_rows(TOKENS, 16, 0, 0, 0)
    check(fast, by_definition(q, k, v, maps, rows, order=tokens))


def test_padded_rows_and_keys_count_nowhere():
    q, k, v = tensors(4)
    valid = (torch.arange(TOKENS) < 24)[None]
    padded = [x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (q, k, v)]
    maps = random_maps()
    fast = FastObserver(setup(), maps, LEVELS)
    show(fast, *padded, key_valid=valid)
    fidelity, error = fast.curves()
    assert fidelity.isfinite().all()
    assert error.isfinite().all()
    rows = [r for r in sampled_rows(TOKENS, 16, 0, 0, 0).tolist() if r < 24]
    p = attention_map(q, k, valid)[0]
    for h, (index, level) in itertools.product(range(2), enumerate(LEVELS.tolist())):
        mask = threshold_mask(maps[0, 0, h], level).repeat_interleave(BLOCK, 1)
        want = [float(hellinger_fidelity((p[h, r] * ~mask[r // BLOCK]).sum())) for r in rows]
        assert float(fidelity[0, 0, h, index]) == pytest.approx(sum(want) / len(want), abs=1e-3)


def test_calls_of_a_bucket_are_averaged():
    maps = random_maps()
    singles = []
    both = FastObserver(setup(), maps, LEVELS)
    for step in (0, 1):
        q, k, v = tensors(step)
        one = FastObserver(setup(), maps, LEVELS)
        for observer in (one, both):
            show(observer, q, k, v, step=step)
        singles.append(one.curves())
    for index in range(2):
        mean = (singles[0][index] + singles[1][index]) / 2
        torch.testing.assert_close(both.curves()[index], mean)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 9))
def test_one_row_of_each_stratum(num_tokens, number, seed):
    rows = sampled_rows(num_tokens, number, seed).tolist()
    number = min(number, num_tokens)
    assert len(rows) == number
    for index, row in enumerate(rows):
        assert index * num_tokens // number <= row < (index + 1) * num_tokens // number


# --- fidelity and targets ----------------------------------------------------------------------


def test_fidelity_needs_the_skipped_mass_alone():
    """1 - H of a distribution and its renormalised part, and no digits lost near 1."""
    p = torch.rand(50, dtype=torch.float64)
    p = p / p.sum()
    for kept in (1, 10, 49, 50):
        part = torch.where(torch.arange(50) < kept, p, 0.0)
        q = part / part.sum()
        want = 1 - ((p.sqrt() - q.sqrt()).square().sum() / 2).sqrt()
        got = hellinger_fidelity(p[kept:].sum())
        assert float(got) == pytest.approx(float(want), abs=1e-7)
    tiny = torch.tensor(1e-20, dtype=torch.float64)
    assert 1 - float(hellinger_fidelity(tiny)) == pytest.approx(math.sqrt(tiny / 2), abs=1e-16)
    assert float(hellinger_fidelity(torch.tensor(0.0))) == 1.0


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize(("omega", "gamma"), [(0.0, 1.0), (0.5, 3.0), (2.0, 0.5)])
def test_targets_are_equation_5(orientation, omega, gamma):
    """A(l, t) = 1 - [beta * (1 - x)^gamma + (1 - beta)], x = (l + w t) / (N_L + w N_T)."""
    num_layers, num_steps, beta = 3, 5, 0.7
    buckets = bucket_steps(num_steps, num_steps)
    got = beta * target_shape(
        num_layers, buckets, omega=omega, gamma=gamma, orientation=orientation
    )
    for step, layer in itertools.product(range(num_steps), range(num_layers)):
        position = layer + 1 if orientation.startswith("deep") else num_layers - layer
        time = num_steps - step if orientation.endswith("noisy") else step + 1
        x = (position + omega * time) / (num_layers + omega * num_steps)
        want = 1 - (beta * (1 - x) ** gamma + (1 - beta))
        assert float(got[step, layer]) == pytest.approx(want, abs=1e-12)


def test_buckets_stand_at_the_mean_of_their_steps():
    got = target_shape(2, bucket_steps(4, 2), omega=1.0, gamma=1.0, orientation="deep-noisy")
    want = [[(layer + time) / 6 for layer in (1, 2)] for time in (3.5, 1.5)]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))
    with pytest.raises(gs.PlanError, match="orientation='up'"):
        target_shape(2, [[0]], omega=1.0, gamma=1.0, orientation="up")


def test_each_head_gets_the_sparsest_level_that_reaches_the_target():
    fidelity = torch.rand(2, 3, 4, 6).double().sort(-1).values
    target = torch.rand(2, 3).double()
    got = choose_levels(fidelity, target)
    for t, layer, h in itertools.product(range(2), range(3), range(4)):
        able = [i for i in range(6) if fidelity[t, layer, h, i] >= target[t, layer]]
        assert got[t, layer, h] == (able[0] if able else 5)


def random_curves(seed, buckets=2, layers=3, heads=4, levels=10, steps=6):
    g = torch.Generator().manual_seed(seed)
    shape = (buckets, layers, heads, levels)
    rate = 1 + 6 * torch.rand(*shape[:-1], 1, generator=g, dtype=torch.float64)
    level = make_levels(levels)
    skipped = (1 - level).pow(rate)
    return Curves(
        fidelity=hellinger_fidelity(skipped),
        error=skipped.square() / heads,
        density=level.expand(shape).clone(),
        num_steps=steps,
    )


def total_density(curves, level):
    """Mean over steps, layers and heads, one after the other."""
    found = []
    for bucket, steps in enumerate(bucket_steps(curves.num_steps, curves.density.shape[0])):
        for _, layer, h in itertools.product(steps, *(range(n) for n in level.shape[1:])):
            found.append(float(curves.density[bucket, layer, h, level[bucket, layer, h]]))
    return sum(found) / len(found)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("density", [0.25, 0.4, 0.6, 0.9])
def test_a_solution_meets_the_density_by_a_surface_of_equation_5(density, orientation):
    curves = random_curves(1, layers=6, heads=8, levels=30)
    got = solve_fast(density, curves, orientation=orientation)
    assert got.density == pytest.approx(total_density(curves, got.level))
    assert abs(got.density - density) <= 0.01
    surface = got.beta * target_shape(
        6, bucket_steps(6, 2), omega=got.omega, gamma=got.gamma, orientation=orientation
    )
    assert torch.equal(got.level, choose_levels(curves.fidelity, surface))
    # No other surface of the grid at this density has a lower error.
    chosen = curves.error.gather(-1, got.level[..., None])[..., 0].sum(-1).mean()
    assert got.error == pytest.approx(float(chosen))


def test_the_kept_solution_is_the_best_of_all_surfaces():
    """Every table that a surface of the grid can give is tried: between two breakpoints of beta."""
    from gossamer.select import fidelity as module

    curves = random_curves(2, layers=3, heads=2)
    nearest = []
    for multiple, gamma in itertools.product(module._OMEGAS, module._GAMMAS):
        omega = multiple * 3 / curves.num_steps
        shape = target_shape(
            3, bucket_steps(6, 2), omega=omega, gamma=gamma, orientation="deep-noisy"
        )
        breaks = (curves.fidelity / shape[..., None, None]).flatten().sort().values
        breaks = torch.cat([torch.zeros(1), breaks[breaks < 1], torch.ones(1)])
        tables = [
            choose_levels(curves.fidelity, beta * shape) for beta in (breaks[1:] + breaks[:-1]) / 2
        ]
        gaps = [abs(total_density(curves, table) - 0.5) for table in tables]
        best = tables[gaps.index(min(gaps))]
        error = curves.error.gather(-1, best[..., None])[..., 0].sum(-1).mean()
        nearest.append((min(gaps), float(error)))
    limit = max(module._NEAR, min(gap for gap, _ in nearest))
    want = min(error for gap, error in nearest if gap <= limit + 1e-12)
    assert solve_fast(0.5, curves).error == pytest.approx(want)


@pytest.mark.parametrize("solve", [solve_fast, solve_uniform])
def test_density_one_is_the_last_level(solve):
    curves = random_curves(3)
    got = solve(1.0, curves)
    assert (got.level == 9).all()
    assert got.density == pytest.approx(1.0)
    assert got.error == 0.0


def test_uniform_budgets_are_one_level_or_the_next():
    curves = random_curves(4)
    tables = [solve_uniform(d, curves) for d in (0.05, 0.1, 0.25, 0.33, 0.5, 0.77)]
    for density, table in zip((0.05, 0.1, 0.25, 0.33, 0.5, 0.77), tables, strict=True):
        assert table.level.max() - table.level.min() <= 1
        assert table.density == pytest.approx(total_density(curves, table.level))
        assert density < 0.1 or abs(table.density - density) <= 0.1 / 12  # a level of one head
    for one, two in itertools.pairwise(tables):
        assert (one.level <= two.level).all()


@pytest.mark.parametrize("num_tokens", [48, 45])
def test_densities_count_token_pairs(num_tokens):
    maps = random_maps()[0, 0]
    entry = entry_levels(maps, LEVELS)
    got = level_density(entry, len(LEVELS), num_tokens, BLOCK)
    for h, (index, level) in itertools.product(range(2), enumerate(LEVELS.tolist())):
        mask = threshold_mask(maps[h], level)
        tokens = mask.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        want = tokens[:num_tokens, :num_tokens].double().mean()
        assert float(got[h, index]) == pytest.approx(float(want))
