"""`gossamer calibrate`: measure a model's static sparsity and write it as a profile."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import gossamer as gs
from gossamer import models
from gossamer.calibration import Calibration, Job, Outcome, Progress, Setup, measured_steps
from gossamer.calibration import calibrate as run_calibration
from gossamer.calibration.capture import Observer, OnStep
from gossamer.cli import options
from gossamer.cli.console import ProgressBar, print_facts, print_json, quiet_libraries, say
from gossamer.cli.errors import Interrupted, UsageError
from gossamer.cli.model import BUNDLED, ModelChoice, choose_device, choose_model, warn_if_busy
from gossamer.evaluation.files import check_file, check_writable
from gossamer.evaluation.generation import Pipeline
from gossamer.evaluation.generation import generate as run_pipeline
from gossamer.evaluation.pipelines import model_digest
from gossamer.evaluation.settings import Settings
from gossamer.evaluation.variants import dense_variant

NUM_PROMPTS = 8


def calibrate(  # noqa: PLR0913 - a parameter is an option of the command
    prompts: Annotated[
        list[str] | None, typer.Argument(help="What the calibration videos show.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="The profile to write.")] = Path(
        "scaling.safetensors"
    ),
    work: Annotated[
        Path, typer.Option("--work", metavar="DIR", help="Where finished measurements are kept.")
    ] = Path("out/calibrate"),
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", help="A text file, one prompt a line.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            min=1,
            help="How many of the prompts; of the bundled model's own, the last ones.",
            show_default=f"all given, or {NUM_PROMPTS} of the model's",
        ),
    ] = None,
    model: options.Model = BUNDLED,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            metavar="HxWxF",
            help="Height, width, frames; repeated, prompts take turns. The first is the profile's.",
            show_default="the model's",
        ),
    ] = None,
    steps: options.Steps = None,
    guidance_scale: options.GuidanceScale = None,
    buckets: Annotated[
        int, typer.Option("--buckets", min=1, help="Stretches of steps with one map each.")
    ] = 4,
    measured: Annotated[
        int | None,
        typer.Option(
            "--measured-steps", min=1, help="Steps that are measured.", show_default="all"
        ),
    ] = None,
    fast_prompts: Annotated[
        int, typer.Option("--fast-prompts", min=1, help="Prompts that fidelity is measured on.")
    ] = 1,
    permute: Annotated[
        str, typer.Option("--permute", help="none, or axis: a token order for each head.")
    ] = "none",
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens per block.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Prompt i has the noise of seed + i.")] = 0,
    device: options.Device = None,
    threads: options.Threads = None,
    json: options.Json = False,
) -> None:
    """Measure where a model attends, once, for the method `scaling`.

    Every finished prompt is kept in --work, so the same command goes on after Ctrl-C or a crash.
    Under torchrun the prompts are dealt to its processes, and the last one to finish writes.

    Example: gossamer calibrate --num-prompts 8 --out mine.safetensors
    """
    choice = choose_model(model)
    texts = _choose_prompts(choice, prompts or [], prompts_file, num_prompts)
    choice.check_prompts(texts)
    sizes = [_parse_size(text) for text in size or []]
    rank, world = _environment_number("RANK", 0), _environment_number("WORLD_SIZE", 1)
    check_file(out, (".safetensors",))
    check_writable(work)
    chosen_device = choose_device(_local_device(device, world), threads)
    pipe = choice.load(chosen_device)
    given = {"steps": steps, "guidance_scale": guidance_scale}
    settings = [choice.settings(pipe, {**given, **one}) for one in sizes or [{}]]
    setup = Setup(
        num_steps=settings[0].steps,
        num_buckets=buckets,
        measured=measured_steps(settings[0].steps, measured),
        block=block,
        permute=permute,
    )
    calibration = Calibration(
        model=choice.name,
        prompts=texts,
        setup=setup,
        sizes=[f"{one.height}x{one.width}x{one.num_frames}" for one in settings],
        facts=_facts(choice, settings[0], chosen_device),
        metadata=_metadata(choice, texts, settings, setup, (fast_prompts, seed)),
        fast_prompts=fast_prompts,
        seed=seed,
        rank=rank,
        world=world,
    )
    warn_if_busy(chosen_device)
    outcome = _run(pipe, calibration, settings, work, out)
    _show(out, work, calibration, outcome, as_json=json)


def _run(
    pipe: Pipeline, calibration: Calibration, settings: Sequence[Settings], work: Path, out: Path
) -> Outcome:
    """Run the calibration under a progress bar."""
    dense = dense_variant().recipe

    def generate(job: Job, observer: Observer, on_step: OnStep) -> None:
        run_pipeline(
            pipe,
            job.prompt,
            dense,
            settings[job.size],
            seed=job.seed,
            observer=observer,
            on_step=on_step,
        )

    try:
        with ProgressBar() as bar, quiet_libraries():

            def show(progress: Progress) -> None:
                bar.update(progress.task, progress.steps_done, progress.steps_total)

            return run_calibration(calibration, generate, work=work, out=out, on_progress=show)
    except KeyboardInterrupt:
        raise Interrupted(f"the same command goes on from {work}") from None


def _choose_prompts(
    choice: ModelChoice, given: list[str], path: Path | None, number: int | None
) -> list[str]:
    """Return the prompts given, or the bundled model's own."""
    texts = list(given)
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts += [line.strip() for line in lines if line.strip()]
    if not texts and choice.is_bundled:
        # The last ones: comparisons take the first ones, and stay on prompts that are new.
        return models.example_prompts()[-(NUM_PROMPTS if number is None else number) :]
    if not texts:
        raise UsageError("no prompt: give about eight that differ, or a --prompts-file")
    return list(dict.fromkeys(texts))[:number]


