"""MInference: one of three patterns per head: A-shape, vertical-slash or block-sparse."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gossamer.call import Call
from gossamer.errors import PlanError, described
from gossamer.methods.base import Method, State, check_tensors, logit_scale
from gossamer.methods.blocked import block_plan, pooled_scores
from gossamer.methods.params import check_count, check_share, refuse_unused
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan
from gossamer.select import BlockLayout, block_layout, top_blocks
from gossamer.select.probe import Lines, line_sums, probe, probe_rows
from gossamer.select.spans import Spans, block_spans, visible_pairs
from gossamer.select.vertical_slash import (
    block_sums,
    column_blocks,
    diagonal_blocks,
    line_scores,
)
from gossamer.select.whole_head import top_pairs, top_rows

PATTERNS = ("vertical-slash", "block-sparse", "a-shape")
_FIRST_COLUMNS = 30  # that vertical-slash keeps in any case, and
_LAST_DIAGONALS = 100  # so many at the query's position; both as published
# What each pattern reads of the parameters; "auto" is the search, and reads all patterns' too.
_USES = {
    "vertical-slash": ("columns", "diagonals", "queries"),
    "block-sparse": ("blocks",),
    "a-shape": ("sink", "local"),
    "auto": ("search_density", "queries"),
}
_COUNTS = ("local", "columns", "diagonals", "blocks")  # what a density stands for
_MARGIN = 1e-3  # of mass: below it rounding, not the head, would decide between patterns


class _Scene(NamedTuple):
    """One call, and where its tiles and blocks lie."""

    q: Tensor
    k: Tensor
    call: Call
    layout: BlockLayout
    spans: Spans


@register
@dataclass(frozen=True, kw_only=True)
class MInference(Method):
    """Read the blocks of a sparse pattern that suits the head.

    * `a-shape`: the first `sink` keys and the `local` keys up to the query.
    * `vertical-slash`: exact softmax of `queries` queries, the last ones (evenly spaced ones in
      calls that are not causal), summed over columns and over diagonals; the `columns` and the
      `diagonals` of the greatest sums. The first 30 columns and the last 100 diagonals are among
      them in any case.
    * `block-sparse`: queries averaged over tiles and keys over blocks; the `blocks` blocks of the
      greatest logits per tile.
    * `auto`: per head the pattern that covers most of the exact attention of `queries` evenly
      spaced queries, each pattern holding `search_density` of the visible pairs. The paper searches
      offline under a fixed budget; so the choice does not depend on the density asked either, and
      a greater one keeps whatever a smaller one does.

    The plan holds whole blocks: where a pattern is defined per query, a tile reads every block that
    holds one of its pairs, at either end of a line. A smaller `block` follows lines more closely.
    In calls that are not causal, distances to a query count on both of its sides.

    Under `density` lines are ranked as blocks: a block promises the mass of its column (`a-shape`:
    the sink first, then the nearest) or of its diagonals, whichever is more, and the best of a head
    are kept; what a pattern keeps in any case comes first inside the budget. `block-sparse` keeps
    the same share of every row, best blocks first.

    Differs from the public code: logits carry the call's scale in every estimate; batches, padding
    (the last valid queries are looked at, the first valid keys are the sink), chunks of queries
    after a prefix, and grouped heads, without repeating keys; no configuration files.

    Attributes:
        pattern: "auto" or one of the three for every head.
        density: Share of a head's visible pairs instead of the patterns' own counts below.
        sink: Keys at the start that `a-shape` keeps (published: 128).
        local: Keys up to the query that `a-shape` keeps (published: 3968).
        columns: Keys that `vertical-slash` keeps for all queries (published: 1000).
        diagonals: Offsets that `vertical-slash` keeps (published: 6096).
        blocks: Blocks per tile of `block-sparse` (published: 100 of 64 keys).
        queries: Queries that are looked at exactly (published: 64).
        search_density: Share of the visible pairs at which `auto` compares the patterns.
        block: Keys per block (published: 64).
        tile: Queries per tile.
    """

    name: ClassVar[str] = "minference"
    paper: ClassVar[str] = "MInference, arXiv 2407.02490"

    pattern: str = "auto"
    density: float | None = None
    sink: int = 128
    local: int = 3968
    columns: int = 1000
    diagonals: int = 6096
    blocks: int = 100
    queries: int = 64
    search_density: float = 0.2
    block: int = 64
    tile: int = 128

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.pattern not in ("auto", *PATTERNS):
            allowed = ", ".join(("auto", *PATTERNS))
            raise PlanError(
                f"{self.name}: pattern={described(self.pattern)} must be one of {allowed}"
            )
        if self.density is not None:
            check_share(self.name, "density", self.density)
        check_share(self.name, "search_density", self.search_density)
        counts = ("sink", "local", "columns", "diagonals", "blocks", "queries", "block", "tile")
        for name in counts:
            check_count(self.name, name, getattr(self, name))
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Refuse what the pattern, or a budget by density, leaves without effect."""
        used = {name for key, names in _USES.items() for name in names if self._may_use(key)}
        every = {name for names in _USES.values() for name in names}
        unused = sorted(every - used)
        refuse_unused(self, f"with pattern={self.pattern!r}", *unused)
        if self.density is not None:
            refuse_unused(self, f"beside density={self.density:g}", *_COUNTS)

    def _may_use(self, pattern: str) -> bool:
        """Return whether a head may have the pattern."""
        return self.pattern in (pattern, "auto")

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method with its budget set to `density`."""
        return cls(density=density, **params)

    def static_key(self, call: Call) -> Hashable | None:
        """Return the method itself where the pattern depends on shapes alone."""
        del call
        return self if self.pattern == "a-shape" else None

    def patterns(self, q: Tensor, k: Tensor, call: Call | None = None) -> Tensor:
        """Return each head's pattern, [B, H] int64 places in `PATTERNS`.

        Args:
            q: [B, H, N, D] queries of a call without text.
            k: [B, Hk, S, D] keys.
            call: The facts about the call; None for self-standing attention.
        """
        call = Call() if call is None else call
        check_tensors(q, k, k)
        call.check(q.shape[0], q.shape[2], k.shape[2])
        if self.pattern != "auto":
            return torch.full(q.shape[:2], PATTERNS.index(self.pattern), device=q.device)
        scene = self._scene(q, k, call)
        return self._search(scene, {name: self._scores(name, scene) for name in PATTERNS})

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Take each head's pattern at the budget."""
        del v, state
        scene = self._scene(q, k, call)
        names = PATTERNS if self.pattern == "auto" else (self.pattern,)
        ranked = len(names) > 1 or self.density is not None
        scores = {name: self._scores(name, scene) for name in names} if ranked else {}
        masks = [
            self._own(name, scene)
            if self.density is None
            else self._at(name, scores[name], self.density, scene)
            for name in names
        ]
        keep = masks[0]
        if len(names) > 1:
            choice = self._search(scene, scores)[:, :, None, None]  # [B, H, 1, 1]
            for place, mask in enumerate(masks):
                keep = torch.where(choice == place, mask, keep)
        return block_plan(keep, q.shape[2], k.shape[2], call, tile=self.tile, block=self.block)

    def _scene(self, q: Tensor, k: Tensor, call: Call) -> _Scene:
        """Lay out tiles and blocks."""
        lengths, tile, block = (q.shape[2], k.shape[2]), self.tile, self.block
        layout = block_layout(call, *lengths, tile=tile, block=block, device=q.device)
        spans = block_spans(call, *lengths, tile=tile, block=block, device=q.device)
        return _Scene(q, k, call, layout, spans)

    def _scores(self, name: str, scene: _Scene) -> Tensor:
        """Return the ranking of one pattern's blocks, [B|1, H|1, R, C] floating."""
        q, k, call, _, spans = scene
        if name == "block-sparse":
            return pooled_scores(q, k, call, tile=self.tile, block=self.block)
        low, high = spans.offsets()
        if name == "a-shape":
            distance = low.clamp(min=0).maximum(-high)
            first = column_blocks(self._first_keys(self.sink, scene), self.block)
            return torch.where(first[:, None], q.shape[2] + k.shape[2], -distance).float()
        scores = line_scores(self._lines(scene), spans, self.block)
        first = column_blocks(self._first_keys(_FIRST_COLUMNS, scene), self.block)
        # Scores lie in 0…1: two more come before all others.
        return scores + 2.0 * (first[:, None] | self._near(_LAST_DIAGONALS, scene))

    def _at(self, name: str, scores: Tensor, density: float, scene: _Scene) -> Tensor:
        """Return the blocks of one pattern at a density, [B|1, H|1, R, C] bool."""
        q, k, call, layout, _ = scene
        pairs = visible_pairs(
            call, q.shape[2], k.shape[2], tile=self.tile, block=self.block, device=q.device
        )
        choose = top_rows if name == "block-sparse" else top_pairs
        return choose(scores, pairs, density, layout)

    def _own(self, name: str, scene: _Scene) -> Tensor:
        """Return the blocks of one pattern under its own counts, [B|1, H|1, R, C] bool."""
        layout, spans = scene.layout, scene.spans
        if name == "block-sparse":
            scores = self._scores(name, scene).masked_fill(~layout.possible, -torch.inf)
            count = torch.full(scores.shape[:3], self.blocks, device=scores.device)
            return top_blocks(scores, count, forced=layout.forced)
        if name == "a-shape":
            first = column_blocks(self._first_keys(self.sink, scene), self.block)
            keep = first[:, None] | self._near(self.local, scene)
        else:
            lines = self._lines(scene)
            columns = self._top_columns(lines, scene)
            diagonals = self._top_diagonals(lines)
            keep = column_blocks(columns, self.block)
            keep = keep | diagonal_blocks(diagonals, lines.first, spans)
        keep = keep & layout.possible
        return keep if layout.forced is None else keep | layout.forced

    def _lines(self, scene: _Scene) -> Lines:
        """Return the column and diagonal sums of the queries that represent a head."""
        q, k, call = scene.q, scene.k, scene.call
        where = "last" if call.causal else "spread"
        picked = probe(call, q.shape[2], k.shape[2], self.queries, where=where, device=q.device)
        return line_sums(q, k, call, picked, logit_scale(q, call))

    def _top_columns(self, lines: Lines, scene: _Scene) -> Tensor:
        """Return the chosen columns, [B, H, S] bool; the first ones are among them."""
        sums = lines.columns
        if scene.call.key_valid is not None:
            sums = sums.masked_fill(~scene.call.key_valid[:, None], -torch.inf)
        first = self._first_keys(_FIRST_COLUMNS, scene)[:, None]
        count = torch.full(sums.shape[:2], self.columns, device=sums.device)
        return top_blocks(sums, count, forced=first.expand(sums.shape))

    def _top_diagonals(self, lines: Lines) -> Tensor:
        """Return the chosen diagonals, [B, H, L] bool; the last ones are among them."""
        sums = lines.diagonals
        offset = torch.arange(lines.first, lines.first + sums.shape[-1], device=sums.device)
        last = (offset.abs() < _LAST_DIAGONALS).expand(sums.shape)
        count = torch.full(sums.shape[:2], self.diagonals, device=sums.device)
        return top_blocks(sums, count, forced=last)

    def _first_keys(self, number: int, scene: _Scene) -> Tensor:
        """Return the first valid keys, [B|1, S] bool."""
        valid = scene.call.key_valid
        if valid is None:
            valid = torch.ones(1, scene.k.shape[2], dtype=torch.bool, device=scene.k.device)
        return valid & (valid.long().cumsum(-1) <= number)

    def _near(self, number: int, scene: _Scene) -> Tensor:
        """Return the blocks that hold a pair of an offset below `number`, [B|1, 1, R, C] bool."""
        low, high = scene.spans.offsets()
        least = 0 if scene.call.causal else 1 - number
        return (low < number) & (high >= least) & (low <= high)

    def _search(self, scene: _Scene, scores: dict[str, Tensor]) -> Tensor:
        """Return the pattern that covers most of some queries' attention, [B, H] int64."""
        q, k, call = scene.q, scene.k, scene.call
        batch, heads, num_queries, _ = q.shape
        picked = probe(call, num_queries, k.shape[2], self.queries, where="spread", device=q.device)
        keeps = [self._at(name, scores[name], self.search_density, scene) for name in PATTERNS]
        covered = [q.new_zeros(batch, heads, dtype=torch.float64) for _ in PATTERNS]
        for part, rows in probe_rows(q, k, call, picked, logit_scale(q, call)):
            mass = block_sums(rows, self.block)  # [B, H, n, C]
            row = picked.query[:, None, part, None] // self.tile
            row = row.expand(batch, heads, -1, mass.shape[-1])
            for total, keep in zip(covered, keeps, strict=True):
                kept = keep.expand(batch, heads, -1, -1).gather(2, row)
                total += torch.where(kept, mass, 0.0).sum((-2, -1), dtype=torch.float64)
        number = picked.present.sum(-1).clamp(min=1)[:, None]
        best = covered[0] / number
        choice = torch.zeros_like(best, dtype=torch.int64)
        for place in range(1, len(PATTERNS)):
            share = covered[place] / number
            better = share > best + _MARGIN
            choice = torch.where(better, place, choice)
            best = torch.where(better, share, best)
        return choice
