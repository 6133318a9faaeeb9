"""Structured heads: their entropies, their structure, and who wins on which set."""

from __future__ import annotations

import math

import pytest
import torch

import gossamer as gs
from gossamer.evaluation.captures import Triple
from gossamer.evaluation.exact import dense_reference, row_entropy
from gossamer.evaluation.structured import (
    NAMED_SETS,
    Structure,
    StructuredSet,
    StructureError,
    structured_set,
)

SMALL = (2, 8, 8)  # 128 tokens: the entropy is solved on every row
MIDDLE = (4, 12, 16)
PLAIN = {"cluster": 0.0, "own_cluster": 0.0, "decay": 0.0, "noise": 0.0}


def logits_of(structure, *, grid=SMALL, **more):
    """Logits [N, N] float64 of a set of one head."""
    q, k, _ = StructuredSet(name="t", heads=(structure,), grid=grid, **more).make()
    return q[0].double() @ k[0].double().mT / math.sqrt(q.shape[-1])


def relative_errors(tensors, name, grid, **params):
    """Relative error per head of a method."""
    q, k, v = (x[None] for x in tensors)
    out = gs.sparse_attention(q, k, v, gs.get_method(name, **params), gs.Call(grid=grid))
    dense = dense_reference(*tensors, scale=None).out
    return (out[0] - dense).norm(dim=(1, 2)) / dense.norm(dim=(1, 2))


@pytest.mark.parametrize("name", list(NAMED_SETS))
def test_the_entropies_are_the_documented_ones(name):
    q, k, _ = structured_set(name, grid=SMALL).make()
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    for head, structure in zip(logits, NAMED_SETS[name], strict=True):
        share = row_entropy(head).mean().item() / math.log(k.shape[1])
        assert share == pytest.approx(structure.entropy, abs=1e-4)


@pytest.mark.parametrize("name", list(NAMED_SETS))
def test_the_entropies_of_more_rows_differ_by_sampling_alone(name):
    q, k, _ = structured_set(name, grid=MIDDLE).make()
    logits = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    for head, structure in zip(logits, NAMED_SETS[name], strict=True):
        shares = row_entropy(head) / math.log(k.shape[1])
        standard_error = shares.std().item() / math.sqrt(128)
        assert abs(shares.mean().item() - structure.entropy) < 4 * standard_error


def test_the_sets_lie_on_both_sides():
    highest = max(structure.entropy for structure in NAMED_SETS["low-entropy"])
    lowest = min(structure.entropy for structure in NAMED_SETS["high-entropy"])
    assert highest <= 0.4
    assert lowest >= 0.8


def test_few_keys_hold_the_mass_of_low_entropy_alone():
    for name, (low, high) in {"low-entropy": (0.9, 1.0), "high-entropy": (0.3, 0.8)}.items():
        q, k, _ = structured_set(name, grid=MIDDLE).make()
        p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        kept = p.topk(round(0.12 * k.shape[1])).values.sum(-1).mean(-1)  # [H]
        assert all(low < share < high for share in kept.tolist()), (name, kept)


def test_sampling_wins_on_high_entropy_and_top_k_on_low():
    for name, wins in {"high-entropy": True, "low-entropy": False}.items():
        tensors = structured_set(name, grid=MIDDLE).make()
        sampled = relative_errors(tensors, "instagen", MIDDLE, density=0.24)
        top = relative_errors(tensors, "svg2", MIDDLE, density=0.24)
        assert bool((sampled < top).all() if wins else sampled.mean() > top.mean()), name


def test_the_same_seed_gives_the_same_tensors_and_another_others():
    first, again = (structured_set("low-entropy", grid=SMALL).make() for _ in range(2))
    other = structured_set("low-entropy", grid=SMALL, seed=1).make()
    for x, y, z in zip(first, again, other, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)


def test_the_global_random_state_stays():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    structured_set("high-entropy", grid=SMALL).make()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_band_is_the_same_place_in_all_frames():
    frames, place = 4, 64
    logits = logits_of(Structure(entropy=0.7, **PLAIN, band=1.0), grid=(frames, 8, 8))
    same = logits.view(frames, place, frames, place).diagonal(dim1=1, dim2=3)  # [t, t', place]
    best = logits.amax(-1).view(frames, place)
    assert torch.allclose(same, best[:, None].expand_as(same), rtol=1e-4)


