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
from gossamer.methods.svg2 import SVG2

__all__ = [
    "SVG2",
    "BlockTopK",
    "Dense",
    "InstaGen",
    "Method",
    "check_tensors",
    "get_method",
    "get_method_class",
    "list_methods",
    "register",
]