def _parse_size(text: str) -> dict[str, float | None]:
    """Return height, width and frames of HxWxF."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise UsageError(f"--size takes HxWxF, for example 480x832x81, got {text!r}")
    height, width, num_frames = map(int, match.groups())
    return {"height": height, "width": width, "num_frames": num_frames}


def _environment_number(name: str, default: int) -> int:
    """Return a number that torchrun puts into the environment."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} in the environment is no whole number")
    return int(text)


def _local_device(device: str | None, world: int) -> str | None:
    """Give each process of a torchrun a GPU of its own, unless a device was asked for."""
    if device is None and world > 1 and torch.cuda.is_available():
        return f"cuda:{_environment_number('LOCAL_RANK', 0)}"
    return device


def _facts(choice: ModelChoice, settings: Settings, device: str) -> dict[str, Any]:
    """Return what else decides the numbers: weights, guidance, versions."""
    return {
        "model_digest": _digest(choice),
        "guidance_scale": settings.guidance_scale,
        "dtype": settings.dtype,
        "device": torch.device(device).type,
        "gossamer": gs.__version__,
        "torch": torch.__version__,
    }


def _digest(choice: ModelChoice) -> str:
    """Fingerprint the weights that attend: the profile itself may lie in the model's folder."""
    part = choice.folder / "transformer"
    return model_digest(part if part.is_dir() else choice.folder)


def _metadata(
    choice: ModelChoice,
    texts: Sequence[str],
    settings: Sequence[Settings],
    setup: Setup,
    numbers: tuple[int, int],
) -> dict[str, Any]:
    """Return what the profile says beside its own facts: weights, settings, the command."""
    first, (fast_prompts, seed) = settings[0], numbers
    words: list[str] = ["gossamer", "calibrate", *texts, "--model", choice.name]
    for one in settings:
        words += ["--size", f"{one.height}x{one.width}x{one.num_frames}"]
    words += ["--steps", str(first.steps), "--guidance-scale", f"{first.guidance_scale:g}"]
    words += ["--buckets", str(setup.num_buckets), "--measured-steps", str(len(setup.measured))]
    words += ["--fast-prompts", str(fast_prompts), "--permute", setup.permute]
    words += ["--block", str(setup.block), "--seed", str(seed)]
    plain = asdict(replace(first, model_digest=_digest(choice)))
    kept = ("model_digest", "guidance_scale", "dtype")
    return {
        **{name: plain[name] for name in kept},
        "gossamer": gs.__version__,
        "command": shlex.join(words),
    }


def _show(
    out: Path, work: Path, calibration: Calibration, outcome: Outcome, *, as_json: bool
) -> None:
    """Write what came of it to stdout."""
    prompts = len(calibration.prompts)
    if as_json:
        print_json(
            {
                "out": str(out) if outcome.complete else None,
                "work": str(work),
                "complete": outcome.complete,
                "model": calibration.model,
                "prompts": prompts,
                "prompts_done": outcome.prompts_done,
                "grid": None if outcome.grid is None else list(outcome.grid),
                "union_density": list(outcome.union_density),
            }
        )
        return
    if not outcome.complete:
        say(
            f"{outcome.prompts_done} of {prompts} prompts are measured; the process that finishes "
            f"last writes {out}"
        )
        return
    union = ", ".join(f"{share:.3f}" for share in outcome.union_density)
    print_facts(
        {
            "profile": str(out),
            "model": calibration.model,
            "grid": "x".join(map(str, outcome.grid or ())),
            "prompts": str(prompts),
            "union density at p = 0.25, after each prompt": union,
            "use it": f'gossamer.ScalingAttention(profile="{out}", density=0.5)',
        }
    )
