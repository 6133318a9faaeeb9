"""How keys are chosen from scores, and how the chosen ones become lists."""

from gossamer.select.layout import BlockLayout, block_layout
from gossamer.select.lists import list_draws, list_keys
from gossamer.select.mass import top_mass
from gossamer.select.sample import (
    Draws,
    inclusion_by_importance,
    inclusion_uniform,
    systematic,
)
from gossamer.select.sampled import list_sampled, row_phases
from gossamer.select.topk import take_clusters, top_blocks

__all__ = [
    "BlockLayout",
    "Draws",
    "block_layout",
    "inclusion_by_importance",
    "inclusion_uniform",
    "list_draws",
    "list_keys",
    "list_sampled",
    "row_phases",
    "systematic",
    "take_clusters",
    "top_blocks",
    "top_mass",
]
