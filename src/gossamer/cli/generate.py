"""`gossamer generate`: one video with one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gossamer.cli import options
from gossamer.cli.console import ProgressBar, print_facts, print_json, quiet_libraries
from gossamer.cli.errors import UsageError
from gossamer.cli.model import BUNDLED, choose_device, choose_model, warn_if_busy
from gossamer.evaluation.files import check_file
from gossamer.evaluation.generation import Generation
from gossamer.evaluation.generation import generate as run_pipeline
from gossamer.evaluation.variants import DENSE, Variant, load_variant, parse_variant
from gossamer.evaluation.video import FORMATS, require_av, write_video

DEFAULT_METHOD = "instagen"


def generate(  # noqa: PLR0913 - a parameter is an option of the command
    prompt: Annotated[str, typer.Argument(help="What the video shows.")],
    *,
    out: Annotated[
        Path, typer.Option("--out", help=f"The file to write: {', '.join(FORMATS)}.")
    ] = Path("out.mp4"),
    model: options.Model = BUNDLED,
    method: Annotated[
        str | None,
        typer.Option("--method", help="See `gossamer methods`.", show_default=DEFAULT_METHOD),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A shipped recipe or a recipe file instead.")
    ] = None,
    density: Annotated[
        float | None,
        typer.Option("--density", help="Share of query-key pairs to compute, above 0, at most 1."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the initial noise.")] = 0,
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
    json: options.Json = False,
) -> None:
    """Generate a video and say what its attention cost.

    Example: gossamer generate "a red star moves up over a cat, camera is still" --method svg2
    """
    variant = _choose_variant(method, recipe, density, (dense_steps, dense_layers, kernel))
    choice = choose_model(model)
    choice.check_prompts([prompt])
    require_av()
    check_file(out, FORMATS)
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
    warn_if_busy(chosen_device)
    with ProgressBar() as bar, quiet_libraries():
        generation = run_pipeline(
            pipe,
            prompt,
            variant.recipe,
            settings,
            seed=seed,
            on_step=lambda step: bar.update(variant.label, step, settings.steps),
        )
    write_video(out, generation.frames, fps=settings.fps)
    _show(out, variant, generation, as_json=json)


def _choose_variant(
    method: str | None, recipe: str | None, density: float | None, schedule: tuple[str, str, str]
) -> Variant:
    """Return the recipe that was asked for, or say which options contradict each other."""
    dense_steps, dense_layers, kernel = schedule
    if recipe is not None:
        if method is not None or density is not None or schedule != ("0", "0", "auto"):
            raise UsageError(
                "--recipe says it all: leave out --method, --density, --dense-steps, "
                "--dense-layers and --kernel, or leave out --recipe"
            )
        return load_variant(recipe)
    name = DEFAULT_METHOD if method is None else method
    if density is not None:
        options.check_density(density)
        if "@" in name:
            raise UsageError(
                f"--method {name} and --density {density:g} are two densities: give one of them"
            )
        if name == DENSE and density != 1:
            raise UsageError(
                f"--density {density:g}: dense attention has density 1: leave it out, or choose "
                "another --method"
            )
    return parse_variant(
        name if density is None else f"{name}@{density}",
        dense_steps=options.parse_selection(dense_steps),
        dense_layers=options.parse_selection(dense_layers),
        kernel=kernel,
    )


def _show(out: Path, variant: Variant, generation: Generation, *, as_json: bool) -> None:
    """Write what the generation cost to stdout."""
    summary = generation.summary
    if as_json:
        facts: dict[str, Any] = {
            "out": str(out),
            "method": variant.name,
            "density_asked": variant.density_asked,
            "total_ms": generation.total_ms,
            "dense_steps": generation.dense_steps,
            "kernel": generation.kernel,
        }
        print_json({**facts, **summary})
        return
    lines = {
        "video": str(out),
        "method": variant.label,
        "density": f"{summary['density']:.3f} of the query-key pairs, dense steps included",
        "attention": f"{summary['attention_ms'] / 1e3:.2f} s, of which planning "
        f"{summary['plan_ms'] / 1e3:.2f} s ({summary['plan_share']:.0%})",
        "total": f"{generation.total_ms / 1e3:.2f} s",
        "kernel": generation.kernel,
        "dense steps": str(generation.dense_steps),
    }
    for reason, calls in summary["reasons"].items():
        lines[f"{calls} calls"] = reason
    print_facts(lines)
