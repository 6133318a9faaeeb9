"""Attention-level error: how far each method's output is from dense attention's, head by head.

Nothing is generated: methods plan and attend on kept or made-up queries, keys and values, so that a
hundred cells take minutes and every difference is the method's.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

import gossamer as gs
from gossamer.errors import GossamerError
from gossamer.evaluation.captures import Capture, Triple
from gossamer.evaluation.environment import environment
from gossamer.evaluation.exact import DenseReference, coverage, dense_reference, sample_rows
from gossamer.evaluation.files import read_json, write_json
from gossamer.evaluation.plans import CallKey
from gossamer.evaluation.variants import DENSE, NAMED_VARIANTS, Variant, parse_variant
from gossamer.session import AttentionEvent

RESULTS = "fidelity.json"
DENSITIES = (0.12, 0.24, 0.48)
SEEDS = 8
# Query rows per head on which distributions are compared; outputs are compared on all rows.
ROWS = 256

# What of the environment changes an error; threads, the date and the commit do not.
_ENVIRONMENT_KEYS = ("gossamer", "torch", "cpu", "device")

Row: TypeAlias = dict[str, Any]


class FidelityError(GossamerError, ValueError):
    """There is nothing to measure, or it is ambiguous."""


# What concerns one method on one input, and must not end the measurement.
_REFUSALS = (gs.PlanError, gs.UnsupportedError, gs.ProfileMismatchError, FidelityError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a measurement is.

    Attributes:
        cell: What is being measured, e.g. "svg2@0.24 on high-entropy".
        done: Passes over a group of calls done so far, in this command.
        total: Such passes in all; cells found finished are not counted.
        cells_done: Cells finished so far, those found finished included.
        cells_total: Cells in all.
    """

    cell: str
    done: int
    total: int
    cells_done: int
    cells_total: int


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """What to measure: every variant on every input.

    Attributes:
        inputs: Captured or structured heads, by the name that results call them.
        variants: Methods with their densities.
        seeds: How often each cell is planned anew with another seed. A method whose first two
            seeds give the same output is not run again.
        rows: Query rows per head on which distributions are compared.
        device: Where to compute.

    Raises:
        FidelityError: Nothing to measure, a variant given twice, or counts below 1.
    """

    inputs: Mapping[str, Capture]
    variants: Sequence[Variant]
    seeds: int = SEEDS
    rows: int = ROWS
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse an empty or ambiguous measurement."""
        for name in ("inputs", "variants"):
            if not getattr(self, name):
                raise FidelityError(f"a measurement needs {name}, got none")
        for name in ("seeds", "rows"):
            if getattr(self, name) < 1:
                raise FidelityError(f"{name}={getattr(self, name)}: must be at least 1")
        label, count = Counter(variant.label for variant in self.variants).most_common(1)[0]
        if count > 1:
            raise FidelityError(f"method {label} is given {count} times; give each once")


def choose_variants(
    names: Sequence[str] | None = None, densities: Sequence[float] = DENSITIES
) -> list[Variant]:
    """Return methods at densities.

    Args:
        names: "NAME" for a method at every density, "NAME@DENSITY" for one of its own. None: every
            registered method, each named variant for itself, without dense attention.
        densities: Shares of the pairs.

    Raises:
        ValueError: A name is unknown, or a density is not above 0 and at most 1.
    """
    if names is None:
        varied = {method for method, _ in NAMED_VARIANTS.values()}
        names = [name for name in gs.list_methods() if name not in {DENSE, *varied}]
        names = [*NAMED_VARIANTS, *names]
    variants: list[Variant] = []
    for name in names:
        if "@" in name or name == DENSE:
            variants.append(parse_variant(name))
        else:
            variants += [parse_variant(f"{name}@{density}") for density in densities]
    return variants


def measure(
    fidelity: Fidelity,
    out_dir: Path,
    *,
    resume: bool = True,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Measure every cell and keep the results document up to date on disk.

    Finished cells that are found under `out_dir`, measured on the very same tensors with the same
    method, are not measured again. Everything is written atomically, so Ctrl-C loses the cell under
    way alone.

    Args:
        fidelity: What to measure.
        out_dir: Where results go: `fidelity.json`, and `cells/` with a file per cell.
        resume: False measures every cell again.
        on_progress: Called before each pass over a group of calls.

    Returns:
        The document: `environment`, `settings`, `inputs`, `rows`, and `skipped` with the cells that
        a method refused and why.

    Raises:
        FidelityError: No cell could be measured.
        OSError: `out_dir` cannot be written.
    """
    return _Harness(fidelity, out_dir, on_progress).run(resume=resume)


