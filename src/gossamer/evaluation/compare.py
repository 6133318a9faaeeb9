"""The comparison harness: every prompt with every recipe and seed, resumable, against dense."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from gossamer.evaluation.environment import environment
from gossamer.evaluation.files import write_json
from gossamer.evaluation.generation import Generation, Pipeline, generate
from gossamer.evaluation.metrics import (
    SSIM_WINDOW,
    STLPIPS_MIN_SIDE,
    flicker,
    psnr,
    ssim,
    st_lpips,
)
from gossamer.evaluation.plans import observer_for, with_errors
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.stlpips import has_stlpips
from gossamer.evaluation.store import RunKey, RunStore
from gossamer.evaluation.variants import DENSE, Variant, dense_variant

# Fills what a first call fills (allocator, compiled kernels); the second step is the sparse one
# where a fraction of the steps is dense.
WARM_UP_STEPS = 2

RESULTS = "results.json"
PLANS = "plans.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a comparison is.

    Attributes:
        run: What is being generated, e.g. "svg2@0.15, seed 0: a red circle".
        steps_done: Denoising steps done so far, over all runs of this command.
        steps_total: Denoising steps in all; runs found finished are not counted.
        runs_done: Runs finished so far, those found finished included.
        runs_total: Runs in all.
    """

    run: str
    steps_done: int
    steps_total: int
    runs_done: int
    runs_total: int


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What to compare.

    Attributes:
        prompts: Texts.
        variants: Recipes with names; dense attention is added in front if it is not among them.
        settings: Size, steps, guidance and model name, the same for every run.
        seeds: Seeds of the initial noise.
        shard: (index, count): do the index-th (from 0) of `count` parts. A part is whole prompts
            and seeds, so that each has its dense run.

    Raises:
        ValueError: Nothing to compare, duplicates, a sparse recipe named dense, or a shard outside
            its count.
    """

    prompts: Sequence[str]
    variants: Sequence[Variant]
    settings: Settings
    seeds: Sequence[int] = (0,)
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        """Refuse an empty or ambiguous comparison."""
        for name in ("prompts", "variants", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"a comparison needs {name}, got none")
        counts = [("prompt", Counter(self.prompts)), ("seed", Counter(self.seeds))]
        counts.append(("variant", Counter(variant.label for variant in self.variants)))
        for kind, counter in counts:
            value, count = counter.most_common(1)[0]
            if count > 1:
                raise ValueError(f"{kind} {value!r} is given {count} times; give each once")
        for variant in self.variants:
            method = variant.recipe.method.name
            if variant.name == DENSE and method != DENSE:
                raise ValueError(f"the name 'dense' is for full attention, not {method}: rename it")
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard {index + 1}/{count}: the part must be between 1 and {count}")

    def ordered_variants(self) -> list[Variant]:
        """Return the variants with dense attention first."""
        others = [variant for variant in self.variants if variant.name != DENSE]
        return [dense_variant(), *others]

    def recipe_name(self, variant: Variant) -> str:
        """Return the variant's name, with its density where two variants share the name."""
        shared = [other for other in self.variants if other.name == variant.name]
        return variant.name if len(shared) < 2 else variant.label


