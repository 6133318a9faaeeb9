"""Captures: queries, keys and values of real attention calls, kept in a file for later study.

A capture is a safetensors file. Its keys are `s{step}.l{layer}.{branch}.{q|k|v}`, each tensor is
`[H, N, D]`, and its metadata say `grid`, `text` and `scale` as JSON and `model` as plain text.
Further metadata (`num_steps`, `num_layers`, `heads`, JSON too) may be absent.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import gossamer as gs
from gossamer.errors import GossamerError
from gossamer.evaluation.files import atomic_path
from gossamer.evaluation.generation import OnStep, Pipeline, generate
from gossamer.evaluation.plans import CallKey
from gossamer.evaluation.settings import Settings
from gossamer.session import AttentionEvent

_NAME = re.compile(r"s(\d+)\.l(\d+)\.(.*)\.([qkv])")
_PARTS = ("q", "k", "v")
_FACTS = ("grid", "text", "scale", "model")
_OPTIONAL = ("num_steps", "num_layers", "heads")
_CHUNK_BYTES = 8 << 20  # of a file hashed at once


class CaptureError(GossamerError, ValueError):
    """A capture file is unreadable, or a call cannot be captured."""


class Triple(NamedTuple):
    """The tensors of one attention call.

    Attributes:
        q: [H, N, D] queries, after positional encoding.
        k: [Hk, S, D] keys.
        v: [Hk, S, D] values.
    """

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureInfo:
    """What all calls of a capture share.

    Attributes:
        model: What the tensors come from.
        grid: (frames, rows, columns) of the latent tokens; None where unknown.
        text: [start, stop) of the text tokens; None for no text.
        scale: Factor on the logits; None for 1/sqrt(D).
        num_steps: Denoising steps of the generation; None where unknown.
        num_layers: Attention layers of the model; None where unknown.
        heads: Which of the model's heads were kept, in the tensors' order; None for all.
    """

    model: str
    grid: tuple[int, int, int] | None = None
    text: tuple[int, int] | None = None
    scale: float | None = None
    num_steps: int | None = None
    num_layers: int | None = None
    heads: tuple[int, ...] | None = None

    def to_metadata(self) -> dict[str, str]:
        """Return the facts as safetensors keeps them, text by name."""
        names = [name for name in (*_FACTS, *_OPTIONAL) if name != "model"]
        return {"model": self.model, **{name: json.dumps(getattr(self, name)) for name in names}}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], place: str) -> CaptureInfo:
        """Read the facts back.

        Args:
            metadata: Of the file.
            place: The file, for the message.

        Raises:
            CaptureError: A fact is missing or of the wrong kind.
        """
        missing = [name for name in _FACTS if name not in metadata]
        if missing:
            raise CaptureError(f"{place} is no capture: its metadata lack {', '.join(missing)}")
        facts = {name: metadata.get(name, "null") for name in (*_FACTS, *_OPTIONAL)}
        try:
            return cls(
                model=facts["model"],
                grid=cast("tuple[int, int, int] | None", _whole_numbers(facts["grid"], 3)),
                text=cast("tuple[int, int] | None", _whole_numbers(facts["text"], 2)),
                scale=_number(facts["scale"]),
                num_steps=_whole_number(facts["num_steps"]),
                num_layers=_whole_number(facts["num_layers"]),
                heads=_whole_numbers(facts["heads"], None),
            )
        except (ValueError, TypeError) as error:
            raise CaptureError(f"{place}: its metadata are garbled: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Attention calls with their tensors, in memory or in a file that is read call by call.

    Attributes:
        info: What the calls share.
        keys: (step, layer, branch) of each call, by layer and branch, then by step.
        digest: Fingerprint of everything that the capture holds.
        path: The file; None where the tensors are in memory.
        tensors: The tensors in memory; empty where they are in a file.
    """

    info: CaptureInfo
    keys: tuple[CallKey, ...]
    digest: str
    path: Path | None = None
    tensors: Mapping[CallKey, Triple] = field(default_factory=dict[CallKey, Triple])

    @classmethod
    def from_tensors(cls, info: CaptureInfo, tensors: Mapping[CallKey, Triple]) -> Capture:
        """Make a capture of tensors in memory.

        Args:
            info: What the calls share.
            tensors: The calls.

        Raises:
            CaptureError: There is no call, a branch name cannot stand in a file, or shapes clash.
        """
        digest = hashlib.sha256(json.dumps(info.to_metadata(), sort_keys=True).encode())
        for key, triple in sorted(tensors.items()):
            _check(info, _name(key, "q")[:-2], triple)
            digest.update(repr(key).encode())
            for tensor in triple:
                raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
                digest.update(repr((tensor.dtype, tensor.shape)).encode())
                digest.update(raw.tobytes())
        return cls(
            info=info,
            keys=_ordered(tensors, "the capture"),
            digest=digest.hexdigest()[:16],
            tensors=dict(tensors),
        )

    @classmethod
    def open(cls, path: Path) -> Capture:
        """Open a capture file; its tensors stay in it until they are read.

        Raises:
            CaptureError: The file is no capture, or a part of it is missing.
            OSError: The file cannot be read.
        """
        with path.open("rb"):  # the system's own message for a missing file
            pass
        found: dict[CallKey, set[str]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, str] = file.metadata() or {}
                names: list[str] = list(file.keys())
        except SafetensorError as error:
            raise CaptureError(f"{path} is no safetensors file: {error}") from error
        info = CaptureInfo.from_metadata(metadata, str(path))
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                raise CaptureError(
                    f"{path} holds {name!r}: the keys of a capture are "
                    "s{step}.l{layer}.{branch}.{q|k|v}"
                )
            step, layer, branch, part = match.groups()
            found.setdefault((int(step), int(layer), branch), set()).add(part)
        for key, parts in found.items():
            if len(parts) < len(_PARTS):
                missing = ", ".join(_name(key, part) for part in _PARTS if part not in parts)
                raise CaptureError(f"{path} lacks {missing}")
        return cls(info=info, keys=_ordered(found, str(path)), digest=_digest(path), path=path)

    def read(self, key: CallKey) -> Triple:
        """Return the tensors of a call, as they were kept.

        Raises:
            CaptureError: The shapes are not those of one call.
            OSError: The file cannot be read any more.
        """
        if self.path is None:
            return self.tensors[key]
        try:
            with safe_open(self.path, framework="pt") as file:
                triple = Triple(*(file.get_tensor(_name(key, part)) for part in _PARTS))
        except SafetensorError as error:
            raise CaptureError(f"{self.path}: {error}") from error
        _check(self.info, f"{self.path}: {_name(key, 'q')[:-2]}", triple)
        return triple

    def call(self, key: CallKey, *, seed: int = 0) -> gs.Call:
        """Return the facts about a call, as the model gave them.

        Args:
            key: Which call.
            seed: Seed of what planning draws.
        """
        step, layer, branch = key
        info = self.info
        return gs.Call(
            layer=layer,
            num_layers=info.num_layers,
            step=step,
            num_steps=info.num_steps,
            branch=branch,
            grid=info.grid,
            text=info.text,
            scale=info.scale,
            seed=seed,
        )

    def chains(self) -> list[list[CallKey]]:
        """Return the calls by layer and branch, each group by ascending step.

        What a method keeps from one step to the next stays within such a group.
        """
        chains: dict[tuple[int, str], list[CallKey]] = {}
        for key in self.keys:
            chains.setdefault(key[1:], []).append(key)
        return list(chains.values())

    def save(self, path: Path) -> None:
        """Write the capture to a file, whole or not at all.

        Raises:
            OSError: The file cannot be written.
        """
        tensors = {
            _name(key, part): tensor.detach().cpu().contiguous()
            for key in self.keys
            for part, tensor in zip(_PARTS, self.read(key), strict=True)
        }
        with atomic_path(path) as scratch:
            save_file(tensors, scratch, metadata=self.info.to_metadata())


