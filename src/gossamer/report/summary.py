"""Groups the runs of a document into variants and takes their means over prompts and seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gossamer.report import formatting
from gossamer.report.document import Results, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What is compared: runs that differ in nothing but prompt and seed are of one variant."""

    method: str
    density_asked: float | None
    dense_steps: str
    kernel: str

    @property
    def is_dense(self) -> bool:
        """Whether this is full attention, that the others are compared with."""
        return self.method == "dense"

    @property
    def name(self) -> str:
        """The method and the density asked, `svg2 at 0.15`."""
        if self.is_dense or self.density_asked is None:
            return self.method
        return f"{self.method} at {formatting.density(self.density_asked)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What one video of each variant is made for: runs are compared within a case."""

    prompt: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A mean and the range it was taken over."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The means of one variant. A measurement that no run has is None.

    Attributes:
        name: The variant, told apart from every other row.
        attention_ratio: Attention time over dense's, over the cases that both have.
        total_ratio: Generation time over dense's, likewise.
        plan_share: Share of the attention time that is planning.
    """

    variant: Variant
    name: str
    runs: tuple[Run, ...]
    density: Spread | None
    psnr_db: Spread | None
    ssim: Spread | None
    st_lpips: Spread | None
    flicker: Spread | None
    attention_ms: Spread | None
    total_ms: Spread | None
    attention_ratio: Spread | None
    total_ratio: Spread | None
    plan_share: Spread | None

    @property
    def ran_sparse(self) -> bool:
        """Whether any call was sparse, as far as the density realised tells."""
        return not self.variant.is_dense and (self.density is None or self.density.low < 1)

    @property
    def reasons(self) -> dict[str, int]:
        """What the records say of calls out of the ordinary, with the count over all runs."""
        counts: dict[str, int] = {}
        for run in self.runs:
            for reason, count in run.reasons:
                counts[reason] = counts.get(reason, 0) + count
        return dict(sorted(counts.items(), key=lambda entry: -entry[1]))

    def run_of(self, case: Case) -> Run | None:
        """Return the first run of this variant for a case."""
        return next((run for run in self.runs if case_of(run) == case), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A document by variant: dense first, then by density asked, then in the document's order."""

    rows: tuple[Row, ...]
    cases: tuple[Case, ...]
    methods: tuple[str, ...]

    @property
    def dense(self) -> Row | None:
        """The row of full attention, if it was run."""
        return next((row for row in self.rows if row.variant.is_dense), None)

    @property
    def sparse(self) -> tuple[Row, ...]:
        """The rows of sparse attention."""
        return tuple(row for row in self.rows if not row.variant.is_dense)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, in the document's order."""
        return tuple(dict.fromkeys(case.prompt for case in self.cases))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, ascending."""
        return tuple(sorted({case.seed for case in self.cases}))


def summarise(results: Results) -> Summary:
    """Group the runs by variant and take the means."""
    groups: dict[Variant, list[Run]] = {}
    for run in results.runs:
        groups.setdefault(_variant_of(run), []).append(run)
    methods = tuple(dict.fromkeys(run.method for run in results.runs))
    ordered = sorted(groups, key=lambda variant: _rank(variant, methods))
    dense = [run for run in results.runs if run.is_dense]
    return Summary(
        rows=tuple(
            _row(variant, _name(variant, ordered), tuple(groups[variant]), dense)
            for variant in ordered
        ),
        cases=tuple(dict.fromkeys(case_of(run) for run in results.runs)),
        methods=tuple(sorted(methods, key=lambda method: method != "dense")),
    )


def case_of(run: Run) -> Case:
    """Return the case a run belongs to."""
    return Case(prompt=run.prompt, seed=run.seed)


def spread(values: list[float | None]) -> Spread | None:
    """Take mean and range of the values that were measured; None if none was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(mean=sum(known) / len(known), low=min(known), high=max(known), count=len(known))


