"""A whole calibration: prompts dealt to processes, every finished one kept, the last one merges."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.calibration import shards
from gossamer.calibration.axis import AxisObserver
from gossamer.calibration.capture import Observer, OnStep
from gossamer.calibration.fast import NUM_ROWS, FastObserver
from gossamer.calibration.profile import merge_thresholds, write_profile
from gossamer.calibration.setup import Setup
from gossamer.calibration.west import WestObserver
from gossamer.errors import PlanError
from gossamer.select.fidelity import make_levels
from gossamer.select.resize import Grid

_UNION_P = 0.25  # where the union's growth with the number of prompts is reported


@dataclass(frozen=True, kw_only=True)
class Job:
    """One dense generation to watch.

    Attributes:
        prompt: The text.
        seed: Seed of the initial noise.
        size: Index into the calibration's sizes.
    """

    prompt: str
    seed: int
    size: int


Generate = Callable[[Job, Observer, OnStep], None]
"""Runs a job densely, with the observer attached; calls back after each denoising step."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What to calibrate.

    Attributes:
        model: Id of the model, which the profile will carry.
        prompts: Texts.
        setup: What is measured of each generation.
        sizes: Names of the sizes; prompt i is generated at size i mod their number. The profile is
            of the first one.
        facts: Everything else that changes what is generated, JSON-able.
        metadata: Further facts for the profile, JSON-able.
        fast_prompts: Prompts that FAST is measured on, the first ones; always at the first size.
        seed: Prompt i has the noise of seed + i.
        rank: This process among several that share the folder.
        world: How many they are; prompt i is that of rank i mod world.

    Raises:
        PlanError: Nothing to calibrate, or a rank or a number out of range.
    """

    model: str
    prompts: Sequence[str]
    setup: Setup
    sizes: Sequence[str] = ("",)
    facts: Mapping[str, Any]
    metadata: Mapping[str, Any]
    fast_prompts: int = 1
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be calibrated."""
        if not self.prompts or not self.sizes:
            raise PlanError("a calibration needs prompts and a size, got none")
        if not 1 <= self.fast_prompts <= len(self.prompts):
            raise PlanError(
                f"fast_prompts={self.fast_prompts}: must be between 1 and the "
                f"{len(self.prompts)} prompts"
            )
        if not 0 <= self.rank < self.world:
            raise PlanError(f"rank={self.rank}: must be at least 0 and below world={self.world}")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a calibration is.

    Attributes:
        task: What is under way.
        steps_done: Denoising steps done by this process.
        steps_total: Denoising steps that it has to do, as far as known.
    """

    task: str
    steps_done: int
    steps_total: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a calibration ended.

    Attributes:
        prompts_done: Prompts measured so far, by all processes.
        complete: Whether the profile was written; else other processes have prompts left.
        grid: (frames, rows, columns) of the profile.
        union_density: [M] share of the blocks that the union of the first 1…M prompts keeps at
            p = 0.25, mean over all maps; it levels off where more prompts add nothing.
    """

    prompts_done: int
    complete: bool
    grid: Grid | None = None
    union_density: Sequence[float] = ()


