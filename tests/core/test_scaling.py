"""ScalingAttention: measured and profiled plans against their definition."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch

import gossamer as gs
from calibration.profiles import BLOCK, GRID, HEADS, LAYERS, STEPS, make_profile
from gossamer.methods.scaling import ScalingAttention
from gossamer.select.profile import read_profile
from gossamer.select.resize import AXIS_ORDERS
from oracle import assert_matches, attention, tolerance

TOKENS = 96  # GRID


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_profile(tmp_path_factory.mktemp("profile") / "p.safetensors")


@pytest.fixture(scope="module")
def axis_profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_profile(tmp_path_factory.mktemp("profile") / "axis.safetensors", permute="axis")


def tensors(tokens=TOKENS, heads=HEADS, batch=1, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, heads, tokens, dim, generator=g).unbind()


def call(layer=0, step=0, grid=GRID, **facts):
    return gs.Call(layer=layer, num_layers=LAYERS, step=step, num_steps=STEPS, grid=grid, **facts)


def block_mask(plan, block=BLOCK):
    """The plan's weights as whether any pair of each square is read, [B, H, R, C]."""
    read = plan.weights() > 0
    pad = -read.shape[-1] % block
    read = torch.nn.functional.pad(read, (0, pad, 0, pad))
    return read.unflatten(3, (-1, block)).unflatten(2, (-1, block)).any((3, 5))


# --- without a profile -------------------------------------------------------------------------


def best_blocks(q, k, count, block):
    """The `count` blocks of most probability in each row, by plain loops."""
    group = q.shape[1] // k.shape[1]
    p = (q.double() @ k.double().repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5).softmax(-1)
    rows = -(-q.shape[2] // block)
    mask = torch.zeros(*q.shape[:2], rows, rows, dtype=torch.bool)
    for b, h, u in itertools.product(*(range(n) for n in mask.shape[:3])):
        tile = p[b, h, u * block : (u + 1) * block]
        mass = [float(tile[:, v * block : (v + 1) * block].sum()) for v in range(rows)]
        for v in sorted(range(rows), key=lambda v: -mass[v])[: count(rows)]:
            mask[b, h, u, v] = True
    return mask


@pytest.mark.parametrize(("tokens", "kv_heads", "batch"), [(96, 4, 1), (131, 2, 2), (40, 1, 1)])
@pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 1.0])
def test_p_keeps_each_rows_best_share(tokens, kv_heads, batch, p):
    q, k, v = tensors(tokens, batch=batch)
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    plan = ScalingAttention(p=p, block=16).plan(q, k, v)
    plan.validate()
    want = best_blocks(q, k, lambda n: max(1, int(p * n + 1e-6)), 16)
    assert torch.equal(block_mask(plan, 16), want)


@pytest.mark.parametrize("density", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2048, 2048), (1500, 2113)])
def test_the_asked_density_is_met(density, causal, num_queries, num_keys):
    q, k = torch.randn(1, 2, num_queries, 16), torch.randn(1, 2, num_keys, 16)
    plan = gs.get_method("scaling", density=density).plan(q, k, k, gs.Call(causal=causal))
    plan.validate()
    assert abs(plan.density - density) <= 0.02


def test_rows_choose_by_mass_and_not_by_means():
    """One key that takes all attention is found, though its block's mean score is the lowest."""
    q = torch.zeros(1, 1, 512, 8)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 512, 8)
    k[..., 256:384, 0] = -4.0
    k[..., 300, 0] = 60.0
    plan = ScalingAttention(p=0.25).plan(q, k, k)
    assert block_mask(plan, 128)[0, 0].tolist() == [[False, False, True, False]] * 4
    assert not block_mask(gs.BlockTopK(blocks=1).plan(q, k, k), 128)[0, 0, :, 2].any()


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_a_causal_p_chooses_among_visible_blocks(p):
    q, k, v = tensors(200)
    plan = ScalingAttention(p=p, block=16).plan(q, k, v, gs.Call(causal=True))
    plan.validate()
    mask = block_mask(plan, 16)
    rows = torch.arange(13)
    assert torch.equal(mask.sum(-1)[0, 0], (p * (rows + 1) + 1e-6).long().clamp(min=1))
    assert mask[..., rows, rows].all()  # the first queries of a tile see nothing behind it


def test_memory_holds_no_square():
    from core.test_memory import peak_growth_mib

    grown = peak_growth_mib(
        """
        from gossamer.methods.scaling import ScalingAttention
        q = torch.randn(1, 1, 16384, 16)
        before = peak()
        ScalingAttention(density=0.05).plan(q, q, q)
        print(peak() - before)
        """
    )
    assert grown < 200  # the scores alone would be 1 GiB


