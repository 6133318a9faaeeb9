"""Gossamer: sparse attention for diffusion transformers and long prefill, its cost always measured.

Every method answers one question, which keys each tile of queries reads and with which weight; the
answer is a `SparsePlan`, and everything else is written once for all of them.
"""

from gossamer.attention import attend, sparse_attention
from gossamer.budgets import Budgets
from gossamer.call import Call
from gossamer.errors import (
    GossamerError,
    MissingExtraError,
    PlanError,
    ProfileMismatchError,
    RecipeError,
    UnsupportedError,
)
from gossamer.integrations import Handle, apply
from gossamer.kernels import AttentionOutput, explain_kernels, list_kernels
from gossamer.methods import (
    NSA,
    PISA,
    SVG,
    SVG2,
    SVGEAR,
    VSA,
    BlockTopK,
    Clear,
    Dense,
    DraftAttention,
    FlexPrefill,
    InstaGen,
    Intra,
    MCSparse,
    Method,
    MInference,
    MoBA,
    Radial,
    ScalingAttention,
    SlidingWindow,
    SolAttn,
    SpargeAttn,
    VAttention,
    XAttention,
    get_method,
    list_methods,
)
from gossamer.order import WaveAlign, get_order, list_orders
from gossamer.plan import KeyBlocks, KeyTokens, SparsePlan
from gossamer.recipe import Recipe, list_recipes
from gossamer.records import Record
from gossamer.reuse import Reuse
from gossamer.session import Session

__version__ = "0.1.0"

__all__ = [
    "NSA",
    "PISA",
    "SVG",
    "SVG2",
    "SVGEAR",
    "VSA",
    "AttentionOutput",
    "BlockTopK",
    "Budgets",
    "Call",
    "Clear",
    "Dense",
    "DraftAttention",
    "FlexPrefill",
    "GossamerError",
    "Handle",
    "InstaGen",
    "Intra",
    "KeyBlocks",
    "KeyTokens",
    "MCSparse",
    "MInference",
    "Method",
    "MissingExtraError",
    "MoBA",
    "PlanError",
    "ProfileMismatchError",
    "Radial",
    "Recipe",
    "RecipeError",
    "Record",
    "Reuse",
    "ScalingAttention",
    "Session",
    "SlidingWindow",
    "SolAttn",
    "SpargeAttn",
    "SparsePlan",
    "UnsupportedError",
    "VAttention",
    "WaveAlign",
    "XAttention",
    "__version__",
    "apply",
    "attend",
    "explain_kernels",
    "get_method",
    "get_order",
    "list_kernels",
    "list_methods",
    "list_orders",
    "list_recipes",
    "sparse_attention",
]
