"""The methods: each decides which keys every tile of queries reads."""

from gossamer.methods.base import (
    Method,
    check_tensors,
    get_method,
    get_method_class,
    list_methods,
    register,
)
from gossamer.methods.block_topk import BlockTopK
from gossamer.methods.dense import Dense
from gossamer.methods.instagen import InstaGen
from gossamer.methods.intra import Intra
from gossamer.methods.mc_sparse import MCSparse
from gossamer.methods.svg2 import SVG2

__all__ = [
    "SVG2",
    "BlockTopK",
    "Dense",
    "InstaGen",
    "Intra",
    "MCSparse",
    "Method",
    "check_tensors",
    "get_method",
    "get_method_class",
    "list_methods",
    "register",
]
