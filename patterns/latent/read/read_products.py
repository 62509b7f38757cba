"""Readers of single products of attention over a latent: scores, and weights times values.

    q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ        P v = (P c) W_UV                           (DeepSeek-V2, 2024, §2.1)

The equations hold for any finite P: the operations between the products need not be recognised.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, cast

import torch
import torch.fx as fx

from fusion import reader
from fusion.analysis import factored_products
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.infinities import may_hold_infinity
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import Step, named, unwidened
from fusion.graph import Algebra, Annotation, Graph, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof_steps import must, proof, proven
from patterns.latent.read.head_lanes import heads_projection
from patterns.latent.read.read import KeysOfLatent, first_rows, keys_of_latent, read_keys
from patterns.latent.words import LATENT_CONTEXT, LATENT_SCORES, LATENT_SDPA

_CALLED = {
    torch.ops.aten.scaled_dot_product_attention.default: (
        "query",
        "key",
        "value",
        "attn_mask",
        "dropout_p",
        "is_causal",
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: (
        "query",
        "key",
        "value",
        "dropout_p",
        "is_causal",
    ),
}
"""PyTorch's own attention -> names of its positional arguments."""


@dataclass(frozen=True)
class Product:
    """number · x y for x [B, N, S, K] and y [B, N, K, M], followed by the views and casts `steps`, in `dtype`."""

    x: Value
    y: Value
    number: float
    steps: tuple[Step, ...]
    dtype: Any


@reader(gives=(LATENT_SCORES, LATENT_CONTEXT, LATENT_SDPA), needs=("latent_keys", "rotation", "softmax_attention"))
def latent_products(graph: Graph) -> Iterator[Annotation]:
    """Read every latent_scores, latent_context and latent_sdpa.

    A node that multiplies scores by a number is read as latent_scores too, with this scale, unless a softmax_attention
    has the keys.
    """
    attended = {each.captures["k"].below("reshape") for _, each in graph.readings.all("softmax_attention")}
    for value in list(graph.places):
        if not is_float(value):
            continue
        called = _call(graph.places[value][0])
        if called is not None:
            yield from (_sdpa(graph, value, called) or {}).items()
            continue
        product = _product_in(graph, value)
        if product is not None and (value.op != "scale" or _keys_of(graph.algebra, product) not in attended):
            yield from (_scores(graph, value, product) or _context(graph, value, product) or {}).items()


@proof
def _product_in(graph: Graph, value: Value) -> Product | None:
    """Match `value` as a product of heads, followed by views, casts and factors that no other node uses.

    A sum of two scaled products is one product. None for another value, and for views with several symbolic sizes.
    """
    a = graph.algebra
    z, number = value, 1.0
    steps: list[Step] = []
    while z.op != "matmul":
        match z.op:
            case "reshape":
                steps.insert(0, ("reshape", z.shape))
            case "permute":
                steps.insert(0, ("permute", z.attrs))
            case "cast" if is_rounding(z):
                steps.insert(0, ("cast", (z.dtype,)))
            case "scale":
                number *= z.attrs[0]
            case "add":
                z = proven(factored_products.joined(a, *z.args))
                continue
            case _:
                return None
        z = z.arg
        must(value.op == "scale" or z not in graph.places)
    x, y = z.args
    must(2 < z.rank <= 4 and y.shape[:-2] == x.shape[:-2] == z.shape[:-2])
    heads = x.shape[-3]
    must(heads != 1)
    lead = (prod(x.shape[:-3]), heads)
    shape = (*lead, *z.shape[-2:])
    opened = [("reshape", z.shape)] if z.shape != shape else []
    view = proven(named([*opened, *steps], {shape[2]: "S", shape[0]: "B"}))
    x, y = (a.reshape(each, (*lead, *each.shape[-2:])) for each in (x, y))
    return Product(x, y, number, view, z.dtype)


def _keys_of(a: Algebra, scores: Product) -> Value:
    """Return the keys of the product `scores`, before a reshape to [B, N, T, D]."""
    return swapped(a, scores.y).below("reshape")


