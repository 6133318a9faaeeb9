"""Loading the ST-LPIPS network without the packages that its module imports and does not need."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Protocol, cast

from torch import Tensor, nn

from gossamer.errors import MissingExtraError

# Imported at the top of stlpips-pytorch for its training code: torchvision for trunks that the
# shift-tolerant variant replaces, the others for debugging.
_UNUSED = {"torchvision": "models", "torchsummary": "summary", "IPython": "embed"}


class PerceptualDistance(Protocol):
    """The network: two batches [frames, 3, H, W] of floats in 0…1 to a distance per frame."""

    def __call__(self, in0: Tensor, in1: Tensor, *, normalize: bool) -> Tensor:
        """Return the distances [frames, 1, 1, 1]."""
        ...


def has_stlpips() -> bool:
    """Say whether the package with the network is installed."""
    return importlib.util.find_spec("stlpips_pytorch") is not None


@cache
def load_stlpips() -> PerceptualDistance:
    """Load the AlexNet shift-tolerant network once per process.

    Raises:
        MissingExtraError: The package `stlpips-pytorch` is not installed.
    """
    if not has_stlpips():
        raise MissingExtraError("eval", "stlpips-pytorch")
    with _stand_ins():
        module = importlib.import_module("stlpips_pytorch.stlpips")
    network: nn.Module = module.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    return cast("PerceptualDistance", network.eval().requires_grad_(False))


@contextmanager
def _stand_ins() -> Generator[None, None, None]:
    """Put empty modules in place of the unused imports that are absent, for the block alone."""
    missing = [name for name in _UNUSED if importlib.util.find_spec(name) is None]
    for name in missing:
        module = ModuleType(name)
        setattr(module, _UNUSED[name], None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]