class _Harness:
    """One measurement under way."""

    def __init__(self, fidelity: Fidelity, out_dir: Path, on_progress: OnProgress | None) -> None:
        self._fidelity = fidelity
        self._out_dir = out_dir
        self._on_progress = on_progress
        self._environment = environment(fidelity.device)
        self._inputs = {
            name: _Input(name, capture, torch.device(fidelity.device))
            for name, capture in fidelity.inputs.items()
        }
        self._cells = [(name, variant) for name in fidelity.inputs for variant in fidelity.variants]
        self._skipped: list[Row] = []
        self._done = 0
        self._total = 0

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Measure every missing cell."""
        pending = [cell for cell in self._cells if not (resume and self._path(*cell).is_file())]
        self._total = sum(self._passes(name) for name, _ in pending)
        cells_done = len(self._cells) - len(pending)
        for name, variant in pending:
            label = f"{variant.label} on {name}"
            end = self._done + self._passes(name)
            try:
                row = self._measure(name, variant, partial(self._report, label, cells_done))
            except _REFUSALS as error:
                self._skipped.append(_identity(name, variant) | {"reason": str(error)})
            else:
                write_json(self._path(name, variant), row, compact=True)
            self._done = end
            cells_done += 1
            self._write()
        document = self._write()
        if not document["rows"]:
            raise FidelityError(f"nothing could be measured: {document['skipped'][0]['reason']}")
        return document

    def _measure(self, name: str, variant: Variant, report: Callable[[], None]) -> Row:
        """Measure one cell."""
        source, fidelity = self._inputs[name], self._fidelity
        recipe = replace(variant.recipe, min_tokens=0)  # the method, however short the sequence
        chains: list[_Chain] = []
        for keys in source.capture.chains():
            chain = _Chain(source, keys, recipe, fidelity.rows)
            start = self._done
            for seed in range(fidelity.seeds):
                report()
                if not chain.run(seed):
                    break  # the other seeds would give the same
                self._done += 1
            self._done = start + fidelity.seeds
            chains.append(chain)
        return _identity(name, variant) | _summary(chains, fidelity.seeds)

    def _passes(self, name: str) -> int:
        return len(self._inputs[name].capture.chains()) * self._fidelity.seeds

    def _report(self, label: str, cells_done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    cell=label,
                    done=self._done,
                    total=self._total,
                    cells_done=cells_done,
                    cells_total=len(self._cells),
                )
            )

    def _path(self, name: str, variant: Variant) -> Path:
        """Return the file of a cell, named by everything that would change its row."""
        facts = {
            "input": name,
            "digest": self._inputs[name].capture.digest,
            "method": variant.name,
            "density_asked": variant.density_asked,
            "recipe": variant.recipe.to_toml(),
            "seeds": self._fidelity.seeds,
            "rows": self._fidelity.rows,
            "environment": {key: self._environment[key] for key in _ENVIRONMENT_KEYS},
        }
        return (
            self._out_dir / "cells" / f"{_slug(name)}-{_slug(variant.label)}-{_digest(facts)}.json"
        )

    def _write(self) -> dict[str, Any]:
        """Write the results of every finished cell of this measurement."""
        paths = [self._path(name, variant) for name, variant in self._cells]
        document: dict[str, Any] = {
            "environment": self._environment,
            "settings": {"seeds": self._fidelity.seeds, "rows": self._fidelity.rows},
            "inputs": [self._facts(source) for source in self._inputs.values()],
            "rows": [read_json(path) for path in paths if path.is_file()],
            "skipped": self._skipped,
        }
        write_json(self._out_dir / RESULTS, document)
        return document

    def _facts(self, source: _Input) -> dict[str, Any]:
        """Return what is known about an input, from its file where there is one."""
        path = self._out_dir / "inputs" / f"{_slug(source.name)}-{source.capture.digest}.json"
        if not path.is_file():
            write_json(path, source.facts())
        return read_json(path)


class _Input:
    """One input with its dense references, which are computed once and kept."""

    def __init__(self, name: str, capture: Capture, device: torch.device) -> None:
        self.name = name
        self.capture = capture
        self.device = device
        self._references: dict[CallKey, DenseReference] = {}

    def read(self, key: CallKey) -> Triple:
        """Return the tensors of a call in float32: errors are the method's, not the dtype's."""
        return Triple(*(x.to(self.device, torch.float32) for x in self.capture.read(key)))

    def reference(self, key: CallKey) -> DenseReference:
        """Return what dense attention gives for a call."""
        if key not in self._references:
            self._references[key] = dense_reference(*self.read(key), scale=self.capture.info.scale)
        return self._references[key]

    def facts(self) -> dict[str, Any]:
        """Return what the results say of the input, entropies in shares of ln(keys)."""
        info = self.capture.info
        shapes = [self.capture.read(keys[0]) for keys in self.capture.chains()]
        entropies: list[float] = []
        for keys, triple in zip(self.capture.chains(), shapes, strict=True):
            steps = torch.stack([self.reference(key).entropy for key in keys])  # [steps, H]
            entropies += (steps.mean(0) / math.log(max(2, triple.k.shape[1]))).tolist()
        return {
            "input": self.name,
            "model": info.model,
            "grid": info.grid,
            "text": info.text,
            "tokens": shapes[0].q.shape[1],
            "head_dim": shapes[0].q.shape[2],
            "calls": len(self.capture.keys),
            "steps": sorted({step for step, _, _ in self.capture.keys}),
            "heads": self._head_names(shapes),
            "entropy": statistics.fmean(entropies),
            "entropy_heads": entropies,
            "digest": self.capture.digest,
        }

    def _head_names(self, shapes: Sequence[Triple]) -> list[str]:
        """Return a name for each head: layer, branch and number of the head in the model."""
        names: list[str] = []
        for keys, triple in zip(self.capture.chains(), shapes, strict=True):
            _, layer, branch = keys[0]
            kept = self.capture.info.heads or range(triple.q.shape[0])
            names += [".".join(filter(None, (f"l{layer}", branch, f"h{head}"))) for head in kept]
        return names


class _Chain:
    """One recipe on the calls of one layer and branch, step after step, seed after seed."""

    def __init__(
        self, source: _Input, keys: Sequence[CallKey], recipe: gs.Recipe, num_rows: int
    ) -> None:
        self._source = source
        self._keys = keys
        self._recipe = recipe
        self._num_rows = num_rows
        self._first: dict[CallKey, Tensor] = {}
        self._sums: dict[CallKey, Tensor] = {}
        self._event: AttentionEvent | None = None
        self.num_runs = 0
        self.is_deterministic = False
        self.densities: list[float] = []
        self.errors: list[Tensor] = []  # per seed and step: [H] relative L2 error
        self.masses: list[Tensor] = []  # per step: [H]
        self.distances: list[Tensor] = []  # per step: [H]

    def run(self, seed: int) -> bool:
        """Run the calls with one seed.

        Returns:
            False if the outputs equal the first seed's bit for bit; the run then does not count.
        """
        session = gs.Session(self._recipe, observer=self._watch)
        errors: dict[CallKey, Tensor] = {}
        densities: list[float] = []
        for key in self._keys:
            call = self._source.capture.call(key, seed=seed)
            q, k, v = self._source.read(key)
            session.attention(q[None], k[None], v[None], call)
            event = self._seen()
            error = event.out[0] - self._source.reference(key).out  # [H, N, D]
            if not bool(error.isfinite().all()):
                raise FidelityError(f"{self._recipe.method.name}: the output is not finite")
            errors[key] = error
            densities.append(event.record.density)
            if seed == 0:
                self._compare_rows(event)
        if seed == 1 and all(torch.equal(errors[key], self._first[key]) for key in self._keys):
            self.is_deterministic = True
            return False
        self._first = errors if seed == 0 else {}
        for key, error in errors.items():
            self._sums[key] = self._sums[key] + error if seed else error
            self.errors.append(_norm(error) / self._norm_of(key))
        self.densities += densities
        self.num_runs += 1
        return True

    def bias(self) -> Tensor:
        """Return the norm of the mean error per step and head over that of dense, [steps, H]."""
        return torch.stack(
            [_norm(total / self.num_runs) / self._norm_of(key) for key, total in self._sums.items()]
        )

    def squares(self) -> Tensor:
        """Return the mean squared relative error over the seeds, [steps, H]."""
        errors = torch.stack(self.errors).unflatten(0, (self.num_runs, len(self._keys)))
        return errors.square().mean(0)

    def _watch(self, event: AttentionEvent) -> None:
        self._event = event

    def _seen(self) -> AttentionEvent:
        """Return what the session showed of the last call."""
        if self._event is None:
            raise RuntimeError("the session showed no attention call")
        return self._event

    def _norm_of(self, key: CallKey) -> Tensor:
        """Return the norm of the dense output per head, [H]; never 0."""
        out = self._source.reference(key).out
        return _norm(out).clamp(min=torch.finfo(torch.float32).tiny)

    def _compare_rows(self, event: AttentionEvent) -> None:
        """Compare the call's attention rows with dense ones, as distributions."""
        q, k = event.q[0], event.k[0]
        ones = torch.ones(q.shape[0], dtype=torch.float64, device=q.device)
        if event.plan is None:  # ran densely
            self.masses.append(ones)
            self.distances.append(torch.zeros_like(ones))
            return
        rows = sample_rows(q.shape[1], self._num_rows, device=q.device)
        covered = coverage(q, k, event.plan, rows)
        self.masses.append(covered.mass)
        self.distances.append(covered.hellinger)