def best_rows(rows: Sequence[Row], scores: Mapping[str, float]) -> frozenset[str]:
    """Name the best rows at each density asked: methods compare at equal density.

    Rows whose calls all used full attention take no part, whatever density they were asked for.

    Args:
        rows: The rows to compare.
        scores: Score by name of row, higher is better; a row without one takes no part.

    Returns:
        The names of the best rows at every density asked that at least two rows share; of equal
        ones, all.
    """
    best: set[str] = set()
    sparse = [row for row in rows if row.ran_sparse and row.name in scores]
    for asked in {row.variant.density_asked for row in sparse}:
        names = [row.name for row in sparse if row.variant.density_asked == asked]
        if len(names) >= 2:
            top = max(scores[name] for name in names)
            best.update(name for name in names if scores[name] == top)
    return frozenset(best)


def row_of_run(run: Run, name: str, summary: Summary) -> Row:
    """Return the row of a single run, set against the dense runs of a summary."""
    dense = [] if summary.dense is None else list(summary.dense.runs)
    return _row(_variant_of(run), name, (run,), dense)


def _variant_of(run: Run) -> Variant:
    return Variant(
        method=run.method,
        density_asked=run.density_asked,
        dense_steps=run.dense_steps,
        kernel=run.kernel,
    )


def _rank(variant: Variant, methods: tuple[str, ...]) -> tuple[bool, float, int, str, str]:
    asked = math.inf if variant.density_asked is None else variant.density_asked
    order = methods.index(variant.method)
    return (not variant.is_dense, asked, order, variant.dense_steps, variant.kernel)


def _name(variant: Variant, variants: list[Variant]) -> str:
    """Name a variant by what tells it apart: dense steps and kernel only where they must."""
    alike = [other for other in variants if other.name == variant.name]
    parts = [variant.name]
    if len({other.dense_steps for other in alike}) > 1:
        parts.append(f"dense steps {variant.dense_steps or formatting.MISSING}")
    if len({other.kernel for other in alike}) > 1:
        parts.append(variant.kernel or formatting.MISSING)
    return ", ".join(parts)


def _row(variant: Variant, name: str, runs: tuple[Run, ...], dense: list[Run]) -> Row:
    return Row(
        variant=variant,
        name=name,
        runs=runs,
        density=spread([run.density for run in runs]),
        psnr_db=spread([run.psnr_db for run in runs]),
        ssim=spread([run.ssim for run in runs]),
        st_lpips=spread([run.st_lpips for run in runs]),
        flicker=spread([run.flicker for run in runs]),
        attention_ms=spread([run.attention_ms for run in runs]),
        total_ms=spread([run.total_ms for run in runs]),
        attention_ratio=_ratio(runs, dense, lambda run: run.attention_ms),
        total_ratio=_ratio(runs, dense, lambda run: run.total_ms),
        plan_share=_plan_share(runs),
    )


def _ratio(
    runs: tuple[Run, ...], dense: list[Run], time: Callable[[Run], float | None]
) -> Spread | None:
    """Divide summed time by dense's, case by case: a case that dense lacks does not count."""
    pairs: list[tuple[float, float]] = []
    for run in runs:
        own = time(run)
        base = spread([time(other) for other in dense if case_of(other) == case_of(run)])
        if own is not None and base is not None and base.mean > 0:
            pairs.append((own, base.mean))
    if not pairs:
        return None
    ratios = [own / base for own, base in pairs]
    mean = sum(own for own, _ in pairs) / sum(base for _, base in pairs)
    return Spread(mean=mean, low=min(ratios), high=max(ratios), count=len(pairs))


def _plan_share(runs: tuple[Run, ...]) -> Spread | None:
    """Take the share of planning from the times, or as recorded where a time is missing."""
    shares = [
        run.plan_ms / run.attention_ms
        if run.plan_ms is not None and run.attention_ms
        else run.plan_share
        for run in runs
    ]
    return spread(shares)
