"""What one attention call is: where in the model it stands and what its tokens are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.errors import PlanError, described


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The facts about one attention call that its tensors do not carry.

    Attributes:
        layer: Index of the attention layer in the model, 0-based.
        num_layers: Attention layers in the model; None where unknown.
        step: Index of the denoising step, 0-based and global to the generation.
        num_steps: Denoising steps of the generation; None where unknown.
        branch: Which guidance pass this is: "cond", "uncond", … State is kept apart by it.
        grid: (frames, rows, columns) of the latent tokens, which lie in raster order; None where
            unknown. It is never guessed from the token count.
        text: [start, stop) of the text tokens inside the joint sequence; None for no text.
        key_valid: [B or 1, S] bool, False for padded keys; None for no padding.
        causal: Query i sees key j iff j <= i + S - N (bottom-right aligned).
        scale: Factor on the logits; None for 1/sqrt(D) of the true head dim.
        head_offset: Global index of this process's first head (tensor or Ulysses parallelism).
        heads: Global index of each query head given, where they do not follow one another; KV heads
            with all of their query heads. None: consecutive from `head_offset` on.
        num_heads: Global number of heads; None for the heads given.
        seed: Seed of every random number that planning draws.

    Raises:
        PlanError: A negative index, an index past its total, a grid or span that is not one.
    """

    layer: int = 0
    num_layers: int | None = None
    step: int = 0
    num_steps: int | None = None
    branch: str = ""
    grid: tuple[int, int, int] | None = None
    text: tuple[int, int] | None = None
    key_valid: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    head_offset: int = 0
    heads: tuple[int, ...] | None = None
    num_heads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be a call."""
        self._check_types()
        for name, total in (("layer", self.num_layers), ("step", self.num_steps)):
            index = getattr(self, name)
            if index < 0 or (total is not None and index >= total):
                bound = "" if total is None else f" and below num_{name}s={total}"
                raise PlanError(f"call.{name}={index}: must be at least 0{bound}")
        if self.head_offset < 0:
            raise PlanError(f"call.head_offset={self.head_offset}: must be at least 0")
        if self.heads is not None and (self.head_offset or min(self.heads, default=-1) < 0):
            raise PlanError(
                f"call.heads={self.heads}: must be global indices >= 0, without a head_offset"
            )
        if self.num_heads is not None and self.num_heads < 1:
            raise PlanError(f"call.num_heads={self.num_heads}: must be at least 1")
        if self.grid is not None and (len(self.grid) != 3 or min(self.grid) < 1):
            raise PlanError(f"call.grid={self.grid}: must be (frames, rows, columns), each >= 1")
        if self.text is not None and not 0 <= self.text[0] <= self.text[1]:
            raise PlanError(f"call.text={self.text}: must be (start, stop), 0 <= start <= stop")
        if self.scale is not None and not math.isfinite(self.scale):
            raise PlanError(f"call.scale={self.scale}: must be finite")
        mask = self.key_valid
        if mask is not None and not isinstance(mask, Tensor):
            raise PlanError(
                f"call.key_valid is {described(mask)}: must be a [B, S] bool torch.Tensor"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2):
            raise PlanError(
                f"call.key_valid has shape {tuple(mask.shape)} and dtype {mask.dtype}: "
                "must be [B, S] bool"
            )

    def _check_types(self) -> None:
        """Refuse what is no index, and make lists of them (from JSON, say) tuples.

        Calls are parts of keys, and lists cannot be hashed.
        """
        indices = ("layer", "step", "head_offset", "seed")
        for name in (*indices, "num_layers", "num_steps", "num_heads"):
            value = getattr(self, name)
            if not (is_index(value) or (value is None and name not in indices)):
                raise PlanError(f"call.{name}={described(value)}: must be an integer")
        if not -(2**63) <= self.seed < 2**63:
            raise PlanError(f"call.seed={self.seed}: must fit 64 bits, -2**63 to 2**63 - 1")
        if not isinstance(self.branch, str):
            given = described(self.branch)
            raise PlanError(f'call.branch={given}: must be a name such as "cond"')
        if not (self.scale is None or is_number(self.scale)):
            raise PlanError(f"call.scale={described(self.scale)}: must be a number")
        if not _is_flag(self.causal):
            raise PlanError(f"call.causal={described(self.causal)}: must be True or False")
        for name, form in (
            ("grid", "(frames, rows, columns)"),
            ("text", "(start, stop)"),
            ("heads", "(index, index, …)"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if not (isinstance(value, (tuple, list)) and all(is_index(x) for x in value)):
                raise PlanError(f"call.{name}={described(value)}: must be {form}, integers")
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if self.text is not None and len(self.text) != 2:
            raise PlanError(f"call.text={self.text}: must be (start, stop), 0 <= start <= stop")

    @property
    def text_length(self) -> int:
        """Number of text tokens in the joint sequence."""
        return 0 if self.text is None else self.text[1] - self.text[0]

    def head_ids(self, num_heads: int, device: torch.device) -> Tensor:
        """Return the global index of each of the query heads given, [H] int64."""
        if self.heads is not None:
            return torch.tensor(self.heads, dtype=torch.int64, device=device)
        return torch.arange(num_heads, device=device) + self.head_offset

    def kv_head_ids(self, num_heads: int, num_kv_heads: int, device: torch.device) -> Tensor:
        """Return the global index of each of the KV heads given, [Hk] int64."""
        group = num_heads // num_kv_heads
        return self.head_ids(num_heads, device)[::group] // group

    def latent(self, key_valid: Tensor | None) -> Call:
        """Return this call for its latent tokens alone: no text span, `key_valid` [B, S_latent]."""
        return replace(self, text=None, key_valid=key_valid)

    def check(
        self, batch: int, num_queries: int, num_keys: int, num_heads: int | None = None
    ) -> None:
        """Refuse a call whose grid, text, padding or heads contradict the tensors' sizes.

        Args:
            batch: B of the tensors.
            num_queries: N, query tokens.
            num_keys: S, key tokens.
            num_heads: H, query heads; None does not check the heads.

        Raises:
            PlanError: The lengths do not add up; the message names all of them.
        """
        joint = self.grid is not None or self.text_length > 0
        if joint and num_queries != num_keys:
            raise PlanError(
                f"grid={self.grid} and text={self.text} describe self-attention, "
                f"but there are {num_queries} queries and {num_keys} keys"
            )
        if self.text is not None and self.text[1] > num_keys:
            raise PlanError(f"text={self.text} ends past the {num_keys} tokens of the sequence")
        if self.grid is not None and math.prod(self.grid) + self.text_length != num_keys:
            frames, rows, columns = self.grid
            raise PlanError(
                f"grid {frames}*{rows}*{columns} = {math.prod(self.grid)} tokens plus "
                f"{self.text_length} text tokens is {math.prod(self.grid) + self.text_length}, "
                f"but the sequence has {num_keys}: pass the grid the model really uses"
            )
        mask = self.key_valid
        if mask is not None and (mask.shape[1] != num_keys or mask.shape[0] not in (1, batch)):
            raise PlanError(
                f"key_valid has shape {tuple(mask.shape)}: must be [{batch}, {num_keys}], "
                "a flag for every key"
            )
        if num_heads is not None:
            self._check_heads(num_heads)

    def _check_heads(self, given: int) -> None:
        """Refuse global head indices that are not those of the heads given."""
        if self.heads is not None and len(self.heads) != given:
            raise PlanError(
                f"call.heads names {len(self.heads)} heads, but q has {given}: name each of them"
            )
        last = self.head_offset + given if self.heads is None else max(self.heads, default=-1) + 1
        if self.num_heads is not None and last > self.num_heads:
            raise PlanError(
                f"call.num_heads={self.num_heads} is the global number, but the heads given go up "
                f"to number {last}: check num_heads, head_offset={self.head_offset} and heads"
            )


def given_call(call: Call | None) -> Call:
    """Return the call, or the facts of self-standing attention for None.

    Raises:
        PlanError: It is something else, such as a dict of the facts.
    """
    if call is None:
        return Call()
    if not isinstance(call, Call):
        hint = "Call(**facts)" if isinstance(call, dict) else "Call(layer=…, grid=…, …)"
        raise PlanError(f"call is {described(call)}: must be a gossamer.{hint}, or None")
    return call


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what are not the tensors of one attention call.

    Raises:
        PlanError: No tensors, a wrong number of axes, or sizes that do not fit; the message gives
            the shapes.
        TypeError: The dtypes differ or are not floating.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise PlanError(
                f"{name} is {described(x)}: must be a torch.Tensor, "
                "[batch, heads, tokens, head dim] (torch.as_tensor makes one of an array)"
            )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise PlanError(f"{shapes}: each must be [batch, heads, tokens, head dim]")
    if k.shape != v.shape:
        raise PlanError(f"{shapes}: k and v must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise PlanError(f"{shapes}: batch and head dim of q and k must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise PlanError(
            f"{shapes}: {q.shape[1]} query heads are not a multiple of {k.shape[1]} KV heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise TypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}: cast them to one floating dtype"
        )
    if not q.device == k.device == v.device:
        raise PlanError(f"q is on {q.device}, k on {k.device}, v on {v.device}: move them together")


def is_index(value: object) -> bool:
    """Return whether a value is an integer, numpy's and a single one in a tensor too."""
    return isinstance(value, int) or (hasattr(value, "__index__") and _is_single(value))


def is_number(value: object) -> bool:
    """Return whether a value is a number, numpy's and a single one in a tensor too."""
    return isinstance(value, float) or (hasattr(value, "__float__") and _is_single(value))


def _is_flag(value: object) -> bool:
    """Return whether a value is a bool, numpy's and a single one in a tensor too."""
    return isinstance(value, bool) or (hasattr(value, "dtype") and _is_single(value))


def _is_single(value: object) -> bool:
    """Return whether a value is no array of several."""
    return getattr(value, "ndim", 0) == 0