# --- with a profile ----------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize(("layer", "step"), [(0, 0), (1, 3), (1, 4), (0, 7)])
def test_a_profiled_mask_is_the_maps_comparison(profile, p, layer, step):
    plan = ScalingAttention(profile=profile, p=p).plan(*tensors(), call(layer, step))
    plan.validate()
    maps = read_profile(profile).thresholds(step // 4, layer, GRID).float()
    want = torch.zeros(maps.shape, dtype=torch.bool)
    for h, u, v in itertools.product(*(range(n) for n in maps.shape)):
        bound = max(torch.tensor(p).half().float(), maps[h, u].min())
        want[h, u, v] = maps[h, u, v] <= bound
    assert torch.equal(block_mask(plan)[0], want)
    assert plan.batch == 1


def test_the_plan_is_static(profile):
    method = ScalingAttention(profile=profile)
    session = gs.Session(gs.Recipe(method=method, min_tokens=0))
    for step in range(STEPS):
        session.attention(*tensors(seed=step), call(step=step))
    reasons = [record.reason for record in session.records]
    assert reasons == (["", *["static plan"] * 3]) * 2  # two buckets of four steps
    assert ScalingAttention().static_key(call()) is None


def test_a_longer_generation_is_cut_into_the_same_buckets(profile):
    method = ScalingAttention(profile=profile)
    keys = [method.static_key(gs.Call(layer=0, step=step, num_steps=30))[1] for step in range(30)]
    assert keys == [0] * 15 + [1] * 15


@pytest.mark.parametrize("budgets", ["fast", "uniform"])
def test_the_density_is_that_of_the_whole_generation(profile, budgets):
    def mean_density(density, **params):
        method = ScalingAttention(profile=profile, density=density, budgets=budgets, **params)
        plans = [
            method.plan(*tensors(), call(layer, step))
            for layer, step in itertools.product(range(LAYERS), range(STEPS))
        ]
        return sum(plan.density for plan in plans) / len(plans)

    got = [mean_density(density) for density in (0.3, 0.5, 0.7, 1.0)]
    assert got == sorted(got)
    assert got[-1] == 1.0
    for density, mean in zip((0.3, 0.5, 0.7), got, strict=False):
        assert abs(mean - density) <= 0.02


def test_density_one_is_dense(profile, axis_profile):
    q, k, v = tensors(batch=2)
    for path, permute in ((profile, "none"), (axis_profile, "axis")):
        method = ScalingAttention(profile=path, density=1.0, permute=permute)
        plan = method.plan(q, k, v, call())
        assert plan.density == 1.0
        assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))


