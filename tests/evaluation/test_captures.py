"""Capture files: recording through a session, writing, reading, and what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gossamer as gs
from evaluation.fake_pipeline import GRID, HEAD_DIM, HEADS, LAYERS, TOKENS
from gossamer.evaluation.captures import (
    Capture,
    CaptureError,
    CaptureInfo,
    CaptureRecorder,
    Triple,
    record,
)
from gossamer.evaluation.exact import dense_reference

SHIPPED = Path(__file__).parents[1] / "data" / "tiny-wan-capture.safetensors"
INFO = CaptureInfo(model="m", grid=(2, 2, 3))
METADATA = {"grid": "[2, 2, 3]", "text": "null", "scale": "null", "model": "m"}


def triple(heads=2, tokens=12, dim=4, kv_heads=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, tokens, dim)] + 2 * [(kv_heads or heads, tokens, dim)]
    return Triple(*(torch.randn(shape, generator=generator) for shape in shapes))


def watched(tensors, call, **chosen):
    """Show one call of a session to a recorder."""
    recorder = CaptureRecorder(model="m", dtype=torch.float32, **chosen)
    session = gs.Session(gs.Recipe(method=gs.Dense()), observer=recorder)
    session.attention(*(x[None] for x in tensors), call)
    return recorder


def test_a_generation_is_kept_as_it_was(pipe, settings, tmp_path):
    seen = {}

    class Recorder(CaptureRecorder):
        def __call__(self, event):
            key = (event.call.step, event.call.layer, event.call.branch)
            seen[key] = [x[0].clone() for x in (event.q, event.k, event.v)]
            super().__call__(event)

    recorder = Recorder(model="fake", steps={1, 2}, layers={1})
    captured = record(pipe, "x", settings, recorder)
    assert recorder.seconds > 0
    captured.save(tmp_path / "made" / "fake.safetensors")
    opened = Capture.open(tmp_path / "made" / "fake.safetensors")
    assert opened.keys == captured.keys == ((1, 1, "cond"), (2, 1, "cond"))
    assert opened.info == captured.info
    assert opened.info.num_steps == settings.steps
    assert opened.info.num_layers == LAYERS
    for key in opened.keys:
        for got, kept, original in zip(
            opened.read(key), captured.read(key), seen[key], strict=True
        ):
            assert got.shape == (HEADS, TOKENS, HEAD_DIM)
            assert torch.equal(got, original.half())
            assert torch.equal(got, kept)
    assert pipe.session is None


def test_the_file_is_what_the_format_says(tmp_path):
    path = tmp_path / "c.safetensors"
    info = CaptureInfo(model='a "b"', grid=(1, 2, 5), text=(0, 2), scale=0.25)
    Capture.from_tensors(info, {(4, 3, "cond"): triple()}).save(path)
    assert sorted(load_file(path)) == ["s4.l3.cond.k", "s4.l3.cond.q", "s4.l3.cond.v"]
    assert Capture.open(path).info == info
    metadata = info.to_metadata()
    assert {name: metadata[name] for name in METADATA} == {
        "grid": "[1, 2, 5]",
        "text": "[0, 2]",
        "scale": "0.25",
        "model": 'a "b"',
    }


def test_a_call_is_the_models(tmp_path):
    info = CaptureInfo(
        model="m", grid=(1, 2, 5), text=(0, 2), scale=0.25, num_steps=9, num_layers=5
    )
    call = Capture.from_tensors(info, {(4, 3, "cond"): triple()}).call((4, 3, "cond"), seed=7)
    expected = gs.Call(
        layer=3,
        num_layers=5,
        step=4,
        num_steps=9,
        branch="cond",
        grid=(1, 2, 5),
        text=(0, 2),
        scale=0.25,
        seed=7,
    )
    assert vars(call) == vars(expected)


def test_calls_come_by_layer_and_branch_and_then_by_step():
    keys = [(10, 0, ""), (9, 0, ""), (2, 1, "b"), (2, 0, "a.b"), (1, 1, "b")]
    capture = Capture.from_tensors(INFO, dict.fromkeys(keys, triple()))
    assert capture.chains() == [
        [(9, 0, ""), (10, 0, "")],
        [(2, 0, "a.b")],
        [(1, 1, "b"), (2, 1, "b")],
    ]


def test_branches_with_dots_and_without_a_name_are_read_back(tmp_path):
    capture = Capture.from_tensors(INFO, {(0, 0, ""): triple(), (0, 0, "a.b"): triple(seed=1)})
    capture.save(tmp_path / "c.safetensors")
    opened = Capture.open(tmp_path / "c.safetensors")
    assert opened.keys == ((0, 0, ""), (0, 0, "a.b"))
    assert torch.equal(opened.read((0, 0, "a.b")).q, triple(seed=1).q)


def test_heads_are_kept_with_the_kv_heads_they_read():
    tensors = triple(heads=4, kv_heads=2)
    captured = watched(tensors, gs.Call(grid=(2, 2, 3)), heads=(3, 0)).capture()
    kept = captured.read((0, 0, ""))
    assert torch.equal(kept.q, tensors.q[[3, 0]])
    assert torch.equal(kept.k, tensors.k[[1, 0]])
    assert torch.equal(kept.v, tensors.v[[1, 0]])
    assert captured.info.heads == (3, 0)


def test_the_kept_tensors_are_copies():
    tensors = triple()
    recorder = watched(tensors, gs.Call())
    tensors.q.zero_()
    assert recorder.capture().read((0, 0, "")).q.abs().sum() > 0


@pytest.mark.parametrize(
    ("tensors", "call", "chosen", "word"),
    [
        (triple(), gs.Call(causal=True), {}, "causal"),
        (triple(), gs.Call(key_valid=torch.ones(1, 12, dtype=torch.bool)), {}, "padded keys"),
        (triple(), gs.Call(), {"heads": (2,)}, "heads 0 to 1"),
        (Triple(*(x * 1e39 for x in triple())), gs.Call(), {}, "bfloat16"),
    ],
)
def test_what_cannot_be_captured_is_refused(tensors, call, chosen, word):
    with pytest.raises(CaptureError, match=word):
        watched(tensors, call, **chosen)


def test_values_beyond_float16_are_refused():
    recorder = CaptureRecorder(model="m")
    session = gs.Session(gs.Recipe(method=gs.Dense()), observer=recorder)
    q, k, v = (x[None] for x in triple())
    with pytest.raises(CaptureError, match=r"float16.*bfloat16"):
        session.attention(q, k, 1e6 * v, gs.Call())


def test_calls_of_two_kinds_are_refused():
    recorder = CaptureRecorder(model="m")
    session = gs.Session(gs.Recipe(method=gs.Dense()), observer=recorder)
    session.attention(*(x[None] for x in triple()), gs.Call(grid=(2, 2, 3)))
    with pytest.raises(CaptureError, match="--capture-layers"):
        session.attention(*(x[None] for x in triple()), gs.Call(layer=1, grid=(2, 3, 2)))


def test_nothing_captured_says_what_was_wanted(pipe, settings):
    recorder = CaptureRecorder(model="fake", steps={99}, layers=())
    with pytest.raises(CaptureError, match=r"steps=99, layers=none, branch='cond'"):
        record(pipe, "x", settings, recorder)


def test_what_is_not_there_to_be_captured_is_said(pipe, settings):
    recorder = CaptureRecorder(model="fake", steps={0, 99}, layers=(0, LAYERS))
    with pytest.warns(UserWarning, match="were to be captured") as caught:
        captured = record(pipe, "x", settings, recorder)
    assert [str(warning.message) for warning in caught] == [
        "steps=0,99 were to be captured, but there is no attention call at 99",
        f"layers=0,{LAYERS} were to be captured, but there is no attention call at {LAYERS}",
    ]
    assert {key[:2] for key in captured.keys} == {(0, 0)}


def tensors_of(**changes):
    tensors = {f"s0.l0.x.{part}": torch.zeros(2, 12, 4) for part in "qkv"}
    return {name: x for name, x in {**tensors, **changes}.items() if x is not None}


@pytest.mark.parametrize(
    ("tensors", "metadata", "word"),
    [
        (tensors_of(**{"s0.l0.x.k": None}), METADATA, "lacks s0.l0.x.k"),
        (tensors_of(**{"s0.l0.q": torch.zeros(1)}), METADATA, "holds 's0.l0.q'"),
        ({}, METADATA, "holds no attention call"),
        (tensors_of(), None, "lack grid, text, scale, model"),
        (tensors_of(), {**METADATA, "grid": "[1, 2]"}, "no list of 3 whole numbers"),
        (tensors_of(), {**METADATA, "grid": "8x20x26"}, "garbled"),
        (tensors_of(), {**METADATA, "scale": "true"}, "no number"),
        (tensors_of(), {**METADATA, "num_steps": "1.5"}, "no whole number"),
    ],
)
def test_a_file_that_is_no_capture_is_refused(tmp_path, tensors, metadata, word):
    path = tmp_path / "c.safetensors"
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CaptureError, match=re.escape(word)) as caught:
        Capture.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        (tensors_of(**{"s0.l0.x.k": torch.zeros(2, 12, 5)}), "not one attention call"),
        (tensors_of(**{"s0.l0.x.q": torch.zeros(3, 12, 4)}), "not one attention call"),
        (tensors_of(**{"s0.l0.x.q": torch.zeros(12, 4)}), "[heads, tokens, head dim]"),
        ({f"s0.l0.x.{part}": torch.zeros(2, 11, 4) for part in "qkv"}, "the sequence has 11"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_when_read(tmp_path, tensors, word):
    save_file(tensors, tmp_path / "c.safetensors", metadata=METADATA)
    opened = Capture.open(tmp_path / "c.safetensors")
    with pytest.raises(CaptureError, match=re.escape(word)):
        opened.read((0, 0, "x"))


def test_a_file_that_is_not_safetensors_or_not_there(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(FileNotFoundError):
        Capture.open(path)
    path.write_bytes(b"no")
    with pytest.raises(CaptureError, match="no safetensors file"):
        Capture.open(path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    Capture.from_tensors(INFO, {(0, 0, ""): triple()}).save(path)
    before = path.read_bytes()

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gossamer.evaluation.captures.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        Capture.from_tensors(INFO, {(0, 0, ""): triple(seed=1)}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_digest_tells_every_change(tmp_path):
    base = triple()
    changed = Triple(base.q, base.k, base.v.clone())
    changed.v[0, 0, 0] += 1e-3
    captures = [
        Capture.from_tensors(INFO, {(0, 0, ""): base}),
        Capture.from_tensors(INFO, {(0, 0, ""): changed}),
        Capture.from_tensors(INFO, {(1, 0, ""): base}),
        Capture.from_tensors(INFO, {(0, 0, ""): Triple(*(x.double() for x in base))}),
        Capture.from_tensors(CaptureInfo(model="m", scale=0.5), {(0, 0, ""): base}),
    ]
    assert len({capture.digest for capture in captures}) == len(captures)
    assert captures[0].digest == Capture.from_tensors(INFO, {(0, 0, ""): triple()}).digest
    for index, capture in enumerate(captures[:2]):
        capture.save(tmp_path / f"{index}.safetensors")
    opened = [Capture.open(tmp_path / f"{index}.safetensors") for index in range(2)]
    assert opened[0].digest != opened[1].digest


def test_the_digest_of_a_file_survives_saving_again(tmp_path):
    """The bytes do not: safetensors writes metadata in a new order every time."""
    digests = set()
    for index in range(8):
        path = tmp_path / f"{index}.safetensors"
        Capture.from_tensors(INFO, {(0, 0, ""): triple()}).save(path)
        digests.add(Capture.open(path).digest)
    assert len(digests) == 1


def test_the_shipped_capture_holds_heads_of_low_and_high_entropy():
    """Steps 4 to 8 span one anchor interval of four; three layers go from sharp to flat."""
    assert SHIPPED.stat().st_size <= 6 << 20
    capture = Capture.open(SHIPPED)
    assert capture.info.model == "tiny-wan"
    assert {key[0] for key in capture.keys} == set(range(4, 9))
    assert len(capture.chains()) == 3
    shares = []
    for keys in capture.chains():
        q, k, v = capture.read(keys[0])
        assert math.prod(capture.info.grid or ()) == q.shape[1]
        entropy = dense_reference(q, k, v, scale=capture.info.scale).entropy
        shares += (entropy / math.log(k.shape[1])).tolist()
    assert min(shares) < 0.5
    assert max(shares) > 0.9


def test_grids_of_the_fake_pipeline_are_kept(pipe, settings):
    assert record(pipe, "x", settings, CaptureRecorder(model="f")).info.grid == GRID
