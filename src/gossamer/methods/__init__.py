"""The methods: each decides which keys every tile of queries reads."""

from gossamer.call import check_tensors
from gossamer.methods.base import Method, check_method
from gossamer.methods.block_topk import BlockTopK
from gossamer.methods.clear import Clear
from gossamer.methods.dense import Dense
from gossamer.methods.draft import DraftAttention
from gossamer.methods.flexprefill import FlexPrefill
from gossamer.methods.instagen import InstaGen
from gossamer.methods.intra import Intra
from gossamer.methods.mc_sparse import MCSparse
from gossamer.methods.minference import MInference
from gossamer.methods.moba import MoBA
from gossamer.methods.nsa import NSA
from gossamer.methods.pisa import PISA
from gossamer.methods.radial import Radial
from gossamer.methods.registry import get_method, get_method_class, list_methods, register
from gossamer.methods.scaling import ScalingAttention
from gossamer.methods.sliding_window import SlidingWindow
from gossamer.methods.sol import SolAttn
from gossamer.methods.sparge import SpargeAttn
from gossamer.methods.svg import SVG
from gossamer.methods.svg2 import SVG2
from gossamer.methods.svg_ear import SVGEAR
from gossamer.methods.vattention import VAttention
from gossamer.methods.vsa import VSA
from gossamer.methods.xattention import XAttention
from gossamer.plan.agreement import check_plan

__all__ = [
    "NSA",
    "PISA",
    "SVG",
    "SVG2",
    "SVGEAR",
    "VSA",
    "BlockTopK",
    "Clear",
    "Dense",
    "DraftAttention",
    "FlexPrefill",
    "InstaGen",
    "Intra",
    "MCSparse",
    "MInference",
    "Method",
    "MoBA",
    "Radial",
    "ScalingAttention",
    "SlidingWindow",
    "SolAttn",
    "SpargeAttn",
    "VAttention",
    "XAttention",
    "check_method",
    "check_plan",
    "check_tensors",
    "get_method",
    "get_method_class",
    "list_methods",
    "register",
]