def test_another_resolution_is_resized_reported_and_still_dense_at_one(profile):
    grid = (3, 7, 9)
    q, k, v = tensors(3 * 7 * 9)
    with pytest.warns(
        UserWarning, match=r"made on the grid \(4, 4, 6\), this call has \(3, 7, 9\)"
    ):
        plan = ScalingAttention(profile=profile, density=1.0).plan(q, k, v, call(grid=grid))
    assert_matches(gs.attend(q, k, v, plan), attention(q, k, v), tolerance(q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        ScalingAttention(profile=profile, p=0.3).plan(q, k, v, call(grid=grid))


@pytest.mark.filterwarnings("ignore:.*is resized|.*are resized")
@pytest.mark.parametrize("density", [0.6, 0.8])
def test_budgets_are_solved_again_at_another_resolution(profile, density):
    """The resized maps are denser at every p, since whatever an active block touches is active."""
    grid = (8, 8, 12)
    q, k, v = tensors(8 * 8 * 12)

    def mean_density(method):
        plans = [
            method.plan(q, k, v, call(layer, step, grid))
            for layer, step in itertools.product(range(LAYERS), (0, STEPS - 1))
        ]
        return sum(plan.density for plan in plans) / len(plans)

    assert mean_density(ScalingAttention(profile=profile, p=density)) > density + 0.05
    assert abs(mean_density(ScalingAttention(profile=profile, density=density)) - density) <= 0.02


def test_axis_orders_cut_blocks_along_their_axis(axis_profile):
    """Each head's mask is its map's, in that head's own order of the tokens."""
    profile = read_profile(axis_profile)
    plan = ScalingAttention(profile=axis_profile, p=0.4, permute="axis").plan(*tensors(), call(1))
    plan.validate()
    read = plan.weights()[0] > 0
    used = set()
    maps = profile.thresholds(0, 1, GRID)
    for head in range(HEADS):
        axes = int(profile.order[1, head])
        used.add(axes)
        places = list(itertools.product(*(range(GRID[a]) for a in AXIS_ORDERS[axes])))
        token = []
        for place in places:
            at = dict(zip(AXIS_ORDERS[axes], place, strict=True))
            token.append((at[0] * GRID[1] + at[1]) * GRID[2] + at[2])
        mask = maps[head] <= torch.maximum(
            torch.tensor(0.4).half(), maps[head].amin(-1, keepdim=True)
        )
        for i, j in itertools.product(range(0, TOKENS, 5), range(TOKENS)):
            assert read[head, token[i], token[j]] == mask[i // BLOCK, j // BLOCK]
    assert len(used) > 1


@pytest.mark.parametrize("permute", ["none", "axis"])
def test_padding_of_a_profiled_call(profile, axis_profile, permute):
    path = profile if permute == "none" else axis_profile
    q, k, v = tensors(batch=2)
    valid = torch.arange(TOKENS) < torch.tensor([[TOKENS], [5]])
    method = ScalingAttention(profile=path, p=0.05, permute=permute)
    plan = method.plan(q, k, v, call(key_valid=valid))
    plan.validate()
    read = plan.weights() > 0
    assert read.any(-1).all()
    assert not read[1, :, :, 5:].any()
    alone = method.plan(q, k, v, call()).weights() > 0
    assert torch.equal(read[0], alone[0])


@pytest.mark.parametrize("permute", ["none", "axis"])
def test_text_rows_and_columns_are_full(profile, axis_profile, permute):
    path = profile if permute == "none" else axis_profile
    q, k, v = tensors(TOKENS + 7)
    method = ScalingAttention(profile=path, p=0.2, permute=permute)
    plan = method.plan(q, k, v, call(text=(0, 7)))
    plan.validate()
    read = plan.weights()[0] > 0
    assert read[:, :7].all()
    assert read[:, :, :7].all()
    alone = method.plan(*(x[:, :, 7:] for x in (q, k, v)), call()).weights()[0] > 0
    assert torch.equal(read[:, 7:, 7:], alone)


def test_a_part_of_the_heads_takes_its_part_of_the_profile(profile):
    q, k, v = tensors()
    method = ScalingAttention(profile=profile, density=0.4)
    whole = method.plan(q, k, v, call()).weights()
    part = method.plan(
        *(x[:, 2:] for x in (q, k, v)), call(head_offset=2, num_heads=HEADS)
    ).weights()
    assert torch.equal(part[0], whole[0, 2:])


def test_a_rewritten_profile_is_read_again(tmp_path: Path):
    path = make_profile(tmp_path / "p.safetensors", seed=1)
    method = ScalingAttention(profile=path, p=0.3)
    first = method.plan(*tensors(), call()).weights()
    make_profile(tmp_path / "p.safetensors", seed=2)
    assert not torch.equal(method.plan(*tensors(), call()).weights(), first)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"density": 0.5, "p": 0.5}, "density=0.5 or p=0.5"),
        ({"density": 0.0}, "density=0.0"),
        ({"p": 1.5}, "p=1.5"),
        ({"budgets": "slow"}, r"budgets='slow' must be one of .*fast.*uniform"),
        ({"orientation": "up"}, r"orientation='up' must be one of .*deep-noisy"),
        ({"permute": "rows"}, r"permute='rows' must be one of .*axis"),
        ({"permute": "axis"}, r"needs a profile .*--permute axis"),
        ({"block": 0}, "block=0"),
    ],
)
def test_bad_parameters(params, words):
    with pytest.raises(gs.PlanError, match=words):
        ScalingAttention(**params)


def test_an_unknown_profile_says_how_to_make_one():
    with pytest.raises(gs.PlanError, match=r"no profile 'no-such-model': .*gossamer calibrate"):
        ScalingAttention(profile="no-such-model")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 6}, r"expected num_heads=6, but the profile has 4"),
        ({"num_layers": 3}, r"expected num_layers=3, but the profile has 2"),
        ({"num_layers": None, "layer": 2}, r"expected layer 2 .* has 2 layers"),
        ({"method": {"block": 32}}, r"expected block=32, but the profile has 16"),
        ({"method": {"permute": "axis"}}, r"expected permute='axis', but the profile has 'none'"),
    ],
)
def test_a_profile_of_another_model_is_refused(profile, changes, words):
    place = {"layer": 0, "num_layers": LAYERS} | {
        key: changes[key] for key in ("layer", "num_layers") if key in changes
    }
    at = gs.Call(grid=GRID, **place)
    q, k, v = tensors(heads=changes.get("heads", HEADS))
    with pytest.raises(gs.ProfileMismatchError, match=words):
        ScalingAttention(profile=profile, **changes.get("method", {})).plan(q, k, v, at)


def test_a_profile_needs_a_grid_and_no_causal_mask(profile):
    method = ScalingAttention(profile=profile)
    with pytest.raises(gs.PlanError, match=r"made on the grid \(4, 4, 6\).* pass call.grid"):
        method.plan(*tensors(), call(grid=None))
    with pytest.raises(gs.UnsupportedError, match="bidirectional"):
        method.plan(*tensors(), call(causal=True))


def test_the_recipe_round_trips(profile):
    for method in (ScalingAttention(profile=profile, p=0.3), ScalingAttention(density=0.2)):
        recipe = gs.Recipe(method=method)
        assert gs.Recipe.from_toml(recipe.to_toml()) == recipe
