"""A session as an attached model needs it: it can forget midway, and hand calls to others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from gossamer.call import Call
from gossamer.records import Stopwatch
from gossamer.session import AttentionEvent, Session, _record


@dataclass(frozen=True)
class OtherBackend:
    """Another library's way to compute one call densely.

    Attributes:
        name: What the record calls it.
        run: Computes the output, [B, H, N, D].
    """

    name: str
    run: Callable[[], Tensor]


class AttachedSession(Session):
    """A session whose dense calls another backend may compute, and which can forget midway."""

    _other: OtherBackend | None = None

    def drop_state(self) -> None:
        """Forget what was kept for later steps; the generation and its records go on."""
        self._states = {}

    @contextmanager
    def dense_by(self, other: OtherBackend | None) -> Generator[None]:
        """Let another backend compute the calls within that go dense; None for the session's own.

        The recipe still decides whether they do, and the records tell what ran.
        """
        before, self._other = self._other, other
        try:
            yield
        finally:
            self._other = before

    def dense(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, reason: str) -> Tensor:
        """Run one call densely and record why, see `Session.dense` and `dense_by`."""
        other = self._other
        if other is None:
            return super().dense(q, k, v, call, reason=reason)
        if self._ended:
            self._records, self._ended = [], False
        watch = Stopwatch(q.device)
        out = other.run()
        watch.mark()
        record = _record(q, k, call, "dense", other.name, reason, watch, None)
        self._finish(AttentionEvent(q=q, k=k, v=v, out=out, call=call, plan=None, record=record))
        return out