def test_decay_falls_off_with_the_distance_in_space_and_time():
    grid = (6, 10, 10)
    structure = Structure(entropy=0.7, **{**PLAIN, "decay": 1.0}, reach=(1.0, 2.0, 2.0))
    logits = logits_of(structure, grid=grid, head_dim=1024)  # many waves: hardly any side lobe
    axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    place = torch.stack(axes, -1).flatten(0, 2).double()
    distance = (place[:, None] - place) / torch.tensor([1.0, 2.0, 2.0])
    expected = (-distance.square().sum(-1) / 2).exp()
    correlation = torch.corrcoef(torch.stack([logits.flatten(), expected.flatten()]))[0, 1]
    assert correlation > 0.9


def test_sinks_stand_in_the_first_frame_and_draw_everyone():
    logits = logits_of(Structure(entropy=0.7, **PLAIN, sink=1.0), sinks=4)
    sinks = (logits > logits.mean()).all(0).nonzero().flatten()
    assert sinks.tolist() == [0, 16, 32, 48]


def test_clusters_are_regions_that_last():
    q, _, _ = StructuredSet(
        name="t",
        heads=(Structure(entropy=0.7, **{**PLAIN, "cluster": 1.0}),),
        grid=(4, 12, 12),
        clusters=9,
    ).make()
    # With all else off, queries of one cluster are equal, but for rounding.
    centres, label = (q[0] / q.abs().max()).round(decimals=4).unique(dim=0, return_inverse=True)
    assert 2 <= len(centres) <= 9
    label = label.view(4, 12, 12)
    shuffled = label.flatten()[torch.randperm(label.numel())].view_as(label)
    for axis in range(3):
        same = (label.diff(dim=axis) == 0).float().mean()
        assert same > 1.5 * (shuffled.diff(dim=axis) == 0).float().mean()


def test_values_scatter_as_asked():
    structure = Structure(entropy=0.7, value_spread=0.0, value_noise=3.0)
    tensors = StructuredSet(name="t", heads=(structure,), grid=(8, 16, 16)).make()
    # The common value and the drift add a quarter each to a variance of nine.
    assert tensors.v.var().item() == pytest.approx(9.5, rel=0.05)


@pytest.mark.parametrize("head_dim", [16, 17, 40, 128])
@pytest.mark.parametrize("grid", [(1, 1, 2), (3, 5, 7)])
def test_any_size(head_dim, grid):
    tensors = structured_set("low-entropy", grid=grid, head_dim=head_dim).make()
    for x in tensors:
        assert x.shape == (4, math.prod(grid), head_dim)
        assert x.dtype == torch.float32
        assert x.isfinite().all()


def test_a_set_is_a_capture_of_one_call():
    made = structured_set("low-entropy", grid=SMALL)
    capture = made.capture()
    assert capture.keys == ((0, 0, ""),)
    assert (capture.info.model, capture.info.grid) == ("low-entropy", SMALL)
    assert torch.equal(capture.read((0, 0, "")).q, made.make().q)
    assert isinstance(capture.read((0, 0, "")), Triple)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: structured_set("medium"), "known: high-entropy, low-entropy"),
        (lambda: structured_set("low-entropy", grid=(1000, 10, 11)), "100000 tokens"),
        (lambda: structured_set("low-entropy", grid=(1, 1, 1)), "2 to"),
        (lambda: structured_set("low-entropy", head_dim=8), "at least 16"),
        (lambda: StructuredSet(name="t", heads=()), "at least one head"),
        (lambda: StructuredSet(name="t", heads=NAMED_SETS["low-entropy"], clusters=0), "clusters"),
        (lambda: Structure(entropy=1.0), "between 0 and 1"),
        (lambda: Structure(entropy=0.5, band=-1.0), "band=-1.0"),
        (lambda: Structure(entropy=0.5, reach=(0.0, 1.0, 1.0)), "reach"),
        (lambda: Structure(entropy=0.5, noise=math.nan), "noise=nan"),
    ],
)
def test_what_makes_no_set_is_refused(make, word):
    with pytest.raises(StructureError, match=word):
        make()
