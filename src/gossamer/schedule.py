"""Which of n steps or layers are dense: counts, fractions, both ends, or named ones."""

from __future__ import annotations

import math

from gossamer.errors import RecipeError, described

Amount = int | float
Schedule = Amount | tuple[Amount, Amount] | str


def check_schedule(name: str, schedule: Schedule) -> Schedule:
    """Return the schedule in its normal form.

    Args:
        name: The recipe key, for the message.
        schedule: A count (int) or a fraction (float, 0…1, rounded up) of the first ones; a pair of
            these for the first and the last ones; or indices and ranges such as "0-3,38".

    Raises:
        RecipeError: It is none of these.
    """
    if isinstance(schedule, str):
        _parse(name, schedule)
        return schedule
    if isinstance(schedule, (tuple, list)):
        if len(schedule) != 2:
            raise RecipeError(f"{name}={described(schedule)}: a pair is (first, last)")
        first, last = (_check_amount(name, amount) for amount in schedule)
        return first, last
    return _check_amount(name, schedule)


def is_dense(name: str, schedule: Schedule, index: int, total: int | None) -> bool:
    """Return whether the schedule makes `index` of `total` dense.

    Raises:
        RecipeError: The schedule needs the total, and the call does not say it.
    """
    if isinstance(schedule, str):
        return index in _parse(name, schedule)
    first, last = schedule if isinstance(schedule, tuple) else (schedule, 0)
    if total is None and (last or isinstance(first, float)) and (first or last):
        raise RecipeError(
            f"{name}={described(schedule)} needs the total number, which the call does not say: "
            "give a count of first ones, or pass num_steps and num_layers in the call"
        )
    if index < _count(first, total):
        return True
    return total is not None and index >= total - _count(last, total)


def past_end(name: str, schedule: Schedule, unit: str, total: int) -> str | None:
    """Say what a schedule asks for behind the last one, where nothing is.

    Args:
        name: The recipe key, for the message.
        schedule: The schedule.
        unit: What is counted, such as "step".
        total: How many there are.

    Returns:
        One sentence with what was asked and what there is; None where all of it exists.
    """
    there = f"but there {'is' if total == 1 else 'are'} {total}"
    if isinstance(schedule, str):
        behind = sorted(index for index in _parse(name, schedule) if index >= total)
        if not behind:
            return None
        named = f"{behind[0]} to {behind[-1]}" if len(behind) > 1 else f"{behind[0]}"
        return f"{name}={schedule!r} names {unit} {named}, {there}, counted from 0"
    amounts = schedule if isinstance(schedule, tuple) else (schedule,)
    counts = [amount for amount in amounts if isinstance(amount, int) and amount > total]
    if not counts:
        return None
    return f"{name}={schedule!r} asks for {counts[0]} {unit}s, {there}: all of them are taken"


def check_indices(name: str, text: str) -> None:
    """Refuse what is not a list of indices and ranges such as "0-3,38".

    Raises:
        RecipeError: Naming the part that is neither.
    """
    if not isinstance(text, str):
        raise RecipeError(f"{name}={described(text)}: must be indices and ranges such as '0-3,38'")
    _parse(name, text)


def indices(name: str, text: str) -> set[int]:
    """Return the indices that a text such as "0-3,38" names."""
    return _parse(name, text)


def _check_amount(name: str, amount: object) -> Amount:
    """Return a valid count or fraction."""
    if isinstance(amount, bool) or not isinstance(amount, (int, float)):
        raise RecipeError(
            f"{name}={described(amount)}: must be a count, a fraction, a pair or '0-3,38'"
        )
    if isinstance(amount, float) and not (math.isfinite(amount) and 0 <= amount <= 1):
        raise RecipeError(f"{name}={described(amount)}: a fraction must lie between 0.0 and 1.0")
    if amount < 0:
        raise RecipeError(f"{name}={described(amount)}: a count must be at least 0")
    return amount


def _count(amount: Amount, total: int | None) -> int:
    """Return how many ones the amount means; what was asked for is never rounded to none."""
    if isinstance(amount, float):
        # The margin keeps 0.1 * 30 = 3.0000000000000004 at 3.
        return 0 if total is None else math.ceil(amount * total - 1e-9)
    return amount


def _parse(name: str, text: str) -> set[int]:
    """Return the indices that "0-3,38" names."""
    indices: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()) or part.endswith("-"):
            raise RecipeError(f"{name}={text!r}: {part!r} is neither an index nor a range a-b")
        if int(high or low) < int(low):
            raise RecipeError(f"{name}={text!r}: the range {part!r} runs backwards")
        indices |= set(range(int(low), int(high or low) + 1))
    return indices
