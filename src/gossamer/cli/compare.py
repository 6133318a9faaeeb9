"""`gossamer compare`: prompts with methods and seeds, against dense attention."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer import models
from gossamer.cli import options
from gossamer.cli.console import ProgressBar, print_json, quiet_libraries, say
from gossamer.cli.errors import Interrupted, UsageError
from gossamer.cli.model import BUNDLED, choose_device, choose_model, warn_if_busy
from gossamer.cli.report import make_report
from gossamer.cli.results import print_results
from gossamer.evaluation.compare import RESULTS, Comparison, Progress
from gossamer.evaluation.compare import compare as run_comparison
from gossamer.evaluation.files import atomic_path, check_writable
from gossamer.evaluation.generation import Pipeline
from gossamer.evaluation.variants import Variant, load_variant, parse_variant
from gossamer.evaluation.video import require_av

DEFAULT_METHODS = "dense,instagen@.15,svg2@.15"
REPORT = "report.html"


def compare(  # noqa: PLR0913 - a parameter is an option of the command
    prompts: Annotated[list[str] | None, typer.Argument(help="What the videos show.")] = None,
    *,
    out: options.OutDir = Path("out/compare"),
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts-file", help="A text file, one prompt a line.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="NAME or NAME@DENSITY, with commas; also instagen-uniform, instagen-importance.",
            show_default=DEFAULT_METHODS,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", help="A shipped recipe or a recipe file; may be repeated."),
    ] = None,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="The default methods on one held-out prompt of the bundled model."
        ),
    ] = False,
    model: options.Model = BUNDLED,
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, with commas.")] = "0",
    steps: options.Steps = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    guidance_scale: options.GuidanceScale = None,
    dense_steps: options.DenseSteps = "0",
    dense_layers: options.DenseLayers = "0",
    kernel: options.Kernel = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Do the I-th of N parts of the prompts.")
    ] = "1/1",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume", help="Keep the finished runs found in DIR, or make all again."
        ),
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help=f"Also write DIR/{REPORT} (--demo always does).")
    ] = False,
    json: options.Json = False,
) -> None:
    """Compare methods with dense attention, in quality and time.

    Writes DIR/results.json and the videos after every run; Ctrl-C keeps the finished runs, and the
    same command resumes.

    Example: gossamer compare "a red star moves up over a cat, camera is still" --methods svg2@.15
    """
    choice = choose_model(model)
    if demo and not choice.is_bundled:
        raise UsageError(f"--demo is for the bundled model: leave out --model {model}")
    texts = _choose_prompts(prompts, prompts_file, demo=demo)
    choice.check_prompts(texts)
    schedule = {
        "dense_steps": options.parse_selection(dense_steps),
        "dense_layers": options.parse_selection(dense_layers),
        "kernel": kernel,
    }
    variants = _choose_variants(methods, recipe or [], schedule)
    parsed_seeds, parsed_shard = _parse_seeds(seeds), _parse_shard(shard)
    require_av()
    check_writable(out)
    chosen_device = choose_device(device, threads)
    pipe = choice.load(chosen_device)
    settings = choice.settings(
        pipe,
        {
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "steps": steps,
            "guidance_scale": guidance_scale,
        },
    )
    comparison = Comparison(
        prompts=texts,
        variants=variants,
        settings=settings,
        seeds=parsed_seeds,
        shard=parsed_shard,
    )
    warn_if_busy(chosen_device)
    document = _run(pipe, comparison, out, resume=resume)
    if demo:
        _copy_videos(document, out)
    if report or demo:
        make_report(out / RESULTS, out / REPORT)
        say(f"report: {out / REPORT}")
    say(f"results: {out / RESULTS}")
    if json:
        print_json(document)
    else:
        print_results(document)


def _run(pipe: Pipeline, comparison: Comparison, out: Path, *, resume: bool) -> dict[str, Any]:
    """Run the comparison under a progress bar."""
    last: Progress | None = None
    try:
        with ProgressBar() as bar, quiet_libraries():

            def show(progress: Progress) -> None:
                nonlocal last
                last = progress
                count = f"[{progress.runs_done + 1}/{progress.runs_total}]"
                bar.update(f"{count} {progress.run}", progress.steps_done, progress.steps_total)

            return run_comparison(pipe, comparison, out, resume=resume, on_progress=show)
    except KeyboardInterrupt:
        done = "" if last is None else f"{last.runs_done} of {last.runs_total} runs are finished; "
        raise Interrupted(f"{done}the same command resumes from {out}") from None


def _choose_prompts(prompts: list[str] | None, path: Path | None, *, demo: bool) -> list[str]:
    """Return the prompts given, or the demo's."""
    texts = list(prompts or [])
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts += [line.strip() for line in lines if line.strip()]
    if not texts and demo:
        return models.example_prompts()[:1]
    if not texts:
        example = models.example_prompts()[0]
        raise UsageError(f"no prompt: give one, for example {example!r}, or a --prompts-file")
    return list(dict.fromkeys(texts))


def _choose_variants(
    methods: str | None, recipes: list[str], schedule: dict[str, Any]
) -> list[Variant]:
    """Return the variants given, or the default ones."""
    specs = methods if methods is not None or recipes else DEFAULT_METHODS
    named = [spec for spec in (specs or "").split(",") if spec.strip()]
    variants = [parse_variant(spec, **schedule) for spec in named]
    variants += [load_variant(recipe) for recipe in recipes]
    if not variants:
        raise UsageError(f"no method: give --methods, for example {DEFAULT_METHODS}")
    return variants


def _parse_seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds takes whole numbers with commas, got {text!r}") from None


def _parse_shard(text: str) -> tuple[int, int]:
    """Return I/N, counted from 1, as (index, count), counted from 0."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal()):
        raise UsageError(f"--shard takes I/N, for example 1/4, got {text!r}")
    return int(index) - 1, int(count)


def _copy_videos(document: dict[str, Any], out: Path) -> None:
    """Put the demo's videos at the top of the folder, named after their methods."""
    for run in document["runs"]:
        with atomic_path(out / f"{run['recipe'].replace('@', '-')}.mp4") as scratch:
            shutil.copyfile(out / run["video"], scratch)
