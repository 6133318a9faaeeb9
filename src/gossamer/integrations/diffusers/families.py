"""Which diffusers transformers are supported, and the few facts that differ between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from gossamer.errors import UnsupportedError

Grid = tuple[int, int, int]
GridFunction = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Grid]


@dataclass(frozen=True)
class Family:
    """What sets one family of transformers apart. Supporting another one is one more of these.

    Attributes:
        name: The family's name in messages.
        model_classes: Class names inside diffusers; their subclasses count too.
        site: Matches the full name of every self-attention module, and of nothing else.
        grid: (model, args, kwargs of its forward) -> (frames, rows, columns) after patchify.
        text: Where text tokens lie in the sequence the sites attend over.
    """

    name: str
    model_classes: tuple[str, ...]
    site: re.Pattern[str]
    grid: GridFunction
    text: Literal["none", "first", "last"]

    def sites(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of the self-attention modules, in the model's own order."""
        for name, module in model.named_modules():
            if self.site.search(name):
                yield name, module

    def text_span(self, num_tokens: int, num_latent: int) -> tuple[int, int] | None:
        """Return [start, stop) of the text tokens of a sequence, None where it has none.

        Args:
            num_tokens: Tokens of the whole sequence.
            num_latent: Latent tokens among them, the product of the grid.
        """
        if self.text == "none" or num_tokens <= num_latent:
            return None
        return (0, num_tokens - num_latent) if self.text == "first" else (num_latent, num_tokens)


def _wan_grid(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Grid:
    """Divide the latent video [B, C, F, H, W] by the patch size, as the model's forward does."""
    latents: Tensor = args[0] if args else kwargs["hidden_states"]
    _, _, frames, height, width = latents.shape
    config: Any = model.config
    patch_frames, patch_height, patch_width = config.patch_size
    return frames // patch_frames, height // patch_height, width // patch_width


FAMILIES: tuple[Family, ...] = (
    Family(
        name="Wan 2.1/2.2",
        model_classes=("WanTransformer3DModel", "WanVACETransformer3DModel"),
        # attn2 is cross-attention: text, and in I2V image tokens too.
        site=re.compile(r"^(blocks|vace_blocks)\.\d+\.attn1$"),
        grid=_wan_grid,
        text="none",
    ),
)


def find_family(model: object) -> Family | None:
    """Return the family whose class `model` is or derives from, None for a stranger."""
    bases = {
        base.__name__ for base in type(model).__mro__ if base.__module__.startswith("diffusers.")
    }
    return next((family for family in FAMILIES if bases & set(family.model_classes)), None)


def unsupported(what: str) -> UnsupportedError:
    """Return the error for a target that belongs to no family.

    Args:
        what: The given object, in words.
    """
    known = ", ".join(f"{f.name} ({', '.join(f.model_classes)})" for f in FAMILIES)
    return UnsupportedError(
        f"{what} cannot be attached to: pass a diffusers pipeline or one of its transformers; "
        f"supported are {known}"
    )
