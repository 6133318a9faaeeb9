"""What a results document holds: `results.json` of `gossamer compare` and the files it names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gossamer.report.fields import Field, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One generation: a prompt, a seed and a method. Times are sums over the generation, in ms.

    Attributes:
        density_asked: Density the method was asked for; None where it was not asked (dense).
        density: Density realised over all attention calls, dense ones included.
        psnr_db: PSNR to the dense video of the same prompt and seed; infinite where identical.
        attention_ms: Time in attention, planning included.
        plan_ms: Time in planning.
        dense_steps: Denoising steps with full attention, as the document words it.
        reasons: What the records say of calls out of the ordinary, and of how many.
        video: The clip, if it was kept.
        records: The per-call records, if they were kept.
    """

    prompt: str
    seed: int
    method: str
    density_asked: float | None = None
    density: float | None = None
    psnr_db: float | None = None
    ssim: float | None = None
    st_lpips: float | None = None
    flicker: float | None = None
    attention_ms: float | None = None
    plan_ms: float | None = None
    total_ms: float | None = None
    plan_share: float | None = None
    dense_steps: str = ""
    kernel: str = ""
    reasons: tuple[tuple[str, int], ...] = ()
    video: Path | None = None
    records: Path | None = None

    @property
    def is_dense(self) -> bool:
        """Whether this is the run that the others are compared with."""
        return self.method == "dense"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One attention call of a run.

    Attributes:
        rel_l2: ‖sparse − dense‖ / ‖dense‖ of the call's output; None where it was not measured.
    """

    layer: int
    step: int
    density: float | None
    rel_l2: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """One plan to draw: which keys (columns) each tile of queries (rows) reads.

    Attributes:
        image: The member of the document that holds the picture, encoded as `masks` tells.
    """

    method: str
    layer: int
    head: int
    step: int
    rows: int
    cols: int
    density: float | None
    image: Field


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """A results document.

    Attributes:
        source: The file it was read from.
        runs: All runs, in the document's order.
        settings: How the videos were generated, name and value as text.
        environment: What they were generated with, name and value as text.
        recipes: TOML text of each recipe by name.
        plans: The file of masks to draw, if there is one.
    """

    source: Path
    runs: tuple[Run, ...]
    settings: dict[str, str]
    environment: dict[str, str]
    recipes: dict[str, str]
    plans: Path | None


def read_results(path: Path, *, with_files: bool = True) -> Results:
    """Read and check a results document.

    Args:
        path: The `results.json`; the files it names are looked up beside it.
        with_files: False leaves those files out, for a document that was kept without them.

    Returns:
        The document. Absent or null measurements are None; the files it names exist.

    Raises:
        ReportError: naming the file and the key, if anything is missing or garbled.
    """
    document = read_json(path)
    runs = tuple(_read_run(field, with_files) for field in document.child("runs").items())
    if not runs:
        raise document.child("runs").fail("no run to report on")
    return Results(
        source=path,
        runs=runs,
        settings=_named_words(document.child("settings")),
        environment=_named_words(document.child("environment")),
        recipes={name: field.text() for name, field in document.child("recipes").members()},
        plans=document.child("plans").optional_path() if with_files else None,
    )


def read_records(path: Path) -> tuple[CallRecord, ...]:
    """Read the per-call records of one run.

    Raises:
        ReportError: naming the file and the key, if anything is missing or garbled.
    """
    return tuple(
        CallRecord(
            layer=field.child("layer").integer(),
            step=field.child("step").integer(),
            density=field.child("density").number(),
            rel_l2=field.child("rel_l2").number(infinite=True),
        )
        for field in read_json(path).items()
    )


def read_masks(path: Path) -> tuple[Mask, ...]:
    """Read the plans to draw.

    Raises:
        ReportError: naming the file and the key, if anything is missing or garbled.
    """
    return tuple(
        Mask(
            method=field.child("method").text(),
            layer=field.child("layer").integer(),
            head=field.child("head").integer(),
            step=field.child("step").integer(),
            rows=field.child("rows").integer(),
            cols=field.child("cols").integer(),
            density=field.child("density").number(),
            image=field,
        )
        for field in read_json(path).child("masks").items()
    )


def _read_run(field: Field, with_files: bool) -> Run:
    return Run(
        prompt=field.child("prompt").text(),
        seed=field.child("seed").integer(),
        method=field.child("method").text(),
        density_asked=field.child("density_asked").number(),
        density=field.child("density").number(),
        psnr_db=field.child("psnr_db").number(infinite=True),
        ssim=field.child("ssim").number(),
        st_lpips=field.child("st_lpips").number(),
        flicker=field.child("flicker").number(),
        attention_ms=field.child("attention_ms").number(),
        plan_ms=field.child("plan_ms").number(),
        total_ms=field.child("total_ms").number(),
        plan_share=field.child("plan_share").number(),
        dense_steps=field.child("dense_steps").words(),
        kernel=field.child("kernel").words(),
        reasons=tuple(
            (reason, count.integer())
            for reason, count in field.child("reasons").members()
            if reason
        ),
        video=field.child("video").optional_path() if with_files else None,
        records=field.child("records").optional_path() if with_files else None,
    )


def _named_words(field: Field) -> dict[str, str]:
    return {name: member.words() for name, member in field.members()}
