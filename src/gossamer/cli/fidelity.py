"""`gossamer fidelity`: methods on kept or made-up attention heads, against dense attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from gossamer import models
from gossamer.cli import options
from gossamer.cli.console import (
    ProgressBar,
    print_facts,
    print_json,
    print_table,
    quiet_libraries,
    say,
)
from gossamer.cli.errors import Interrupted, UsageError
from gossamer.cli.model import choose_device, choose_model
from gossamer.evaluation.captures import Capture, CaptureRecorder, record
from gossamer.evaluation.fidelity import (
    DENSITIES,
    RESULTS,
    SEEDS,
    Fidelity,
    Progress,
    choose_variants,
    measure,
)
from gossamer.evaluation.files import check_writable
from gossamer.evaluation.structured import GRID, NAMED_SETS, structured_set
from gossamer.evaluation.variants import unknown_name
from gossamer.schedule import indices

PLOT = "fidelity.svg"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_NUMBERS = ("rel_l2", "rel_l2_median", "hellinger", "mass", "bias", "bias_expected")
_COLUMNS = (
    "method",
    "density",
    "rel. L2",
    "median",
    "Hellinger",
    "mass",
    "bias",
    "if unbiased",
)
_GRID_TEXT = ",".join(map(str, GRID))
_DENSITY_TEXT = ",".join(f"{density:g}" for density in DENSITIES)


def fidelity(  # noqa: PLR0913 - a parameter is an option of the command
    *,
    out: options.OutDir = Path("out/fidelity"),
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="FILE|high-entropy|low-entropy",
            help="A capture file or a set of structured heads; may be repeated.",
            show_default="both sets, or what --capture keeps",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="NAME or NAME@DENSITY, repeated or with commas.",
            show_default="all",
        ),
    ] = None,
    density: Annotated[
        list[str] | None,
        typer.Option(
            "--density",
            metavar="SHARE",
            help="Share of the pairs, repeated or with commas.",
            show_default=_DENSITY_TEXT,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Plans per method.")] = SEEDS,
    grid: Annotated[
        str,
        typer.Option("--grid", metavar="F,R,C", help="Frames, rows, columns of structured heads."),
    ] = _GRID_TEXT,
    capture: Annotated[
        str | None,
        typer.Option(
            "--capture",
            metavar="tiny-wan|DIR",
            help="Generate once with this model, keep its attention calls in "
            "DIR/NAME-capture.safetensors and measure on them.",
        ),
    ] = None,
    only_capture: Annotated[
        bool, typer.Option("--only-capture", help="Keep the calls and measure nothing.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="For --capture.", show_default="a held-out one")
    ] = None,
    capture_steps: Annotated[
        str | None,
        typer.Option(
            "--capture-steps",
            help="Denoising steps to keep, such as 4-8.",
            show_default="the middle one",
        ),
    ] = None,
    capture_layers: Annotated[
        str | None,
        typer.Option("--capture-layers", help="Layers to keep: 0,3-5.", show_default="all"),
    ] = None,
    capture_heads: Annotated[
        str | None,
        typer.Option("--capture-heads", help="Heads to keep: 0,3-5.", show_default="all"),
    ] = None,
    capture_branch: Annotated[
        str | None,
        typer.Option(
            "--capture-branch", help="Guidance pass to keep.", show_default="the first one"
        ),
    ] = None,
    capture_dtype: Annotated[
        str | None,
        typer.Option(
            "--capture-dtype",
            help=f"What to keep them in: {', '.join(_DTYPES)}.",
            show_default="float16",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Seed of the captured noise.", show_default="0"),
    ] = None,
    steps: options.Steps = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    guidance_scale: options.GuidanceScale = None,
    device: options.Device = None,
    threads: options.Threads = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume", help="Keep the finished cells found in DIR, or measure again."
        ),
    ] = True,
    plot: Annotated[
        bool, typer.Option("--plot", help=f"Also draw error against density: DIR/{PLOT}.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure how far methods are from dense attention on single attention heads.

    Writes DIR/fidelity.json after every cell (input, method and density); Ctrl-C keeps the finished
    cells, and the same command resumes.

    Example: gossamer fidelity --input high-entropy --method svg2,instagen --density .12,.24 --plot
    """
    request = _CaptureRequest(
        prompt=prompt,
        selection={"steps": capture_steps, "layers": capture_layers, "heads": capture_heads},
        branch=capture_branch,
        dtype=capture_dtype,
        seed=seed,
        size={
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "steps": steps,
            "guidance_scale": guidance_scale,
        },
    )
    if capture is None and (only_capture or request.is_given):
        raise UsageError("options of a capture need --capture MODEL, for example tiny-wan")
    variants = choose_variants(_split(method), _densities(density))
    check_writable(out)
    inputs = {} if capture is not None and source is None else _choose_inputs(source, grid)
    chosen_device = choose_device(device, threads)
    if capture is not None:
        path = _record(capture, request, out, chosen_device)
        say(f"capture: {path}")
        if only_capture:
            _print_capture(Capture.open(path), as_json=json)
            return
        inputs |= _choose_inputs([str(path)], grid)
    measured = Fidelity(inputs=inputs, variants=variants, seeds=seeds, device=chosen_device)
    document = _run(measured, out, resume=resume)
    for skipped in document["skipped"]:
        say(f"skipped: {_label(skipped)}: {skipped['reason']}")
    if plot:
        _draw(document, out / PLOT)
    say(f"results: {out / RESULTS}")
    if json:
        print_json(document)
    else:
        _print_results(document)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CaptureRequest:
    """The options of a capture as they were given; None where they were not."""

    prompt: str | None
    selection: Mapping[str, str | None]
    branch: str | None
    dtype: str | None
    seed: int | None
    size: Mapping[str, float | None]

    @property
    def is_given(self) -> bool:
        """Whether any option was given."""
        values = (self.prompt, self.branch, self.dtype, self.seed)
        given = (*values, *self.selection.values(), *self.size.values())
        return any(value is not None for value in given)

    def recorder(self, model: str, num_steps: int) -> CaptureRecorder:
        """Return what keeps the calls that were asked for."""
        dtype = self.dtype or "float16"
        if dtype not in _DTYPES:
            raise UsageError(f"--capture-dtype: {unknown_name('dtype', dtype, list(_DTYPES))}")
        chosen = {
            name: None if text is None else sorted(indices(f"--capture-{name}", text))
            for name, text in self.selection.items()
        }
        heads = chosen["heads"]
        return CaptureRecorder(
            model=model,
            steps=[num_steps // 2] if chosen["steps"] is None else chosen["steps"],
            layers=chosen["layers"],
            heads=None if heads is None else tuple(heads),
            branch=self.branch,
            dtype=_DTYPES[dtype],
        )


def _record(model: str, request: _CaptureRequest, out: Path, device: str) -> Path:
    """Generate once, keep the calls that were asked for, and return their file."""
    choice = choose_model(model)
    prompt = request.prompt
    if prompt is None:
        if not choice.is_bundled:
            raise UsageError(f"no prompt for {model}: give --prompt")
        prompt = models.example_prompts()[0]
    choice.check_prompts([prompt])
    pipe = choice.load(device)
    settings = choice.settings(pipe, request.size)
    recorder = request.recorder(choice.name, settings.steps)
    label = f"capturing {choice.name}"
    with ProgressBar() as bar, quiet_libraries():
        bar.update(label, 0, settings.steps)
        captured = record(
            pipe,
            prompt,
            settings,
            recorder,
            seed=request.seed or 0,
            on_step=lambda step: bar.update(label, step, settings.steps),
        )
    path = out / f"{choice.name}-capture.safetensors"
    captured.save(path)
    return path


def _run(measured: Fidelity, out: Path, *, resume: bool) -> dict[str, Any]:
    """Measure under a progress bar."""
    last: Progress | None = None
    try:
        with ProgressBar() as bar:

            def show(progress: Progress) -> None:
                nonlocal last
                last = progress
                count = f"[{progress.cells_done + 1}/{progress.cells_total}]"
                bar.update(f"{count} {progress.cell}", progress.done, progress.total)

            return measure(measured, out, resume=resume, on_progress=show)
    except KeyboardInterrupt:
        done = ""
        if last is not None:
            done = f"{last.cells_done} of {last.cells_total} cells are finished; "
        raise Interrupted(f"{done}the same command resumes from {out}") from None


def _choose_inputs(sources: list[str] | None, grid: str) -> dict[str, Capture]:
    """Return the inputs by name: the sets by their own, files by their stems."""
    inputs: dict[str, Capture] = {}
    for text in list(NAMED_SETS) if sources is None else sources:
        if text in NAMED_SETS:
            name, capture = text, structured_set(text, grid=_parse_grid(grid)).capture()
        elif Path(text).exists():
            name, capture = Path(text).stem, Capture.open(Path(text))
        else:
            unknown = unknown_name("input", text, list(NAMED_SETS))
            raise UsageError(f"{unknown}, and no such file is there")
        if name in inputs:
            raise UsageError(f"two inputs are called {name!r}: rename a file")
        inputs[name] = capture
    return inputs


def _parse_grid(text: str) -> tuple[int, int, int]:
    sizes = text.split(",")
    if len(sizes) != 3 or not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(
            f"--grid takes frames, rows and columns such as {_GRID_TEXT}, got {text!r}"
        )
    frames, rows, columns = map(int, sizes)
    return frames, rows, columns


def _draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot, importing what draws it only now."""
    from gossamer.report.fidelity import write_fidelity_plot

    write_fidelity_plot(document, path)
    say(f"plot: {path}")


def _split(values: Iterable[str] | None) -> list[str] | None:
    """Return what was repeated or given with commas, as one list."""
    if values is None:
        return None
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def _densities(values: Iterable[str] | None) -> Sequence[float]:
    parts = _split(values)
    if parts is None:
        return DENSITIES
    try:
        densities = [float(part) for part in parts]
    except ValueError:
        raise UsageError(f"--density takes numbers such as .12, got {','.join(parts)!r}") from None
    return [options.check_density(density) for density in densities]


def _print_capture(capture: Capture, *, as_json: bool) -> None:
    """Write what a capture holds to stdout."""
    triple = capture.read(capture.keys[0])
    facts: dict[str, Any] = {
        "out": str(capture.path),
        "model": capture.info.model,
        "calls": len(capture.keys),
        "steps": sorted({step for step, _, _ in capture.keys}),
        "layers": sorted({layer for _, layer, _ in capture.keys}),
        "heads": list(capture.info.heads or range(triple.q.shape[0])),
        "grid": capture.info.grid,
        "tokens": triple.q.shape[1],
        "head_dim": triple.q.shape[2],
    }
    if as_json:
        print_json(facts)
        return
    print_facts(
        {
            name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            for name, value in facts.items()
        }
    )


def _print_results(document: Mapping[str, Any]) -> None:
    """Write a table per input to stdout."""
    for source in document["inputs"]:
        rows = [row for row in document["rows"] if row["input"] == source["input"]]
        if rows:
            heads = f"{len(source['heads'])} heads, {source['calls']} calls"
            title = (
                f"{source['input']}: {source['tokens']} tokens, {heads}, "
                f"mean entropy {source['entropy']:.2f} of its maximum"
            )
            print_table(_COLUMNS, [_cells(row) for row in rows], title=title)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [row[name] for name in _NUMBERS]
    written = ["-" if number is None else f"{number:.4f}" for number in numbers]
    return (_label({**row, "input": ""}), f"{row['density']:.3f}", *written)


def _label(row: Mapping[str, Any]) -> str:
    """Return the name of a row's variant, with its input where that is not empty."""
    asked = row["density_asked"]
    name = row["method"] if asked is None else f"{row['method']}@{asked:g}"
    return f"{name} on {row['input']}" if row["input"] else name
