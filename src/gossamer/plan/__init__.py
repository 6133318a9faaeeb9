"""What a sparse plan is, what it means and how much of the work it computes."""

from gossamer.plan.convert import to_tokens
from gossamer.plan.full import full_plan
from gossamer.plan.join import join_text
from gossamer.plan.keys import KeyBlocks, KeyTokens
from gossamer.plan.plan import SparsePlan

__all__ = ["KeyBlocks", "KeyTokens", "SparsePlan", "full_plan", "join_text", "to_tokens"]