def compare(
    pipe: Pipeline,
    comparison: Comparison,
    out_dir: Path,
    *,
    resume: bool = True,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Run a comparison and keep its results document up to date on disk.

    Finished runs that are found under `out_dir`, made with the very same settings, are not made
    again. Everything on disk is written atomically, so Ctrl-C loses the run under way alone.

    Args:
        pipe: The pipeline.
        comparison: What to compare.
        out_dir: Where results go.
        resume: False makes every run again.
        on_progress: Called before each run and after each denoising step.

    Returns:
        The results document: every finished run of the whole comparison, other shards included.

    Raises:
        GossamerError: A recipe cannot run on this model.
        ValueError: The pipeline refuses the settings.
        OSError: `out_dir` cannot be written.
    """
    return _Harness(pipe, comparison, out_dir, on_progress).run(resume=resume)


class _Harness:
    """One comparison under way."""

    def __init__(
        self, pipe: Pipeline, comparison: Comparison, out_dir: Path, on_progress: OnProgress | None
    ) -> None:
        self._pipe = pipe
        self._comparison = comparison
        self._store = RunStore(out_dir)
        self._on_progress = on_progress
        self._environment = environment(getattr(pipe, "device", "cpu"))
        self._variants = comparison.ordered_variants()
        self._warm: set[str] = set()
        self._steps_done = 0
        self._steps_total = 0
        self._runs_done = 0

    def run(self, *, resume: bool) -> dict[str, Any]:
        """Make every missing run of this shard."""
        pending = self._pending(resume=resume)
        steps = self._comparison.settings.steps
        self._steps_total = steps * sum(len(missing) for _, _, missing in pending)
        document = self._write()
        self._runs_done = len(document["runs"]) if resume else 0
        for prompt, seed, missing in pending:
            reference = self._store.load_reference(self._key(prompt, seed, self._variants[0]))
            for variant in missing:
                self._warm_up(prompt, variant)
                frames = self._make(prompt, seed, variant, reference)
                if variant.name == DENSE:
                    reference = frames
                self._runs_done += 1
                document = self._write()
        return document

    def _pending(self, *, resume: bool) -> list[tuple[str, int, list[Variant]]]:
        """List what is missing, per prompt and seed of this shard, dense first."""
        index, count = self._comparison.shard
        pending: list[tuple[str, int, list[Variant]]] = []
        for prompt, seed in list(self._cells())[index::count]:
            keys = [self._key(prompt, seed, variant) for variant in self._variants]
            missing = [
                key.variant for key in keys if not resume or self._store.finished(key) is None
            ]
            if missing and missing[0].name != DENSE and self._store.load_reference(keys[0]) is None:
                missing.insert(0, keys[0].variant)  # its float frames are needed once more
            if missing:
                pending.append((prompt, seed, missing))
        return pending

    def _cells(self) -> Iterator[tuple[str, int]]:
        """Yield every prompt with every seed."""
        for prompt in self._comparison.prompts:
            for seed in self._comparison.seeds:
                yield prompt, seed

    def _key(self, prompt: str, seed: int, variant: Variant) -> RunKey:
        return RunKey(
            prompt=prompt,
            seed=seed,
            variant=variant,
            settings=self._comparison.settings,
            environment=self._environment,
        )

    def _warm_up(self, prompt: str, variant: Variant) -> None:
        """Generate a step or two once per variant: the first timed run pays for no first time."""
        if variant.label in self._warm:
            return
        self._warm.add(variant.label)
        self._report(f"warming up {variant.label}", 0)
        steps = 1 if variant.recipe.dense_steps == 0 else WARM_UP_STEPS
        short = replace(self._comparison.settings, steps=steps)
        generate(self._pipe, prompt, variant.recipe, short, seed=0)

    def _make(self, prompt: str, seed: int, variant: Variant, reference: Tensor | None) -> Tensor:
        """Make, measure and store one run; return its frames."""
        name = f"{variant.label}, seed {seed}: {prompt}"
        self._report(name, 0)
        observer = observer_for(self._comparison.settings.steps)
        generation = generate(
            self._pipe,
            prompt,
            variant.recipe,
            self._comparison.settings,
            seed=seed,
            observer=observer,
            on_step=lambda step: self._report(name, step),
        )
        self._steps_done += self._comparison.settings.steps
        key = self._key(prompt, seed, variant)
        if variant.name == DENSE:
            self._store.save_reference(key, generation.frames)
            reference = None
        try:
            row = run_row(variant, generation, reference)
        except ValueError as error:  # NaN frames, or another size than the dense run's
            raise ValueError(f"{name}: {error}") from error
        self._store.save(
            key,
            {"prompt": prompt, "seed": seed, **row},
            generation.frames,
            with_errors([record.to_dict() for record in generation.records], observer.errors),
            observer.masks,
        )
        return generation.frames

    def _report(self, run: str, step: int) -> None:
        if self._on_progress is None:
            return
        self._on_progress(
            Progress(
                run=run,
                steps_done=self._steps_done + step,
                steps_total=self._steps_total,
                runs_done=self._runs_done,
                runs_total=len(list(self._cells())) * len(self._variants),
            )
        )

    def _write(self) -> dict[str, Any]:
        """Write the results of every finished run of the comparison, other shards' included.

        Shards write this file one over the other. Whoever writes last has looked again after
        writing, so the file that stays holds every run.
        """
        document, masks = self._collect()
        while True:
            write_json(self._store.root / PLANS, {"masks": masks}, compact=True)
            write_json(self._store.root / RESULTS, document)
            written, (document, masks) = len(document["runs"]), self._collect()
            if len(document["runs"]) == written:
                return document

    def _collect(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Assemble the results document and the plan gallery from the finished runs."""
        runs: list[dict[str, Any]] = []
        masks: dict[str, list[dict[str, Any]]] = {}
        for prompt, seed in self._cells():
            for variant in self._variants:
                stored = self._store.finished(self._key(prompt, seed, variant))
                if stored is not None:
                    name = self._comparison.recipe_name(variant)
                    runs.append({**stored["run"], "recipe": name})
                    # The gallery shows the first run of each variant.
                    masks.setdefault(name, [{"method": name, **mask} for mask in stored["masks"]])
        document = {
            "environment": self._environment,
            "settings": self._comparison.settings.to_dict(),
            "recipes": {
                self._comparison.recipe_name(variant): variant.recipe.to_toml()
                for variant in self._variants
            },
            "plans": PLANS,
            "runs": runs,
        }
        return document, [mask for pictures in masks.values() for mask in pictures]


def run_row(variant: Variant, generation: Generation, reference: Tensor | None) -> dict[str, Any]:
    """Measure a generation against the dense one.

    Args:
        variant: What it was made with.
        generation: The frames and times.
        reference: [frames, height, width, 3] of the dense run, None for the dense run itself.

    Returns:
        The row of the results, without prompt and seed. `psnr_db` is null for the dense run and
        the text "inf" for a video identical to it, as JSON has no infinity; `ssim` and `st_lpips`
        are null where the frames are too small for them, `st_lpips` also without its package, and
        `flicker` of an image.
    """
    summary = generation.summary
    row: dict[str, Any] = {
        "method": variant.name,
        "density_asked": variant.density_asked,
        "density": summary["density"],
        "psnr_db": None,
        "ssim": None,
        "st_lpips": None,
        "flicker": None,
        "attention_ms": summary["attention_ms"],
        "plan_ms": summary["plan_ms"],
        "plan_share": summary["plan_share"],
        "total_ms": generation.total_ms,
        "dense_steps": generation.dense_steps,
        "kernel": generation.kernel,
        "reasons": summary["reasons"],
    }
    if reference is not None:
        side = min(reference.shape[1:3])
        decibels = psnr(reference, generation.frames)
        row["psnr_db"] = "inf" if math.isinf(decibels) else decibels
        if side >= SSIM_WINDOW:
            row["ssim"] = ssim(reference, generation.frames)
        if side >= STLPIPS_MIN_SIDE and has_stlpips():
            row["st_lpips"] = st_lpips(reference, generation.frames)
        if len(reference) > 1:
            row["flicker"] = flicker(reference, generation.frames)
    return row
