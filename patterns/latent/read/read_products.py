"""Products of attention with what a latent gives, whatever stands between them: scores, and weights times values.

    q kᵀ = (q_nope W_UK) cᵀ + q_rope rᵀ        P v = (P c) W_UV                           (DeepSeek-V2, 2024, §2.1)

Both hold for any finite weights: no softmax, mask or bias need be read.
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
from fusion.analysis.row_layout import Step, named, uncast
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import must, proof, proven
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
"""PyTorch's own attention -> its first arguments."""


@dataclass(frozen=True)
class Product:
    """number · x y, arranged by `steps`, of x [B, N, S, K] and y [B, N, K, M]."""

    x: Value
    y: Value
    number: float
    steps: tuple[Step, ...]
    dtype: Any


@reader(gives=(LATENT_SCORES, LATENT_CONTEXT, LATENT_SDPA), needs=("latent_keys", "rotation", "softmax_attention"))
def latent_products(graph: Graph) -> Iterator[Found]:
    """Every product of queries with such keys, and of weights with such values.

    One that a node of its own scales is read there as well where the whole is no attention: its factor goes with it.
    """
    attended = {each.captures["k"].below("reshape") for _, each in graph.readings.all("softmax_attention")}
    for value in list(graph.places):
        if not is_float(value):
            continue
        called = _call(graph.places[value][0])
        if called is not None:
            yield from (_whole(graph, value, called) or {}).items()
            continue
        found = _product_in(graph, value)
        if found is not None and (value.op != "scale" or _keys_of(graph.algebra, found) not in attended):
            yield from (_scores(graph, value, found) or _context(graph, value, found) or {}).items()


@proof
def _product_in(graph: Graph, value: Value) -> Product | None:
    """The product of heads that `value` holds, alone but for a factor; None where the steps have no names."""
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


def _keys_of(a: Algebra, of: Product) -> Value:
    """The right side of a product of queries and keys, before its rows are split among sequences and heads."""
    return swapped(a, of.y).below("reshape")


@proof
def _scores(graph: Graph, value: Value, of: Product) -> dict[Value, Reading] | None:
    """Queries times keys."""
    given, sources = proven(_keys(graph, of.x, swapped(graph.algebra, of.y)))
    told = {"scale": of.number, "dtype": of.dtype, "output_view": of.steps}
    return {value: Reading("latent_scores", given | told), **sources}


@proof
def _context(graph: Graph, value: Value, of: Product) -> dict[Value, Reading] | None:
    """Weights times values; infinite ones make other numbers NaN if they meet the latent first."""
    must(of.number == 1 and not may_hold_infinity(of.x))
    latent, up, rows = proven(_values(graph.algebra, of.y))
    given = {"weights": of.x, "latent": latent, "up": up, "rows": rows}
    return {value: Reading("latent_context", {**given, "dtype": of.dtype, "output_view": of.steps})}


def _call(node: fx.Node) -> fx.Node | None:
    """The call of PyTorch's own attention that gives a node, perhaps beside a log-sum-exp; None for another node."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    return source if isinstance(source, fx.Node) and source.target in _CALLED else None


@proof
def _whole(graph: Graph, value: Value, node: fx.Node) -> dict[Value, Reading] | None:
    """A call of scaled_dot_product_attention, whose softmax no node holds."""
    given: dict[str, Any] = {**dict(zip(_CALLED[cast(Any, node.target)], node.args, strict=False)), **node.kwargs}
    must(not given.get("is_causal") and not given.get("dropout_p"))
    tensors = {name: proven(graph.operand(node, each)) for name, each in given.items() if isinstance(each, fx.Node)}
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    must(q.rank == k.rank == v.rank == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[1] != 1)
    keys, sources = proven(_keys(graph, q, k))
    latent, up, rows = proven(_values(graph.algebra, v))
    must(keys["up"].dtype == up.dtype == q.dtype)
    scale = given.get("scale")
    told = {"scale": 1 / sqrt(q.shape[-1]) if scale is None else scale, "dtype": q.dtype, "output_view": ()}
    told |= {"bias": tensors.get("attn_mask"), "up_value": up, "value_rows": rows}
    values = {} if latent is keys["latent"] and rows == keys["rows"] else {"values": latent}
    return {value: Reading("latent_sdpa", {**keys, **values, **told}), **sources}


@proof
def _keys(graph: Graph, q: Value, k: Value) -> tuple[dict[str, Any], dict[Value, Reading]] | None:
    """What is said of queries and keys, and where the queries come from."""
    a = graph.algebra
    q, k = _narrow(a, q, k)
    k, rows = first_rows(k)
    heads, count = k.shape[1:3]
    keys = keys_of_latent(a, k, heads, count)
    if not isinstance(keys, KeysOfLatent):
        return None
    readings, sources = proven(read_keys(a, graph.readings, q, k, keys, rows))
    of_query, of_keys = (readings[each].captures for each in (q, k))
    given = {name: of_query[name] for name in ("nope", "absorbed", "rope") if name in of_query}
    given |= {"latent": of_keys["latent"], "up": of_keys["up"], "rows": rows}
    return given | ({"k_rope": of_keys["rope"]} if "rope" in of_keys else {}), sources


@proof
def _values(a: Algebra, v: Value) -> tuple[Value, Value, Any] | None:
    """A latent, W_UV and how many of its first rows values are of."""
    v, rows = first_rows(uncast(a, v))
    values = proven(heads_projection(a, v, v.shape[1], v.shape[2]))
    return values.source, swapped(a, values.lanes(a, v.shape[-1])), rows


def _narrow(a: Algebra, *both: Value) -> tuple[Value, ...]:
    """Queries and keys before both were widened."""
    narrow = tuple(uncast(a, each) for each in both)
    return narrow if len({each.dtype for each in narrow}) == 1 else both
