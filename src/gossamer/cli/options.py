"""Options that several commands share, so that they are spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gossamer.cli.errors import UsageError

Json: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Write JSON to stdout, and nothing else there.")
]
Model: TypeAlias = Annotated[
    str,
    typer.Option("--model", metavar="tiny-wan|DIR", help="The bundled model or a pipeline folder."),
]
Steps: TypeAlias = Annotated[
    int | None, typer.Option("--steps", help="Denoising steps.", show_default="the model's")
]
Height: TypeAlias = Annotated[
    int | None, typer.Option("--height", help="Pixels.", show_default="the model's")
]
Width: TypeAlias = Annotated[
    int | None, typer.Option("--width", help="Pixels.", show_default="the model's")
]
NumFrames: TypeAlias = Annotated[
    int | None, typer.Option("--num-frames", help="Frames.", show_default="the model's")
]
GuidanceScale: TypeAlias = Annotated[
    float | None,
    typer.Option("--guidance-scale", help="Classifier-free guidance.", show_default="the model's"),
]
Device: TypeAlias = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, ….", show_default="cuda if there is"),
]
Threads: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads.", show_default="torch's")
]
DenseSteps: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dense-steps",
        help="First steps with full attention: a count (3), a fraction (.3), a selector (0-3,19).",
    ),
]
DenseLayers: TypeAlias = Annotated[
    str,
    typer.Option(
        "--dense-layers",
        help="First layers with full attention: a count, a fraction or a selector.",
    ),
]
Kernel: TypeAlias = Annotated[
    str, typer.Option("--kernel", help="auto or a kernel's name, see `gossamer doctor`.")
]
OutDir: TypeAlias = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write.")]


def check_density(density: float) -> float:
    """Return what --density was given, or say what it takes."""
    if not 0.0 < density <= 1.0:
        raise UsageError(f"--density must be above 0 and at most 1, got {density:g}")
    return density


def parse_selection(text: str) -> int | float | str:
    """Read a count, a fraction or a selector as a recipe takes it: 3, .3 or "0-3,19"."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
