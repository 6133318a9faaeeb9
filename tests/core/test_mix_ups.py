"""Arguments of another kind: one line that says what came and what was expected, no contents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import gossamer as gs
from gossamer.errors import described

Q, K, V = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).unbind()
METHOD, CALL = gs.Dense(), gs.Call()
PLAN = METHOD.plan(Q, K, V)
RECIPE = gs.Recipe(method=METHOD)
SESSION = gs.Session(RECIPE)
ARRAY = np.ones((1, 2, 64, 16), np.float32)
ORDER = gs.WaveAlign()
BLOCKS = gs.KeyBlocks.from_mask(torch.ones(1, 1, 1, 2, dtype=torch.bool), block=32)
LISTS = torch.arange(4).view(1, 1, 1, 4)

# What may stand in the place of something else.
ODD = {
    "dict": {"layer": 1},
    "array": ARRAY,
    "tensor": Q,
    "flat": torch.arange(3),
    "mask": torch.ones(4, 4, dtype=torch.bool),
    "plan": PLAN,
    "method": METHOD,
    "class": gs.SVG2,
    "call": CALL,
    "recipe": RECIPE,
    "name": "svg2",
    "text": "x" * 5000,
    "tensors": [Q, K, V],
    "ragged": [[1, 2], [3]],
    "none": None,
    "number": 1.5,
}


def tokens(**parts: object) -> gs.KeyTokens:
    given = {"start": PLAN.keys.start, "count": PLAN.keys.count, "index": PLAN.keys.index}
    return gs.KeyTokens(**{**given, **parts})


def plan(**parts: object) -> gs.SparsePlan:
    given = {"num_queries": 64, "num_keys": 64, "tile": 128, "keys": PLAN.keys}
    return gs.SparsePlan(**{**given, **parts})


# Each takes one of ODD in one place; with it the kinds that this place really takes.
PLACES: dict[str, tuple[Callable[[object], object], set[str]]] = {
    "attend q": (lambda x: gs.attend(x, K, V, PLAN), {"tensor"}),
    "attend v": (lambda x: gs.attend(Q, K, x, PLAN), {"tensor"}),
    "attend plan": (lambda x: gs.attend(Q, K, V, x), {"plan"}),
    "attend scale": (lambda x: gs.attend(Q, K, V, PLAN, scale=x), {"none", "number"}),
    "attend kernel": (lambda x: gs.attend(Q, K, V, PLAN, kernel=x), {"text"}),
    "sparse k": (lambda x: gs.sparse_attention(Q, x, V, METHOD), {"tensor"}),
    "sparse method": (lambda x: gs.sparse_attention(Q, K, V, x), {"method", "text"}),
    "sparse call": (lambda x: gs.sparse_attention(Q, K, V, METHOD, x), {"call", "none"}),
    "plan q": (lambda x: METHOD.plan(x, K, V), {"tensor"}),
    "plan call": (lambda x: METHOD.plan(Q, K, V, x), {"call", "none"}),
    "plan state": (lambda x: gs.SVG2().plan(Q, K, V, state=x), {"dict", "none"}),
    "check_call": (METHOD.check_call, {"call", "none"}),
    "anchor call": (lambda x: gs.MCSparse().anchor(Q, K, V, x), {"call", "none"}),
    "session": (gs.Session, {"recipe"}),
    "session q": (lambda x: SESSION.attention(x, K, V), {"tensor"}),
    "session call": (lambda x: SESSION.attention(Q, K, V, x), {"call", "none"}),
    "explain q": (lambda x: gs.explain_kernels(x, K, V, PLAN), {"tensor"}),
    "explain plan": (lambda x: gs.explain_kernels(Q, K, V, x), {"plan"}),
    "call layer": (lambda x: gs.Call(layer=x), set()),
    "call branch": (lambda x: gs.Call(branch=x), {"name", "text"}),
    "call grid": (lambda x: gs.Call(grid=x), {"none"}),
    "call text": (lambda x: gs.Call(text=x), {"none"}),
    "call heads": (lambda x: gs.Call(heads=x), {"none"}),
    "call key_valid": (lambda x: gs.Call(key_valid=x), {"none", "mask"}),
    "call causal": (lambda x: gs.Call(causal=x), set()),
    "call scale": (lambda x: gs.Call(scale=x), {"none", "number"}),
    "recipe method": (lambda x: gs.Recipe(method=x), {"method"}),
    "recipe steps": (lambda x: gs.Recipe(method=METHOD, dense_steps=x), {"name", "text"}),
    "recipe reuse": (lambda x: gs.Recipe(method=METHOD, reuse=x), {"none"}),
    "recipe order": (lambda x: gs.Recipe(method=METHOD, order=x), {"none"}),
    "recipe kernel": (lambda x: gs.Recipe(method=METHOD, kernel=x), set()),
    "recipe load": (gs.Recipe.load, {"name", "text"}),
    "recipe toml": (gs.Recipe.from_toml, {"name", "text"}),
    "recipe dict": (gs.Recipe.from_dict, {"dict"}),
    "reuse every": (lambda x: gs.Reuse(every=x), set()),
    "budgets groups": (lambda x: gs.Budgets(profile="a", groups=x), set()),
    "density": (lambda x: gs.get_method("svg2", density=x), {"none"}),
    "tile": (lambda x: gs.BlockTopK(tile=x), set()),
    "sink": (lambda x: gs.SlidingWindow(sink=x), set()),
    "get_method": (gs.get_method, {"name", "text"}),
    "get_order": (gs.get_order, {"name", "text"}),
    "order": (ORDER.order, {"plan"}),
    "decide": (ORDER.decide, {"plan"}),
    "wave rank": (lambda x: gs.WaveAlign(rank=x), set()),
    "plan keys": (lambda x: plan(keys=x), set()),
    "plan tile": (lambda x: plan(tile=x), set()),
    "plan query_index": (lambda x: plan(query_index=x), {"none"}),
    "plan tile_row": (lambda x: plan(tile_row=x), {"none"}),
    "plan key_valid": (lambda x: plan(key_valid=x), {"none", "mask"}),
    "plan window": (lambda x: plan(window=x), {"none"}),
    "refresh": (lambda x: VIRTUAL.refresh(x, V), {"tensor"}),
    "blocks block": (
        lambda x: gs.KeyBlocks(block=x, count=BLOCKS.count, index=BLOCKS.index),
        set(),
    ),
    "blocks index": (lambda x: gs.KeyBlocks(block=32, count=BLOCKS.count, index=x), set()),
    "from_mask": (lambda x: gs.KeyBlocks.from_mask(x, block=32), set()),
    "from_bits": (lambda x: gs.KeyBlocks.from_bits(x, block=32, num_keys=64), {"tensor"}),
    "num_blocks": (BLOCKS.num_blocks, set()),
    "tokens start": (lambda x: tokens(start=x), set()),
    "tokens index": (lambda x: tokens(index=x), set()),
    "tokens weight": (lambda x: tokens(log_weight=x), {"none", "flat"}),
    "from_lists": (gs.KeyTokens.from_lists, {"tensor"}),
    "from_lists count": (lambda x: gs.KeyTokens.from_lists(LISTS, count=x), {"none"}),
    "from_lists weight": (lambda x: gs.KeyTokens.from_lists(LISTS, log_weight=x), {"none"}),
}
VIRTUAL = gs.SparsePlan(
    num_queries=64,
    num_keys=64,
    tile=128,
    keys=gs.KeyTokens(
        start=PLAN.keys.start,
        count=PLAN.keys.count,
        index=PLAN.keys.index,
        extra_k=K[:, :, :1],
        extra_v=V[:, :, :1],
        extra_of=torch.zeros(1, 2, 64, dtype=torch.int32),
    ),
)


@pytest.mark.parametrize(
    ("place", "odd"),
    [(place, odd) for place, (_, takes) in PLACES.items() for odd in ODD if odd not in takes],
)
def test_it_is_refused_in_one_line_without_contents(place: str, odd: str) -> None:
    take, _ = PLACES[place]
    with pytest.raises(gs.GossamerError) as caught:
        take(ODD[odd])
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    assert "tensor(" not in message
    assert "array(" not in message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: METHOD.plan(ARRAY, K, V), r"q is a numpy.ndarray of shape \(1, 2, 64, 16\) and f"),
        (lambda: METHOD.plan(Q, K, V, {"layer": 1}), r"call is a dict of 1: .*Call\(\*\*facts\)"),
        (lambda: gs.attend(PLAN, Q, K, V), "q is a gossamer.SparsePlan: must be a torch.Tensor"),
        (lambda: gs.attend(Q, K, V, METHOD), "plan is a gossamer.Dense, must be a SparsePlan"),
        (
            lambda: gs.sparse_attention(Q, K, V, PLAN),
            "method=a gossamer.SparsePlan is not a method: gossamer.attend runs a plan",
        ),
        (
            lambda: gs.sparse_attention(Q, K, V, gs.SVG2),
            r"method=the class SVG2 is not a method: make one, SVG2\(…\)",
        ),
        (lambda: gs.sparse_attention(METHOD, Q, K, V), r"method=a torch.Tensor of shape \(1, 2"),
        (
            lambda: gs.KeyBlocks.from_mask(torch.ones(4, 4, dtype=torch.bool), block=32),
            r"mask has shape \(4, 4\), must be \[B\|1, H\|1, R, num_blocks\]",
        ),
        (
            lambda: gs.KeyTokens.from_lists([[1, 2], [3]]),
            r"index is a list of 2, must be a tensor .*pad rows to one length",
        ),
        (
            lambda: gs.KeyTokens.from_lists(LISTS, log_weight=torch.zeros(1, 1, 2, 4)),
            r"log_weight has shape \(1, 1, 2, 4\), index \(1, 1, 1, 4\)",
        ),
        (lambda: plan(keys=LISTS), r"SparsePlan.keys is a torch.Tensor of shape .*KeyBlocks or"),
        (lambda: plan(tile=0), "SparsePlan.tile is 0, must be an integer >= 1"),
    ],
)
def test_it_says_what_came_and_what_was_expected(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        wrong()


def test_values_are_described_by_what_they_are() -> None:
    assert described("x" * 5000) == "'" + "x" * 58 + "…"
    assert described([1, 2.5, "a"]) == "[1, 2.5, 'a']"
    assert described(list(range(1000))) == "a list of 1000"
    assert described([Q]) == "a list of 1"
    assert described(ARRAY) == "a numpy.ndarray of shape (1, 2, 64, 16) and float32"
    assert described(torch.zeros(2)) == "a torch.Tensor of shape (2,) and torch.float32"
    assert described(None) == "None"


def test_single_numbers_of_other_libraries_are_numbers() -> None:
    call = gs.Call(layer=np.int64(2), step=torch.tensor(1), scale=np.float32(0.5), causal=np.True_)
    assert (call.layer, call.step, call.scale) == (2, 1, 0.5)
    assert METHOD.plan(Q, K, V, call).causal
    gs.attend(Q, K, V, PLAN, scale=np.float32(0.5))