@dataclass(kw_only=True)
class CaptureRecorder:
    """An observer that keeps the tensors of chosen attention calls.

    Pass it as `observer` to `gossamer.apply` or `gossamer.Session`. Of a batch the first row is
    kept.

    Attributes:
        model: What the capture calls the model.
        steps: Denoising steps to keep; None for all.
        layers: Layers to keep; None for all.
        heads: Query heads to keep, with the KV heads that they read; None for all.
        branch: The guidance pass to keep; None for the first one seen.
        dtype: What the tensors are kept in.
        seconds: Time spent in here.
    """

    model: str
    steps: Collection[int] | None = None
    layers: Collection[int] | None = None
    heads: tuple[int, ...] | None = None
    branch: str | None = None
    dtype: torch.dtype = torch.float16
    seconds: float = 0.0
    _info: CaptureInfo | None = field(default=None, repr=False)
    _tensors: dict[CallKey, Triple] = field(default_factory=dict[CallKey, Triple], repr=False)

    def __call__(self, event: AttentionEvent) -> None:
        """See one attention call.

        Raises:
            CaptureError: The call has a mask that a capture does not hold, another shape than the
                calls before, no such head, or values too large for the dtype.
        """
        start = time.perf_counter()
        call = event.call
        if self.branch is None:
            self.branch = call.branch
        wanted = (self.steps is None or call.step in self.steps) and (
            self.layers is None or call.layer in self.layers
        )
        if wanted and call.branch == self.branch:
            self._keep(event)
        self.seconds += time.perf_counter() - start

    def capture(self) -> Capture:
        """Return what was kept.

        Raises:
            CaptureError: Nothing was.

        Warns:
            UserWarning: Some of the steps or layers that were to be kept do not exist.
        """
        if self._info is None:
            raise CaptureError(
                "nothing was captured: no attention call matches "
                f"steps={_listed(self.steps)}, layers={_listed(self.layers)}, "
                f"branch={self.branch!r}"
            )
        kept = {"steps": {step for step, _, _ in self._tensors}}
        kept["layers"] = {layer for _, layer, _ in self._tensors}
        for name, asked in (("steps", self.steps), ("layers", self.layers)):
            missing = sorted(set(asked or ()) - kept[name])
            if missing:
                warnings.warn(
                    f"{name}={_listed(asked)} were to be captured, but there is no attention call "
                    f"at {_listed(missing)}",
                    UserWarning,
                    stacklevel=2,
                )
        return Capture.from_tensors(self._info, self._tensors)

    def _keep(self, event: AttentionEvent) -> None:
        call = event.call
        if call.causal or call.key_valid is not None:
            mask = "a causal mask" if call.causal else "padded keys"
            raise CaptureError(f"layer {call.layer} attends under {mask}: captures hold no masks")
        info = CaptureInfo(
            model=self.model,
            grid=call.grid,
            text=call.text,
            scale=call.scale,
            num_steps=call.num_steps,
            num_layers=call.num_layers,
            heads=self.heads,
        )
        if self._info not in (None, info):
            raise CaptureError(
                f"layer {call.layer} at step {call.step} has grid {call.grid} and text "
                f"{call.text}, the calls before had {self._info}: choose --capture-layers of one "
                "kind"
            )
        group = event.q.shape[1] // event.k.shape[1]
        triple = Triple(
            self._narrow(event.q, 1), self._narrow(event.k, group), self._narrow(event.v, group)
        )
        self._info = info
        self._tensors[call.step, call.layer, call.branch] = triple

    def _narrow(self, x: Tensor, group: int) -> Tensor:
        """Return the kept heads of the first batch row on the CPU, in the capture's dtype."""
        kept = x[0]
        if self.heads is not None:
            index = [head // group for head in self.heads]
            if not index or not 0 <= min(index) <= max(index) < x.shape[1]:
                raise CaptureError(
                    f"heads {list(self.heads)}: the model has heads 0 to {x.shape[1] * group - 1}"
                )
            kept = kept[index]
        kept = kept.detach().to("cpu", self.dtype, copy=True)
        if not bool(kept.isfinite().all()):
            raise CaptureError(
                f"values do not fit {self.dtype} or are not finite: capture in bfloat16"
            )
        return kept


def record(
    pipe: Pipeline,
    prompt: str,
    settings: Settings,
    recorder: CaptureRecorder,
    *,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> Capture:
    """Generate one video densely and return the calls that `recorder` kept.

    Args:
        pipe: The pipeline; left as it was found.
        prompt: The text.
        settings: Size, steps and guidance.
        recorder: Says what to keep.
        seed: Seed of the initial noise.
        on_step: Called after each denoising step, where the pipeline supports it.

    Raises:
        CaptureError: No call matches, or one cannot be captured.
        GossamerError: Nothing can attach to this model.
    """
    recipe = gs.Recipe(method=gs.Dense())
    generate(pipe, prompt, recipe, settings, seed=seed, observer=recorder, on_step=on_step)
    return recorder.capture()


def _digest(path: Path) -> str:
    """Fingerprint what a safetensors file holds; its metadata come in a new order at every save."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        digest.update(json.dumps(header, sort_keys=True).encode())
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def _name(key: CallKey, part: str) -> str:
    """Return a tensor's name in the file."""
    step, layer, branch = key
    return f"s{step}.l{layer}.{branch}.{part}"


def _ordered(keys: Collection[CallKey], place: str) -> tuple[CallKey, ...]:
    """Return the calls by layer and branch, then by step."""
    if not keys:
        raise CaptureError(f"{place} holds no attention call")
    return tuple(sorted(keys, key=lambda key: (key[1], key[2], key[0])))


def _check(info: CaptureInfo, place: str, triple: Triple) -> None:
    """Refuse tensors that are not one call of this capture."""
    shapes = ", ".join(f"{part} {list(x.shape)}" for part, x in zip(_PARTS, triple, strict=True))
    if any(x.dim() != 3 or not x.dtype.is_floating_point for x in triple):
        raise CaptureError(f"{place} has {shapes}: each must be [heads, tokens, head dim] floats")
    try:
        gs.Call(grid=info.grid, text=info.text, scale=info.scale).check(
            1, triple.q.shape[1], triple.k.shape[1]
        )
    except gs.PlanError as error:
        raise CaptureError(f"{place}: {error}") from error
    heads, kv_heads = triple.q.shape[0], triple.k.shape[0]
    fits = triple.k.shape == triple.v.shape and triple.q.shape[2] == triple.k.shape[2]
    if not fits or not kv_heads or heads % kv_heads or not triple.q.numel():
        raise CaptureError(f"{place} has {shapes}: they are not one attention call")


def _listed(indices: Collection[int] | None) -> str:
    return "all" if indices is None else ",".join(map(str, sorted(indices))) or "none"


def _whole_number(text: str) -> int | None:
    value: Any = json.loads(text)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{text!r} is no whole number")
    return value


def _whole_numbers(text: str, length: int | None) -> tuple[int, ...] | None:
    value: Any = json.loads(text)
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(entry) is int for entry in value)
    if not whole or length not in (None, len(value)):
        raise ValueError(f"{text!r} is no list of {length or 'some'} whole numbers")
    return tuple(value)


def _number(text: str) -> float | None:
    value: Any = json.loads(text)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{text!r} is no number")
    return None if value is None else float(value)
