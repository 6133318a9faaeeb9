"""Sinks are the first tokens of a prompt, wherever padding puts them."""

import pytest
import torch
from torch import Tensor

import gossamer as gs
from cases import Shape
from gossamer.kernels import AttentionOutput
from gossamer.testing import assert_matches, tolerance

LENGTHS = (300, 173, 41)  # of the prompts of a batch, padded in front to the longest


def padded(shape: Shape) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return tensors of the longest prompt's length, NaN in front of shorter ones."""
    longest = LENGTHS[0]
    valid = torch.arange(longest) >= longest - torch.tensor(LENGTHS)[:, None]
    tensors = shape.tensors()
    return tuple(x.masked_fill(~valid[:, None, :, None], torch.nan) for x in tensors), valid


def alone(tensors: tuple[Tensor, ...], row: int) -> tuple[Tensor, ...]:
    """Return one prompt without its padding."""
    return tuple(x[row : row + 1, :, LENGTHS[0] - LENGTHS[row] :] for x in tensors)


@pytest.mark.parametrize(
    ("method", "layer"),
    [
        (gs.get_method("sliding-window", window=12, sink=5, tile=16, block=8), 0),
        (gs.get_method("sliding-window", window=70, sink=130), 0),
        (gs.get_method("intra", schedule="g2s4", span=20, sink=7), 1),
        (gs.get_method("intra", schedule="g2s4", span=60, sink=64), 1),
    ],
)
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_windows_of_a_left_padded_prompt_are_those_of_the_prompt(
    method: gs.Method, layer: int, kernel: str
) -> None:
    """Exact for every query, so that nothing hangs on where tiles begin."""
    tensors, valid = padded(Shape(3, 2, 2, 300, 300, 16, 3))
    plan = method.plan(*tensors, gs.Call(causal=True, key_valid=valid, layer=layer))
    assert plan.window is not None
    plan.validate()
    out, lse = gs.attend(*tensors, plan, kernel=kernel)
    weights, counts = plan.weights(), []
    for row, length in enumerate(LENGTHS):
        one = alone(tensors, row)
        want = method.plan(*one, gs.Call(causal=True, layer=layer))
        expected = want.weights()[0]
        assert torch.equal(weights[row, : len(expected), -length:, -length:], expected)
        counts.append(float(want.density))
        got = AttentionOutput(out[row : row + 1, :, -length:], lse[row : row + 1, :, -length:])
        double = gs.attend(*(x.double() for x in one), want, kernel="reference")
        assert_matches(got, double, tolerance(*one))
    assert plan.density == pytest.approx(sum(counts) / len(counts), abs=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        gs.get_method("nsa", first_blocks=1, selected=2, window=16, block=16, tile=16),
        gs.get_method("sol", first_blocks=1, near=1, block=16, tile=16),
        gs.get_method("sliding-window", density=0.3, sink=3, block=16, tile=16),
        gs.get_method("vattention", density=0.4, sink_keys=1, local=None),
    ],
    ids=lambda method: method.name,
)
def test_every_query_reads_the_first_key_that_is_no_padding(method: gs.Method) -> None:
    tensors, valid = padded(Shape(3, 2, 2, 300, 300, 16, 3))
    plan = method.plan(*tensors, gs.Call(causal=not method.causal_reason, key_valid=valid))
    weights = plan.weights()
    for row, length in enumerate(LENGTHS):
        first = LENGTHS[0] - length
        assert bool((weights[row, :, first:, first] > 0).all()), f"prompt of {length} tokens"


def test_a_prompt_of_fewer_tokens_than_sinks_reads_them_all() -> None:
    method = gs.get_method("sliding-window", window=2, sink=50)
    valid = torch.arange(80) >= torch.tensor([[0], [71]])
    tensors = Shape(2, 1, 1, 80, 80, 8, 1).tensors()
    plan = method.plan(*tensors, gs.Call(causal=True, key_valid=valid))
    assert torch.equal(plan.weights()[1, 0, 71:, 71:] > 0, torch.ones(9, 9).tril().bool())
