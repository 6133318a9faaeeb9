"""The sparse plan: which keys each tile of queries reads, and with which weight."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from gossamer.call import is_index
from gossamer.errors import PlanError, described
from gossamer.plan.dense import dense_weights
from gossamer.plan.density import density
from gossamer.plan.keys import KeyBlocks, KeyTokens, check_fields, check_size, check_tensor
from gossamer.plan.validate import validate


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsePlan:
    """What is computed, as data; every method makes one and every kernel reads one.

    For query i of a tile that reads keys K with weights w, the output is

        o_i = sum_j w_j exp(l_ij) v_j / sum_j w_j exp(l_ij),    j in K and visible to i,

    with logits l_ij = scale * q_i . k_j. A query without any key gives 0 and log-sum-exp -inf.
    Batch and head axes of size 1 are shared by all batch rows or heads.

    Attributes:
        num_queries: N, the true number of queries.
        num_keys: S, the true number of keys (virtual keys not counted).
        tile: M, query rows computed together.
        keys: The key rows, `KeyBlocks` or `KeyTokens`.
        query_index: [B|1, H|1, T, tile] int32, which query each tile row is, -1 for none; every
            query stands in exactly one tile. None: consecutive queries, T = ceil(N / tile).
        tile_row: [B|1, H|1, T] int32, the key row that each tile reads. None: tile t reads row t.
        launch_order: [B|1, H|1, T] int32, entry s is the tile launched s-th within its (batch,
            head). None: in order.
        causal: Query i sees key j iff j <= i + S - N.
        key_valid: [B|1, S] bool, False for padded keys, kept even where the rows leave them out:
            density needs it. None: no padding.
        scale: Factor on the logits that selection used and attention uses; None for 1/sqrt(D).
        window: (left, right, sink) in keys: query at position p = i + S - N sees key j only if
            p - left <= j <= p + right, or j is among the first `sink` keys that `key_valid` admits;
            -1 is no bound. None: no window.
    """

    num_queries: int
    num_keys: int
    tile: int
    keys: KeyBlocks | KeyTokens
    query_index: Tensor | None = None
    tile_row: Tensor | None = None
    launch_order: Tensor | None = None
    causal: bool = False
    key_valid: Tensor | None = None
    scale: float | None = None
    window: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that no attention has, and tensors of another dtype or number of axes."""
        if not isinstance(self.keys, (KeyBlocks, KeyTokens)):
            hint = "KeyBlocks.from_mask and KeyTokens.from_lists make them"
            raise PlanError(
                f"SparsePlan.keys is {described(self.keys)}, must be KeyBlocks or KeyTokens: {hint}"
            )
        tiles = "[B|1, H|1, T]"
        axes = {"query_index": "[B|1, H|1, T, tile]", "tile_row": tiles, "launch_order": tiles}
        check_fields(self, torch.int32, axes, optional=axes)
        check_fields(self, torch.bool, {"key_valid": "[B|1, S]"}, optional=("key_valid",))
        for name, least in (("num_queries", 0), ("num_keys", 0), ("tile", 1)):
            check_size(f"SparsePlan.{name}", getattr(self, name), least)
        window = self.window
        if window is not None and not (
            isinstance(window, tuple)
            and len(window) == 3
            and all(is_index(side) for side in window)
        ):
            raise PlanError(
                f"SparsePlan.window is {described(window)}, must be (left, right, sink), integers"
            )

    @property
    def num_tiles(self) -> int:
        """T, query tiles per head, empty ones included."""
        if self.query_index is None:
            return -(-self.num_queries // self.tile)
        return self.query_index.shape[2]

    @property
    def device(self) -> torch.device:
        """The device of every tensor of the plan."""
        return self.keys.count.device

    @property
    def batch(self) -> int:
        """B, batch rows that the plan tells apart; 1 if it is shared."""
        return max(tensor.shape[0] for tensor in self._placed())

    @property
    def heads(self) -> int:
        """H, query heads that the plan tells apart; 1 if it is shared."""
        return max(tensor.shape[1] for tensor in self._placed() if tensor.dim() > 2)

    def _placed(self) -> list[Tensor]:
        """Return the tensors that carry a batch axis (and, above two axes, a head axis)."""
        keys = self.keys
        places = [self.query_index, self.tile_row, self.launch_order, self.key_valid, keys.count]
        places.append(keys.key_order if isinstance(keys, KeyBlocks) else keys.start)
        return [tensor for tensor in places if tensor is not None]

    @cached_property
    def density_tensor(self) -> Tensor:
        """Density as a 0-d float64 tensor: no synchronisation before it is read."""
        return density(self)

    @property
    def density(self) -> float:
        """Pairs with a weight above 0, virtual keys too, over visible real pairs.

        Per batch row, then averaged; at most 1, and 1.0 where nothing is visible.
        """
        return float(self.density_tensor)

    def weights(self) -> Tensor:
        """Return every weight as a dense float32 tensor [B|1, H|1, N, S + E]; for small sizes.

        Causality, padding and window are applied; 0 means not read; the E virtual keys are last.
        """
        return dense_weights(self)

    def validate(self) -> None:
        """Check the plan against its own laws; synchronises, meant for tests and new methods.

        Raises:
            PlanError: With the first law that does not hold.
        """
        validate(self)

    def to(self, device: torch.device | str) -> SparsePlan:
        """Return a copy with every tensor on `device`."""
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (Tensor, KeyBlocks, KeyTokens))
        }
        return replace(self, **moved)

    def refresh(self, k: Tensor, v: Tensor) -> SparsePlan:
        """Return the plan with its virtual keys recomputed as means of `k` and `v`.

        Args:
            k: [B, Hk, S, D] keys.
            v: [B, Hk, S, D] values.

        Returns:
            The plan itself where it has no virtual keys; a new plan otherwise.

        Raises:
            PlanError: The virtual keys do not say which keys they stand for, or `k` and `v` are not
                of the plan's size.
        """
        keys = self.keys
        if isinstance(keys, KeyBlocks) or keys.num_extra == 0:
            return self
        if keys.extra_of is None:
            raise PlanError("the plan's virtual keys carry no extra_of: plan again instead")
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x, None, "[B, Hk, S, D]")
        batch, kv_heads, num_keys, dim = k.shape
        of = keys.extra_of.shape
        fits = num_keys == of[2] and of[0] in (1, batch) and of[1] in (1, kv_heads)
        if not fits or k.shape != v.shape:
            raise PlanError(
                f"k is {tuple(k.shape)} and v {tuple(v.shape)}, but the plan's virtual keys stand "
                f"for keys [batch, KV heads, keys] = {list(of)}: make a plan for these"
            )
        shape = (batch, kv_heads, keys.num_extra + 1, dim)
        # Keys that no virtual key stands for are summed into a last slot, which is cut off.
        owner = torch.where(keys.extra_of < 0, keys.num_extra, keys.extra_of).long()
        owner = owner.expand(batch, kv_heads, -1)[..., None]
        sizes = k.new_zeros((*shape[:3], 1), dtype=torch.float32)
        sizes.scatter_add_(2, owner, torch.ones_like(owner, dtype=torch.float32))

        def means(x: Tensor) -> Tensor:
            sums = x.new_zeros(shape, dtype=torch.float32)
            sums.scatter_add_(2, owner.expand(-1, -1, -1, dim), x.float())
            return (sums / sizes.clamp(min=1))[:, :, : keys.num_extra].to(x.dtype)

        return replace(self, keys=replace(keys, extra_k=means(k), extra_v=means(v)))
