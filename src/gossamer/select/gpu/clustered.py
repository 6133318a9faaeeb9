"""Selection by clusters on a GPU: from scores of clusters to lists of keys.

The functions of `select` call these where `can_run` says so, and give the same result elsewhere.
Nothing here waits for the device, and lengths are run-time values of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gossamer.group.gpu.available import runs_triton
from gossamer.group.tiles import Sorted

if TYPE_CHECKING:
    from gossamer.select.sample import Draws

MOST_CLUSTERS = 4096  # that the registers of one program hold
_TABLE_BYTES = 512 << 20  # of the numbers per row and cluster, and of the marks, held at once
_ROWS_PER_WORD = 32
_MASK = (1 << 64) - 1

# Chosen by registers and instructions of the machine code, not yet by time on a GPU.
_MARK = {"BLOCK": 128, "num_warps": 4}
_TURN = {"WORDS": 4, "num_warps": 4}
_EMIT = {"WORDS": 32, "num_warps": 4}
_SHORT = 1 << 15  # clusters that 16 bits name


class Tables(NamedTuple):
    """What rows read of each cluster, in the form from which lists are made.

    Attributes:
        begin: [rows, C] float64, where the cluster begins, in thresholds from its first: -1 … 0.
        pi: [rows, C] float64, thresholds a key, its probability: 2 where all are read, 0 where none
            is.
        log_weight: [rows, C] float32, log weight of each key that is read.
    """

    begin: Tensor
    pi: Tensor
    log_weight: Tensor


def can_run(x: Tensor) -> bool:
    """Return whether the kernels take tensors where `x` lies; interpreted ones take the CPU's."""
    return runs_triton(x)