@proof
def _scores(graph: Graph, value: Value, product: Product) -> dict[Value, Reading] | None:
    """Read `value`, the `product` x · y, as latent_scores, and the layer of the queries x.

    None if y is no transposed keys of a latent.
    """
    captures, sources = proven(_keys(graph, product.x, swapped(graph.algebra, product.y)))
    rest = {"scale": product.number, "dtype": product.dtype, "output_view": product.steps}
    return {value: Reading("latent_scores", captures | rest), **sources}


@proof
def _context(graph: Graph, value: Value, product: Product) -> dict[Value, Reading] | None:
    """Read `value`, the `product` x · y, as latent_context.

    None if y is no values of a latent, x may be infinite, or there is a factor. With an infinite weight, (x c) W_UV may
    be NaN where x (c W_UV) is not.
    """
    must(product.number == 1 and not may_hold_infinity(product.x))
    latent, up, rows = proven(_values(graph.algebra, product.y))
    captures = {"weights": product.x, "latent": latent, "up": up, "rows": rows}
    return {value: Reading("latent_context", {**captures, "dtype": product.dtype, "output_view": product.steps})}


def _call(node: fx.Node) -> fx.Node | None:
    """Return the call of PyTorch's own attention whose first, or only, result is `node`; None for another node."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    return source if isinstance(source, fx.Node) and source.target in _CALLED else None


@proof
def _sdpa(graph: Graph, value: Value, node: fx.Node) -> dict[Value, Reading] | None:
    """Read `value` as latent_sdpa, the result of the call `node`; None with is_causal, dropout, or no latent."""
    arguments: dict[str, Any] = {**dict(zip(_CALLED[cast(Any, node.target)], node.args, strict=False)), **node.kwargs}
    must(not arguments.get("is_causal") and not arguments.get("dropout_p"))
    tensors = {name: proven(graph.operand(node, each)) for name, each in arguments.items() if isinstance(each, fx.Node)}
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    must(q.rank == k.rank == v.rank == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[1] != 1)
    keys, sources = proven(_keys(graph, q, k))
    latent, up, rows = proven(_values(graph.algebra, v))
    must(keys["up"].dtype == up.dtype == q.dtype)
    scale = arguments.get("scale")
    rest = {"scale": 1 / sqrt(q.shape[-1]) if scale is None else scale, "dtype": q.dtype, "output_view": ()}
    rest |= {"bias": tensors.get("attn_mask"), "up_value": up, "value_rows": rows}
    values = {} if latent is keys["latent"] and rows == keys["rows"] else {"values": latent}
    return {value: Reading("latent_sdpa", {**keys, **values, **rest}), **sources}


@proof
def _keys(graph: Graph, q: Value, k: Value) -> tuple[dict[str, Any], dict[Value, Reading]] | None:
    """Return the captures of queries `q` and keys `k` that are projected from a latent, and readings of the layer of
    `q`.

    None if the keys are not projected from a latent.
    """
    a = graph.algebra
    q, k = _narrow(a, q, k)
    k, rows = first_rows(k)
    heads, count = k.shape[1:3]
    keys = keys_of_latent(a, k, heads, count)
    if not isinstance(keys, KeysOfLatent):
        return None
    readings, sources = proven(read_keys(a, graph.readings, q, k, keys, rows))
    query, key = (readings[each].captures for each in (q, k))
    captures = {name: query[name] for name in ("nope", "absorbed", "rope") if name in query}
    captures |= {"latent": key["latent"], "up": key["up"], "rows": rows}
    return captures | ({"k_rope": key["rope"]} if "rope" in key else {}), sources


@proof
def _values(a: Algebra, v: Value) -> tuple[Value, Value, Any] | None:
    """Return the latent that values `v` are projected from, W_UV, and the number of leading rows (None: all)."""
    v, rows = first_rows(unwidened(a, v))
    values = proven(heads_projection(a, v, v.shape[1], v.shape[2]))
    return values.source, swapped(a, values.lanes(a, v.shape[-1])), rows


def _narrow(a: Algebra, *both: Value) -> tuple[Value, ...]:
    """Strip the widening casts of `both`, queries and keys, if they have one dtype below."""
    narrow = tuple(unwidened(a, each) for each in both)
    return narrow if len({each.dtype for each in narrow}) == 1 else both
