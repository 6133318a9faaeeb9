"""What each row reads of each cluster: one program per row, the row's clusters in registers."""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202, PLR0913 -- a kernel takes flat arguments, its types are Triton's

from __future__ import annotations

import triton
import triton.language as tl

from gossamer.group.gpu.counter import absorb

_LOW = tl.constexpr((1 << 32) - 1)


@triton.jit
def _take(mass, size, used, budget, CROSSING: tl.constexpr):
    """Return how many keys are taken of each cluster, whole ones by descending mass.

    No sort: the mass at which the budget is spent is bisected until one cluster, or a tie, lies
    in the bracket; those are then taken one by one, the lowest index first.
    """
    taken = size  # [C]
    if tl.sum(size, 0) > budget:
        # The number of clusters in the upper and of their keys in the lower 32 bits: one sum.
        packed = size.to(tl.int64) | (1 << 32)
        finite = tl.min(tl.where(used & (mass > float("-inf")), mass, float("inf")), 0)
        finite = tl.where(finite == float("inf"), 0.0, finite)
        finite -= 1.0 + tl.abs(finite) * 1e-6
        mass = tl.where(used, tl.maximum(mass, finite), float("-inf"))
        low = finite - (1.0 + tl.abs(finite) * 1e-6)  # more than the budget lies above
        high = tl.max(mass, 0)  # what lies above fits
        most = tl.sum(tl.where(used, packed, 0), 0)
        least = most - most
        middle = low + (high - low) * 0.5
        while ((most >> 32) - (least >> 32) > 1) & (middle > low) & (middle < high):
            above = tl.sum(tl.where(mass > middle, packed, 0), 0)
            fits = (above & _LOW) <= budget
            high = tl.where(fits, middle, high)
            least = tl.where(fits, above, least)
            low = tl.where(fits, low, middle)
            most = tl.where(fits, most, above)
            middle = low + (high - low) * 0.5
        taken = tl.where(used & (mass > high), size, 0)
        left = budget - (least & _LOW)
        number = (most >> 32) - (least >> 32)
        open_ = used & (mass <= high) & (mass > low)
        place = tl.arange(0, size.shape[0])
        # Where all others of the bracket fit, the last one crosses: it may be left out unseen.
        while number > (1 if CROSSING == "exclude" else 0):
            best = tl.max(tl.where(open_, mass, float("-inf")), 0)
            first = tl.min(tl.where(open_ & (mass == best), place, size.shape[0]), 0)
            here = place == first
            keys = tl.sum(tl.where(here, size, 0), 0)
            if CROSSING == "exclude":
                got = tl.where(keys <= left, keys, 0)
            elif CROSSING == "include":
                got = tl.where(left > 0, keys, 0)
            else:
                got = tl.minimum(keys.to(tl.int64), left).to(tl.int32)
            taken = tl.where(here, got, taken)
            left = tl.maximum(left - keys, 0)
            number = tl.where(left > 0, number - 1, 0)
            open_ = open_ & (place != first)
    return taken