def _summary(chains: Sequence[_Chain], seeds: int) -> Row:
    """Reduce the chains of a cell to its row: means over steps and seeds, then over heads."""
    errors = torch.cat([torch.stack(chain.errors).mean(0) for chain in chains])  # [heads]
    masses = torch.cat([torch.stack(chain.masses).mean(0) for chain in chains])
    distances = torch.cat([torch.stack(chain.distances).mean(0) for chain in chains])
    squares = torch.cat([chain.squares().mean(0) for chain in chains])
    biases = [chain.bias() for chain in chains]
    excess = seeds * torch.cat([bias.square().mean(0) for bias in biases]) - squares
    deterministic = all(chain.is_deterministic for chain in chains)
    return {
        "density": statistics.fmean(density for chain in chains for density in chain.densities),
        "rel_l2": errors.mean().item(),
        "hellinger": distances.mean().item(),
        "mass": masses.mean().item(),
        "seeds": seeds,
        "rel_l2_median": _median(errors),
        "rel_l2_max": errors.max().item(),
        "bias": None if seeds == 1 else torch.cat([bias.mean(0) for bias in biases]).mean().item(),
        "bias_expected": None if seeds == 1 else (squares / seeds).sqrt().mean().item(),
        "bias_corrected": None
        if seeds == 1
        else math.sqrt(max(0.0, (excess / (seeds - 1)).mean().item())),
        "deterministic": deterministic if seeds > 1 else None,
        "heads": len(errors),
        "calls": sum(len(chain.masses) for chain in chains),
        "rel_l2_heads": _rounded(errors),
        "mass_heads": _rounded(masses),
        "hellinger_heads": _rounded(distances),
    }


def _identity(name: str, variant: Variant) -> Row:
    """Return which cell a row is of."""
    return {"input": name, "method": variant.name, "density_asked": variant.density_asked}


def _norm(x: Tensor) -> Tensor:
    """Return the norm per head of [H, N, D], [H] float64."""
    return torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64)


def _median(values: Tensor) -> float:
    return statistics.median(values.tolist())


def _rounded(values: Tensor) -> list[float]:
    """Return numbers with the digits that mean something, for files that people read."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]


def _slug(label: str) -> str:
    """Return a label with characters that every file system takes."""
    return re.sub(r"[^a-z0-9.-]+", "-", label.lower())
