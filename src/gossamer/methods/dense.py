"""Dense attention, as a plan: what every other method is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from gossamer.call import Call
from gossamer.methods.base import Method, State
from gossamer.methods.registry import register
from gossamer.plan import SparsePlan, full_plan


@register
@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Read every visible key.

    The plan is one full row that all tiles of all heads and batch rows share. Its density is 1;
    asked for another, it warns.
    """

    name: ClassVar[str] = "dense"
    fixed_density: ClassVar[bool] = True

    @classmethod
    def at_density(cls, density: float, **params: Any) -> Self:
        """Return the method; 1 is the only density it has.

        Warns:
            UserWarning: Another density is asked for.
        """
        if density != 1:
            warnings.warn(
                f"{cls.name}: every key is read, so the density is 1 and not {density!r}; leave it "
                "out, or choose a sparse method",
                UserWarning,
                stacklevel=3,
            )
        return cls(**params)

    def static_key(self, call: Call) -> Hashable:
        """Return a constant: the plan depends on lengths and masks alone."""
        del call
        return ()

    def _plan_latent(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: State | None
    ) -> SparsePlan:
        """Return the full plan."""
        del v, state
        return full_plan(q, k, call)