@triton.jit(do_not_specialize=["size_rows", "budget_rows", "num_clusters"])
def take(
    score_ptr,  # [rows, C] float32 or float64
    size_ptr,  # [rows / size_rows, C] int64
    budget_ptr,  # [rows / budget_rows] int64
    taken_ptr,  # [rows, C] int64
    size_rows,
    budget_rows,
    num_clusters,
    C: tl.constexpr,  # a power of 2 that is not below num_clusters
    CROSSING: tl.constexpr,
):
    """Take whole clusters by descending score until the budget is spent."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, C)
    inside = place < num_clusters
    sizes = size_ptr + row // size_rows * num_clusters
    size = tl.load(sizes + place, mask=inside, other=0).to(tl.int32)
    score = tl.load(score_ptr + row * num_clusters + place, mask=inside, other=0.0).to(tl.float64)
    budget = tl.load(budget_ptr + row // budget_rows)
    taken = _take(score, size, size > 0, budget, CROSSING)
    tl.store(taken_ptr + row * num_clusters + place, taken.to(tl.int64), mask=inside)


@triton.jit
def _log_inclusion(score, size, drawn, budget):
    """Return log(pi) of each cluster with pi = min(1, lambda * s) and sum(pi) = budget.

    Every round caps the clusters whose pi would be above 1 and shares what they leave among the
    others: the exact solution after as many rounds as change anything.
    """
    left = budget.to(tl.float64)
    free = drawn
    shift = tl.max(tl.where(free, score, float("-inf")), 0).to(tl.float64)
    scaled = tl.where(free, tl.exp(score.to(tl.float64) - shift) * size.to(tl.float64), 0.0)
    log_lambda = left - left
    capped = tl.sum(size, 0) * 0 + 1
    while capped > 0:
        total = tl.sum(tl.where(free, scaled, 0.0), 0)
        if total < 1e-200:
            # All that is left lies far below what was capped: a sum of logs from its own maximum.
            shift = tl.max(tl.where(free, score, float("-inf")), 0).to(tl.float64)
            scaled = tl.where(free, tl.exp(score.to(tl.float64) - shift) * size.to(tl.float64), 0.0)
            total = tl.sum(scaled, 0)
        log_lambda = tl.log(left) - tl.log(total) - shift
        log_pi = score.to(tl.float64) + log_lambda
        over = free & (log_pi > 0.0)
        capped = tl.sum(tl.where(over, size, 0), 0)
        left = tl.maximum(left - capped.to(tl.float64), 0.0)
        free = free & (log_pi <= 0.0)
    return tl.where(free, score.to(tl.float64) + log_lambda, 0.0)


@triton.jit(do_not_specialize=["num_rows", "num_clusters"])
def decide(
    score_ptr,  # [lines * R, C] float32 or float64: log of one key's score
    size_ptr,  # [lines, C] int64
    log_size_ptr,  # [lines, C] float64
    exact_ptr,  # [lines] int64, keys of the exact set at most
    total_ptr,  # [lines] int64, keys to read
    log_pi_ptr,  # [lines * R, C] float64, written: 0 where all keys are read
    num_rows,
    num_clusters,
    C: tl.constexpr,  # a power of 2 that is not below num_clusters
    UNIFORM: tl.constexpr,
):
    """Choose a row's exact clusters and the inclusion probabilities of all other keys."""
    row = tl.program_id(0).to(tl.int64)
    line = row // num_rows
    place = tl.arange(0, C)
    inside = place < num_clusters
    size = tl.load(size_ptr + line * num_clusters + place, mask=inside, other=0).to(tl.int32)
    log_size = tl.load(log_size_ptr + line * num_clusters + place, mask=inside, other=0.0)
    score_ptr += row * num_clusters
    score = tl.load(score_ptr + place, mask=inside, other=0.0).to(tl.float64)
    used = size > 0
    taken = _take(score + log_size, size, used, tl.load(exact_ptr + line), "exclude")
    # Loaded again rather than held; the hint keeps the compiler from merging both loads.
    score = tl.load(score_ptr + place, mask=inside, other=0.0, eviction_policy="evict_first")

    drawn = used & (taken == 0)
    num_exact = tl.sum(taken, 0)
    rest = tl.sum(size, 0) - num_exact
    budget = tl.minimum(tl.maximum(tl.load(total_ptr + line) - num_exact, 0), rest.to(tl.int64))
    if UNIFORM:
        log_pi = tl.log(budget.to(tl.float64)) - tl.log(tl.maximum(rest, 1).to(tl.float64))
        log_pi = tl.where(drawn, log_pi, 0.0)
    else:
        log_pi = _log_inclusion(score, size, drawn, budget)
    tl.store(log_pi_ptr + row * num_clusters + place, log_pi, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_clusters"])
def lay_out(
    size_ptr,  # [lines, C] int64
    phase_ptr,  # [lines * R] float64
    begin_ptr,  # the tables, as in `tables_of_draws`
    pi_ptr,  # log(pi), as `decide` leaves it, in place of pi
    log_weight_ptr,
    num_rows,
    num_clusters,
    CERTAIN: tl.constexpr,  # at least this log probability is certainty
    BLOCK: tl.constexpr,
):
    """Lay out a row's systematic sample, as `select.systematic` does; a program a row."""
    row = tl.program_id(0).to(tl.int64)
    size_ptr += row // num_rows * num_clusters
    begin_ptr += row * num_clusters
    pi_ptr += row * num_clusters
    log_weight_ptr += row * num_clusters
    phase = tl.load(phase_ptr + row)
    last = phase - phase
    for step in range(0, num_clusters, BLOCK):
        place = step + tl.arange(0, BLOCK)
        inside = place < num_clusters
        size = tl.load(size_ptr + place, mask=inside, other=0).to(tl.float64)
        log_pi = tl.load(pi_ptr + place, mask=inside, other=0.0)
        sure = (size > 0.0) & (log_pi >= CERTAIN)
        drawn = (size > 0.0) & (log_pi < CERTAIN)
        tl.store(log_weight_ptr + place, tl.where(drawn, -log_pi, 0.0), mask=inside)
        pi = tl.where(drawn, tl.exp(log_pi), 0.0)
        tl.store(pi_ptr + place, tl.where(sure, 2.0, pi), mask=inside)
        last = tl.max(tl.cumsum(pi * size, 0) + last, 0)
    tl.debug_barrier()  # the second pass may read what another thread wrote
    # The exact total is an integer; rounding of the running sum must not lose the last key.
    count = tl.floor(last + 0.5)
    stretch = count / tl.maximum(last, 1e-300)
    before = phase - phase  # the running sum, and the same stretched
    offset_before = before
    for step in range(0, num_clusters, BLOCK):
        place = tl.arange(0, BLOCK)
        inside = step + place < num_clusters
        size = tl.load(size_ptr + step + place, mask=inside, other=0).to(tl.float64)
        pi = tl.load(pi_ptr + step + place, mask=inside, other=0.0)
        sure = pi > 1.0
        end = tl.cumsum(tl.where(sure, 0.0, pi) * size, 0) + before
        before = tl.max(end, 0)
        end = tl.where(end >= last, count, tl.minimum(end * stretch, count))
        offset = tl.gather(end, tl.maximum(place - 1, 0), 0)
        offset = tl.where(place == 0, offset_before, offset)
        offset_before = tl.max(end, 0)
        begin, pi = _in_thresholds(offset, end, size, phase, pi, sure)
        tl.store(begin_ptr + step + place, begin, mask=inside)
        tl.store(pi_ptr + step + place, pi, mask=inside)


@triton.jit
def _in_thresholds(offset, end, size, phase, pi, sure):
    """Return where a cluster begins, counted in thresholds from its first, and thresholds a key.

    Thresholds stand at phase + i. Differences from the phase are exact, or have the right sign
    where both are below 1, and each end is the next cluster's begin: none is lost or read twice.
    """
    below = tl.maximum(tl.ceil(offset - phase), 0.0)
    number = tl.maximum(tl.ceil(end - phase), 0.0) - below
    # Less than one away, also where the difference rounds to one.
    above_minus_one = tl.full([1], 2.0**-53 - 1.0, tl.float64)
    begin = tl.maximum(offset - (phase + below), above_minus_one)
    pi = tl.where(number > 0.0, pi, 0.0)
    # Counted key by key there must be as many, also where a threshold stands at the very end.
    found = tl.fma(size, pi, begin)
    few = (number > 0.0) & (found <= number - 1.0)
    many = (number > 0.0) & (found > number)
    wanted = tl.where(few, number - 1.0 + 1e-11, number - 1e-11)
    pi = tl.where(few | many, (wanted - begin) / tl.maximum(size, 1.0), pi)
    return tl.where(sure, 0.0, begin), tl.where(sure, 2.0, pi)


@triton.jit(do_not_specialize=["num_rows", "num_clusters"])
def tables_of_draws(
    taken_ptr,  # [lines * R, C] int64
    log_pi_ptr,  # [lines * R, C] float64
    offset_ptr,  # [lines * R, C] float64
    drawn_ptr,  # [lines * R] int64, keys drawn
    phase_ptr,  # [lines * R] float64
    size_ptr,  # [lines, C] int64
    begin_ptr,  # [lines * R, C] float64, where the cluster begins, in thresholds from its first
    pi_ptr,  # [lines * R, C] float64, thresholds a key: 2 where all are read, 0 where none is
    log_weight_ptr,  # [lines * R, C] float32
    num_rows,
    num_clusters,
    BLOCK: tl.constexpr,
):
    """Bring draws into the form from which lists are made; a program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_clusters
    at = row * num_clusters + place
    sizes = size_ptr + row // num_rows * num_clusters
    size = tl.load(sizes + place, mask=inside, other=0).to(tl.float64)
    sure = tl.load(taken_ptr + at, mask=inside, other=0) > 0
    log_pi = tl.load(log_pi_ptr + at, mask=inside, other=0.0)
    offset = tl.load(offset_ptr + at, mask=inside, other=0.0)
    end = tl.load(offset_ptr + at + 1, mask=place + 1 < num_clusters, other=0.0)
    end = tl.where(place + 1 < num_clusters, end, tl.load(drawn_ptr + row).to(tl.float64))
    phase = tl.load(phase_ptr + row)
    begin, pi = _in_thresholds(offset, end, size, phase, tl.exp(log_pi), sure)
    tl.store(begin_ptr + at, begin, mask=inside)
    tl.store(pi_ptr + at, pi, mask=inside)
    tl.store(log_weight_ptr + at, (-log_pi).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["upper", "lower", "num_rows"])
def phases(
    head_ptr,  # [H] int64, global heads
    phase_ptr,  # [H, R] float64
    upper,  # the state's upper 32 bits after the keys that all rows share, as a signed number
    lower,
    num_rows,
    BLOCK: tl.constexpr,
):
    """Hash a phase with 32 random bits for each row of a head."""
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(0)
    state = (upper.to(tl.int64) << 32) | (lower.to(tl.int64) & _LOW)
    state = absorb(state.to(tl.uint64), tl.load(head_ptr + head))
    state = absorb(state, row.to(tl.int64))
    phase = (state >> 32).to(tl.int64).to(tl.float64) * (1.0 / (1 << 32))
    tl.store(phase_ptr + head.to(tl.int64) * num_rows + row, phase, mask=row < num_rows)
