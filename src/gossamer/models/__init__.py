"""Bundled models: ``tiny_wan``, a small trained text-to-video pipeline for diffusers' WanPipeline.

Nothing here imports torch or diffusers; the pipeline is loaded with
``WanPipeline.from_pretrained(tiny_wan_path())``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["example_prompts", "tiny_wan_path", "unknown_words"]

# The tokenizer splits at white space and between word characters and punctuation.
_TOKEN = re.compile(r"\w+|[^\w\s]+")


def tiny_wan_path() -> Path:
    """Return the folder of the bundled pipeline."""
    return Path(__file__).parent / "tiny_wan"


def unknown_words(prompt: str) -> list[str]:
    """List the words of a prompt that the bundled pipeline has never seen.

    Args:
        prompt: What to generate.

    Returns:
        Lower-case words and punctuation outside the tokenizer's vocabulary, in order, once each.
        The tokenizer replaces each of them by ``<unk>``.
    """
    file = tiny_wan_path() / "tokenizer" / "tokenizer.json"
    known: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = _TOKEN.findall(prompt.lower())
    return list(dict.fromkeys(token for token in tokens if token not in known))


def example_prompts() -> list[str]:
    """Return 16 prompts whose combinations of words do not occur in the training data."""
    file = tiny_wan_path() / "prompts.json"
    prompts: list[str] = json.loads(file.read_text(encoding="utf-8"))["held_out"]
    return prompts
