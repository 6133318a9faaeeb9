"""Calls and tensors that contradict themselves are refused, with the numbers."""

import pytest
import torch

import gossamer as gs

X = torch.randn(2, 4, 100, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer": -1}, "call.layer=-1: must be at least 0"),
        ({"layer": 4, "num_layers": 4}, "call.layer=4: must be at least 0 and below num_layers=4"),
        ({"step": 10, "num_steps": 10}, "call.step=10: .* below num_steps=10"),
        ({"grid": (1, 2)}, r"grid=\(1, 2\): must be \(frames, rows, columns\)"),
        ({"grid": (0, 2, 3)}, "each >= 1"),
        ({"text": (5, 3)}, r"text=\(5, 3\): must be \(start, stop\)"),
        ({"scale": float("nan")}, "scale=nan: must be finite"),
        ({"head_offset": -2}, "head_offset=-2: must be at least 0"),
        ({"key_valid": torch.ones(2, 100)}, r"dtype torch.float32: must be \[B, S\] bool"),
        ({"key_valid": torch.ones(100, dtype=torch.bool)}, r"shape \(100,\)"),
        ({"key_valid": [[True] * 100]}, "key_valid is a list"),
        ({"layer": "0"}, "call.layer='0': must be an integer"),
        ({"step": 1.5}, "call.step=1.5: must be an integer"),
        ({"step": None}, "call.step=None: must be an integer"),
        ({"num_steps": "9"}, "call.num_steps='9': must be an integer"),
        ({"seed": 2**70}, "must fit 64 bits"),
        ({"branch": None}, "call.branch=None: must be a name"),
        ({"scale": "x"}, "call.scale='x': must be a number"),
        ({"grid": (1.0, 10, 10)}, "integers"),
        ({"grid": 5}, "call.grid=5: must be"),
        ({"text": (3,)}, r"text=\(3,\): must be \(start, stop\)"),
        ({"text": (1, 2, 3)}, r"must be \(start, stop\)"),
        ({"heads": ()}, "must be global indices"),
        ({"num_heads": 0}, "call.num_heads=0: must be at least 1"),
    ],
)
def test_a_call_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.Call(**fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            gs.Call(grid=(4, 5, 4), text=(0, 19)),
            r"grid 4\*5\*4 = 80 tokens plus 19 text tokens is 99, but the sequence has 100",
        ),
        (gs.Call(text=(90, 101)), r"text=\(90, 101\) ends past the 100 tokens"),
        (
            gs.Call(key_valid=torch.ones(2, 99, dtype=torch.bool)),
            r"key_valid has shape \(2, 99\): must be \[2, 100\]",
        ),
        (gs.Call(key_valid=torch.ones(3, 100, dtype=torch.bool)), r"must be \[2, 100\]"),
        (gs.Call(heads=(0, 1)), "names 2 heads, but q has 4"),
        (gs.Call(num_heads=2), "num_heads=2 is the global number, but .* up to number 4"),
        (gs.Call(head_offset=3, num_heads=6), "up to number 7"),
        (gs.Call(heads=(0, 1, 2, 9), num_heads=8), "up to number 10"),
    ],
)
def test_a_call_that_does_not_fit_its_tensors(call: gs.Call, message: str) -> None:
    with pytest.raises(gs.PlanError, match=message):
        gs.Dense().plan(X, X, X, call)


def test_lists_are_as_good_as_tuples() -> None:
    """From JSON, say; static plans are kept under the call's facts, and lists cannot be hashed."""
    call = gs.Call(grid=[4, 5, 4], text=[0, 20], heads=[0, 1, 2, 3])
    assert (call.grid, call.text, call.heads) == ((4, 5, 4), (0, 20), (0, 1, 2, 3))
    session = gs.Session(gs.Recipe(method=gs.get_method("radial", density=0.5), min_tokens=0))
    session.attention(X, X, X, call)
    assert session.records[0].path == "sparse"


def test_a_grid_describes_self_attention() -> None:
    with pytest.raises(gs.PlanError, match="there are 50 queries and 100 keys"):
        gs.Dense().plan(X[:, :, :50], X, X, gs.Call(grid=(4, 5, 5)))


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ((X[0], X, X), gs.PlanError, "each must be .batch, heads, tokens, head dim"),
        ((X, X, X[:, :, :50]), gs.PlanError, "k and v must have the same shape"),
        ((X[:1], X, X), gs.PlanError, "batch and head dim of q and k must agree"),
        ((X, X[..., :4], X[..., :4]), gs.PlanError, "batch and head dim"),
        ((X, X[:, :3], X[:, :3]), gs.PlanError, "4 query heads are not a multiple of 3 KV heads"),
        ((X.half(), X, X), TypeError, "q is torch.float16, k is torch.float32"),
        ((X.long(), X.long(), X.long()), TypeError, "cast them to one floating dtype"),
        ((X, X.to("meta"), X.to("meta")), gs.PlanError, "q is on cpu, k on meta"),
    ],
)
def test_tensors_that_are_not_one_call(
    tensors: tuple[torch.Tensor, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        gs.sparse_attention(*tensors, gs.Dense())


def test_errors_are_also_the_built_in_ones() -> None:
    assert issubclass(gs.PlanError, ValueError)
    assert issubclass(gs.RecipeError, ValueError)
    assert issubclass(gs.UnsupportedError, ValueError)
    assert issubclass(gs.MissingExtraError, ImportError)
    assert str(gs.MissingExtraError("report", "jinja2")) == (
        'needs jinja2: pip install "gossamer[report]"'
    )


def test_unsupported_keeps_its_reasons_apart() -> None:
    error = gs.UnsupportedError(["no this", "no that"])
    assert error.reasons == ["no this", "no that"]
    assert str(error) == "no this; no that"