def calibrate(
    calibration: Calibration,
    generate: Generate,
    *,
    work: Path,
    out: Path,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Measure every prompt of this process and, once all processes' are there, write the profile.

    Each finished measurement is a file in `work`, so a process that is killed at any moment and
    started again gives the same profile as one that was not.

    Args:
        calibration: What to calibrate.
        generate: Runs one dense generation.
        work: Where finished measurements are kept; shared by all processes.
        out: The profile to write.
        on_progress: Told before each generation and after each denoising step.

    Raises:
        GossamerError: The model cannot be measured.
        OSError: `work` or `out` cannot be written.
    """
    return _Run(calibration, generate, work, out, on_progress).run()


class _Run:
    """One calibration under way."""

    def __init__(
        self,
        calibration: Calibration,
        generate: Generate,
        work: Path,
        out: Path,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._calibration = calibration
        self._generate = generate
        self._work = work
        self._out = out
        self._on_progress = on_progress
        self._steps_done = 0
        self._steps_total = 0

    def run(self) -> Outcome:
        """Do what is missing."""
        shards.remove_scratch(self._work)
        shards.remove_scratch(self._out.parent, glob.escape(self._out.name))
        what = self._calibration
        own = range(what.rank, len(what.prompts), what.world)
        # Whoever merges measures FAST too; until then that is counted for every process.
        missing = [index for index in own if not self._west_path(index).is_file()]
        generations = len(missing) + what.fast_prompts + (what.setup.permute == "axis")
        self._steps_total = generations * what.setup.num_steps
        order = self._order()
        for index in missing:
            self._west(index, order)
        done = [index for index in range(len(what.prompts)) if self._west_path(index).is_file()]
        if len(done) < len(what.prompts):
            return Outcome(prompts_done=len(done), complete=False)
        return self._merge(order)

    def _merge(self, order: Tensor | None) -> Outcome:
        """Unite the maps, measure FAST on them, write the profile."""
        what, setup = self._calibration, self._calibration.setup
        united: list[Tensor] = []
        densities: list[float] = []
        grid: Grid = (0, 0, 0)
        for maps, source in self._wests(order):
            grid = grid if united else source
            by_head = order if order is not None else torch.zeros(maps.shape[1:3], dtype=torch.long)
            parts = [(part, grid) for part in united] + [(maps, source)]
            united = [merge_thresholds(parts, by_head, grid, block=setup.block)]
            densities.append((united[0] <= _UNION_P).float().mean().item())
        thresholds = united[0]
        order = torch.zeros(thresholds.shape[1:3]).byte() if order is None else order
        levels = make_levels(thresholds.shape[-1])
        curves = [
            self._fast(index, thresholds, levels, order) for index in range(what.fast_prompts)
        ]
        fidelity, error = (torch.stack(parts).mean(0) for parts in zip(*curves, strict=True))
        write_profile(
            self._out,
            thresholds=thresholds,
            order=order,
            curves=(levels, fidelity, error),
            model=what.model,
            grid=grid,
            setup=setup,
            metadata={
                **what.metadata,
                "prompts": list(what.prompts),
                "sizes": list(what.sizes),
                "seed": what.seed,
                "fast_prompts": what.fast_prompts,
                "fast_rows": NUM_ROWS,
                "union_density": densities,
            },
        )
        return Outcome(
            prompts_done=len(what.prompts), complete=True, grid=grid, union_density=densities
        )

    def _wests(self, order: Tensor | None) -> Iterator[tuple[Tensor, Grid]]:
        """Yield maps and grid of every prompt."""
        for index in range(len(self._calibration.prompts)):
            yield self._west(index, order)

    def _order(self) -> Tensor | None:
        """Return the token order of each head [L, H], measured on the first prompt."""
        what = self._calibration
        if what.setup.permute == "none":
            return None
        path = self._path("axis", self._facts("axis", 0))
        found = shards.load(path, "axis")
        if found is None:
            observer = AxisObserver(what.setup)
            self._watch("token orders", self._job(0), observer)
            found = ({"order": observer.order()}, {})
            shards.save(path, "axis", found[0], {})
        return found[0]["order"]

    def _west(self, index: int, order: Tensor | None) -> tuple[Tensor, Grid]:
        """Return maps and grid of one prompt, measured if they are not on disk."""
        path, what = self._west_path(index), self._calibration
        found = shards.load(path, "west")
        if found is None:
            observer = WestObserver(what.setup, order)
            task = f"[{index + 1}/{len(what.prompts)}] {what.prompts[index]}"
            self._watch(task, self._job(index), observer)
            found = ({"thresholds": observer.thresholds()}, {"grid": list(observer.grid or ())})
            shards.save(path, "west", *found)
        frames, rows, columns = found[1]["grid"]
        return found[0]["thresholds"], (frames, rows, columns)

    def _west_path(self, index: int) -> Path:
        return self._path("west", self._facts("west", index))

    def _fast(
        self, index: int, thresholds: Tensor, levels: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return fidelity and error curves of one prompt on the united maps."""
        what = self._calibration
        facts = self._facts("fast", index, first_size=True)
        every = [self._facts("west", i) for i in range(len(what.prompts))]
        path = self._path("fast", {**facts, "maps": [shards.key_of(west) for west in every]})
        found = shards.load(path, "fast")
        if found is None:
            observer = FastObserver(what.setup, thresholds, levels, order=order, seed=what.seed)
            job = self._job(index, first_size=True)
            self._watch(f"fidelity: {what.prompts[index]}", job, observer)
            fidelity, error = observer.curves()
            found = ({"fidelity": fidelity, "error": error}, {})
            shards.save(path, "fast", *found)
        return found[0]["fidelity"], found[0]["error"]

    def _job(self, index: int, *, first_size: bool = False) -> Job:
        what = self._calibration
        return Job(
            prompt=what.prompts[index],
            seed=what.seed + index,
            size=0 if first_size else index % len(what.sizes),
        )

    def _facts(self, kind: str, index: int, *, first_size: bool = False) -> dict[str, Any]:
        """Return everything that a measurement of a prompt depends on."""
        what = self._calibration
        job = self._job(index, first_size=first_size)
        facts = {
            "kind": kind,
            "model": what.model,
            "prompt": job.prompt,
            "seed": job.seed,
            "size": what.sizes[job.size],
            "setup": what.setup.to_dict(),
            "facts": dict(what.facts),
        }
        if what.setup.permute == "axis" and kind != "axis":
            facts["order"] = shards.key_of(self._facts("axis", 0))
        return facts

    def _path(self, kind: str, facts: Mapping[str, Any]) -> Path:
        return self._work / f"{kind}-{shards.key_of(facts)}.safetensors"

    def _watch(self, task: str, job: Job, observer: Observer) -> None:
        """Run one generation under an observer."""
        self._report(task, 0)
        self._generate(job, observer, lambda step: self._report(task, step))
        self._steps_done += self._calibration.setup.num_steps

    def _report(self, task: str, step: int) -> None:
        if self._on_progress is not None:
            done = self._steps_done + step
            total = max(self._steps_total, done)
            self._on_progress(Progress(task=task, steps_done=done, steps_total=total))