def take_clusters(scores: Tensor, sizes: Tensor, budget: Tensor, crossing: str) -> Tensor:
    """Take whole clusters by descending score; as `select.take_clusters`.

    Args:
        scores: [..., R, C] float32 or float64, with C at most `MOST_CLUSTERS`.
        sizes: [..., 1 or R, C] int64.
        budget: [..., 1 or R] int64.
        crossing: "exclude", "include" or "cut".

    Returns:
        [..., R, C] int64.
    """
    from gossamer.select.gpu import decide as module

    take: Any = module.take  # Triton's types do not know that it takes a grid
    lead, (num_rows, num_clusters) = scores.shape[:-2], scores.shape[-2:]
    taken = torch.empty(scores.shape, dtype=torch.int64, device=scores.device)
    if taken.numel() == 0:
        return taken
    sizes = sizes.expand(*lead, *sizes.shape[-2:])
    budget = budget.expand(*lead, budget.shape[-1])
    take[(taken.numel() // num_clusters,)](
        scores.contiguous(),
        sizes.contiguous(),
        budget.contiguous(),
        taken,
        num_rows if sizes.shape[-2] == 1 else 1,
        num_rows if budget.shape[-1] == 1 else 1,
        num_clusters,
        CROSSING=crossing,
        **_registers(num_clusters),
    )
    return taken


def list_taken(taken: Tensor, keys: Sorted, start: Tensor, pool: int, room: int | None) -> Tensor:
    """List the first `taken` keys of each cluster.

    Args:
        taken: [B, H, R, C] int64.
        keys: The keys sorted by cluster.
        start: [B * H * R] int64, where each row begins in the pool.
        pool: Entries of the pool.
        room: Places of each row, filled up with its greatest key; None for rows without slack.

    Returns:
        The pool, [pool] int32.
    """
    lines = _Lines(taken.shape, keys)
    index = torch.empty(pool, dtype=torch.int32, device=taken.device)
    count = torch.empty_like(start, dtype=torch.int32)
    rows = taken.flatten(0, 2)
    for part in lines.parts(_mark_bytes(lines)):
        of = lines.rows_of(part)
        bits = lines.mark(part, taken=rows[of].contiguous())
        lines.emit(part, bits, start[of], index, count[of], room=room)
    return index


def list_draws(draws: Draws, keys: Sorted, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the certain and the drawn keys; as `select.list_draws`.

    Args:
        draws: What each row reads of each cluster, [B, H, R, C].
        keys: The keys sorted by cluster.
        width: Places of each row.

    Returns:
        Index [B * H * R * width] int32, log weight, the same shape in float32, and count
        [B * H * R] int32.
    """
    from gossamer.select.gpu import decide as module

    tables_of_draws: Any = module.tables_of_draws
    lines = _Lines(draws.taken.shape, keys)
    per_cluster = [x.flatten(0, 2) for x in (draws.taken, draws.log_pi, draws.offset)]
    per_row = [x.reshape(-1) for x in (draws.count, draws.phase)]

    def tables(part: slice) -> Tables:
        of = lines.rows_of(part)
        out = _empty_tables(per_cluster[0][of])
        grid = (out.pi.shape[0], -(-lines.num_clusters // 512))
        inputs = [x[of].contiguous() for x in per_cluster]
        tables_of_draws[grid](
            *inputs,
            *(x[of] for x in per_row),
            lines.size[part],
            *out,
            lines.num_rows,
            lines.num_clusters,
            BLOCK=512,
        )
        return out

    return _list_sampled(lines, tables, width)


def list_sampled(
    log_scores: Tensor,
    keys: Sorted,
    exact: Tensor,
    total: Tensor,
    phase: Tensor,
    *,
    uniform: bool,
    certain: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose and list exact and sampled keys; as `select.list_sampled`, with C bounded.

    Args:
        log_scores: [B, H, R, C] float32, with C at most `MOST_CLUSTERS`.
        keys: The keys sorted by cluster.
        exact: [B, H, 1] int64.
        total: [B, H, 1] int64.
        phase: [B, H, R] float64.
        uniform: Whether all keys that are not exact have one probability.
        certain: At least this log probability is certainty.
        width: Places of each row.

    Returns:
        As `list_draws`.
    """
    from gossamer.select.gpu import decide as module

    decide: Any = module.decide
    lay_out: Any = module.lay_out
    lines = _Lines(log_scores.shape, keys)
    scores, phases = log_scores.flatten(0, 2), phase.reshape(-1)
    log_size = lines.size.double().log()
    exact, total = (x.expand(*log_scores.shape[:2], 1).reshape(-1) for x in (exact, total))

    def tables(part: slice) -> Tables:
        of = lines.rows_of(part)
        out = _empty_tables(scores[of])
        grid, numbers = (out.pi.shape[0],), (lines.num_rows, lines.num_clusters)
        decide[grid](
            scores[of].contiguous(),
            lines.size[part],
            log_size[part],
            exact[part],
            total[part],
            out.pi,  # log(pi) until they are laid out
            *numbers,
            UNIFORM=uniform,
            **_registers(lines.num_clusters, uniform=uniform),
        )
        lay_out[grid](
            lines.size[part], phases[of], *out, *numbers, CERTAIN=certain, BLOCK=512, num_warps=4
        )
        return out

    return _list_sampled(lines, tables, width)


def row_phases(shared: tuple[int, ...], heads: Tensor, num_rows: int) -> Tensor:
    """Return a phase for each row of each head, [H, R] float64 with 32 random bits.

    Args:
        shared: What all rows share of the counter, its first keys.
        heads: [H] int64, the global heads, its next.
        num_rows: R.
    """
    from gossamer.select.gpu import decide as module

    phases: Any = module.phases
    phase = torch.empty(len(heads), num_rows, dtype=torch.float64, device=heads.device)
    state = 0
    for key in shared:
        state = _mix((state ^ _mix(key + 0x9E3779B97F4A7C15)) + 0x9E3779B97F4A7C15)
    upper, lower = (half - ((half >> 31) << 32) for half in (state >> 32, state & 0xFFFFFFFF))
    if phase.numel():
        grid = (len(heads), -(-num_rows // 128))
        phases[grid](heads.contiguous(), phase, upper, lower, num_rows, BLOCK=128)
    return phase


def _mix(x: int) -> int:
    """Scramble 64 bits as `gossamer.counter` does."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class _Lines:
    """Rows of all heads (lines) and their keys, worked on a bounded number of lines at a time.

    Attributes:
        order: [lines, S] int64, keys by cluster; a permutation.
        begin: [lines, C] int64, where each cluster begins in it, ascending.
        size: [lines, C] int64.
        num_lines: B * H.
        num_rows: R.
        num_clusters: C.
        num_keys: S.
        num_words: Words of 32 rows, ceil(R / 32).
    """

    def __init__(self, shape: torch.Size, keys: Sorted) -> None:
        from gossamer.select.gpu import listing as module

        self._kernels: Any = module
        batch, heads, self.num_rows, self.num_clusters = shape
        self.num_lines = batch * heads
        self.order, self.begin, self.size = (x.flatten(0, 1).contiguous() for x in keys)
        self.num_keys = self.order.shape[1]
        self.num_words = -(-self.num_rows // _ROWS_PER_WORD)
        self._at_place = torch.empty_like(self.order, dtype=torch.int32)
        short = torch.int16 if self.num_clusters <= _SHORT else torch.int32
        self._of_key = torch.empty_like(self.order, dtype=short)
        if self._of_key.numel() and self.num_clusters:
            self._kernels.name[(-(-self.num_keys // 256), self.num_lines)](
                self.order,
                self.begin,
                self.size,
                self._at_place,
                self._of_key,
                self.num_clusters,
                self.num_keys,
                BLOCK=256,
            )

    def parts(self, bytes_per_line: int) -> list[slice]:
        """Return the lines in parts whose numbers fit the bound; none where no row reads."""
        if 0 in (self.num_lines, self.num_rows, self.num_clusters, self.num_keys):
            return []
        chunk = max(1, _TABLE_BYTES // bytes_per_line)
        return [
            slice(low, min(low + chunk, self.num_lines)) for low in range(0, self.num_lines, chunk)
        ]

    def rows_of(self, part: slice) -> slice:
        """Return the rows of a part's lines."""
        return slice(part.start * self.num_rows, part.stop * self.num_rows)

    def mark(
        self, part: slice, *, taken: Tensor | None = None, tables: Tables | None = None
    ) -> Tensor:
        """Return what the rows of `part` read, [rows, ceil(S / 32)] int32, a bit a key.

        Args:
            part: The lines.
            taken: [rows, C] int64, keys read for certain; None where tables say what is read.
            tables: The tables; None where `taken` is given.
        """
        lines = part.stop - part.start
        words = torch.empty(
            lines, self.num_words, self.num_keys, dtype=torch.int32, device=self.order.device
        )
        blocks = -(-self.num_keys // _MARK["BLOCK"])
        self._kernels.mark[(lines * self.num_words * blocks,)](
            taken,
            *((None, None) if tables is None else tables[:2]),
            self.order[part],
            self.begin[part],
            self._at_place[part],
            words,
            self.num_rows,
            self.num_words,
            self.num_clusters,
            self.num_keys,
            blocks,
            SAMPLED=tables is not None,
            **_MARK,
        )
        num_bits = -(-self.num_keys // 32)
        blocks = -(-num_bits // _TURN["WORDS"])
        bits = torch.empty(
            lines * self.num_rows, num_bits, dtype=torch.int32, device=self.order.device
        )
        self._kernels.turn[(lines * self.num_words * blocks,)](
            words,
            bits,
            self.num_rows,
            self.num_words,
            self.num_keys,
            blocks,
            num_bits,
            **_TURN,
        )
        return bits

    def emit(
        self,
        part: slice,
        bits: Tensor,
        start: Tensor,
        index: Tensor,
        count: Tensor,
        *,
        room: int | None,
        log_weight: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """Write the lists of the rows of `part` into the pool.

        Args:
            part: The lines.
            bits: What their rows read, as `mark` returns it.
            start: [rows] int64, where each begins in the pool.
            index: The pool, written.
            count: [rows] int32, written: keys that each reads.
            room: Places of each row; None for no slack.
            log_weight: [rows, C] float32, log weight of each cluster's keys; None for no weights.
            weight: The pool's log weights, written; None for none.
        """
        self._kernels.emit[(bits.shape[0],)](
            bits,
            self._of_key[part],
            log_weight,
            start,
            index,
            weight,
            count,
            self.num_rows,
            self.num_clusters,
            self.num_keys,
            bits.shape[1],
            0 if room is None else room,
            WEIGHTS=weight is not None,
            SLACK=room is not None,
            **_EMIT,
        )


def _list_sampled(
    lines: _Lines, tables: Callable[[slice], Tables], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """List what tables made part by part say; as `list_draws`."""
    rows, device = lines.num_lines * lines.num_rows, lines.order.device
    start = torch.arange(rows, device=device) * width
    index = torch.empty(rows * width, dtype=torch.int32, device=device)
    weight = torch.empty(rows * width, dtype=torch.float32, device=device)
    count = torch.empty(rows, dtype=torch.int32, device=device)
    per_line = lines.num_rows * lines.num_clusters * 20 + _mark_bytes(lines)
    for part in lines.parts(per_line):
        of, found = lines.rows_of(part), tables(part)
        bits = lines.mark(part, tables=found)
        lines.emit(
            part,
            bits,
            start[of],
            index,
            count[of],
            room=width,
            log_weight=found.log_weight,
            weight=weight,
        )
    return index, weight, count


def _mark_bytes(lines: _Lines) -> int:
    """Return the bytes of one line's marks, in both forms."""
    return max(1, 8 * lines.num_words * lines.num_keys)


def _empty_tables(like: Tensor) -> Tables:
    """Return tables to be written for the rows and clusters of `like`."""
    return Tables(
        torch.empty_like(like, dtype=torch.float64),
        torch.empty_like(like, dtype=torch.float64),
        torch.empty_like(like, dtype=torch.float32),
    )


def _registers(num_clusters: int, *, uniform: bool = False) -> dict[str, int]:
    """Return the padded number of clusters of one program, and warps that hold it unspilled.

    Args:
        num_clusters: C.
        uniform: Whether the program solves for no lambda, and needs fewer registers.
    """
    padded = max(32, 1 << max(num_clusters - 1, 0).bit_length())
    least = 8 if padded > 512 else 4
    return {"C": padded, "num_warps": min(max(padded // (128 if uniform else 256), least), 16)}
