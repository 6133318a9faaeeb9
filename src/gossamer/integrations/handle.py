"""What `gossamer.apply` returns: the way to look at the attention, and to take it off again."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from gossamer.recipe import Recipe
from gossamer.records import Record
from gossamer.session import Session


class Handle:
    """Sparse attention attached to a model; a context manager that removes it.

    Attributes:
        session: Runs the attention and keeps its records, also after `remove`.
        attached: Whether the models are still attached to.
    """

    def __init__(self, session: Session, undo: ExitStack) -> None:
        """Hold an attachment.

        Args:
            session: What the models were attached to.
            undo: Restores them when closed.
        """
        self.session = session
        self.attached = True
        self._undo = undo
        undo.callback(self._note_removal)

    @property
    def recipe(self) -> Recipe:
        """What the attention follows."""
        return self.session.recipe

    @property
    def records(self) -> list[Record]:
        """One record per attention call of the current or, after its end, the last generation."""
        return self.session.records

    def summary(self) -> dict[str, Any]:
        """Return the records' totals, see `Session.summary`."""
        return self.session.summary()

    def remove(self) -> None:
        """Restore the models bit for bit; the records stay. Calling it again does nothing."""
        self._undo.close()

    def _note_removal(self) -> None:
        self.attached = False
        self.session.end_generation()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "removed"
        return f"Handle({self.recipe!r}, {state}, {len(self.records)} records)"
