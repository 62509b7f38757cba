"""Numbers that are rounded to int8, by whatever scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusion import reader
from fusion.analysis.nodes import is_computed
from fusion.analysis.rounding import is_float
from fusion.graph import Found, Graph, Miss
from patterns.quant.quantise_by_head import by_head
from patterns.quant.quantise_dynamic import UNSCALED, dynamic
from patterns.quant.quantise_static import static
from patterns.quant.words import QUANTISE, TOKEN_SCALE


@reader(gives=(QUANTISE, TOKEN_SCALE))
def quantised(graph: Graph) -> Iterator[Found]:
    """Every value of int8 that is made of floating-point numbers: how it is quantised, and why not otherwise."""
    for value in graph.places:
        if value.op != "cast" or value.dtype != torch.int8 or not is_float(value.arg):
            continue
        heads = by_head(graph.algebra, value)
        if heads is not None:
            yield value, Miss("quantise", heads) if isinstance(heads, str) else heads
        if not is_computed(graph, value):
            continue
        tokens = dynamic(graph.algebra, value)
        if isinstance(tokens, tuple):
            int8, scale, multiplier = tokens
            yield value, int8
            yield scale, multiplier
            continue
        if tokens is not None:
            yield value, Miss("dynamic_quant", tokens)
        held = static(graph.algebra, value, dynamic=tokens not in (None, UNSCALED))
        if held is not None:
            yield value, Miss("quantise", held) if isinstance(held, str) else held
