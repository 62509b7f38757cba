"""Softmax attention, read from contractions: out = softmax(scale · q kᵀ + mask) v, in whatever layout it is written.

The weights may be grouped by key heads, permuted, cast or cut from a softmax with a sink; factors may stand on q, on k
or on the scores; masks may be added, chosen or filled in. What the operator must be told stands in the reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion.graph import Algebra, Reading, Value
from fusion.graph.algebra import widens
from fusion.stages.canonicalise.arrangement import Arrangement, Dims, Step, arrangement, carried
from fusion.stages.canonicalise.assumed import Assumed
from fusion.stages.canonicalise.contractions import swapped
from fusion.stages.canonicalise.folding import Folder
from fusion.stages.canonicalise.logic import either
from fusion.stages.canonicalise.masks import MASKED, Limits, Term, hidden, limits, sees_some, unseen, visible, whole
from fusion.stages.canonicalise.positions import Positions

Finish = tuple[Step, ...]


@dataclass(frozen=True)
class Weights:
    """softmax(..), how its rows are arranged where they multiply v, and whether a sink is cut off."""

    softmax: Value
    rows: Arrangement
    cut: bool


@dataclass(frozen=True)
class Scores:
    """scale · product, arranged by `steps`, masked by `terms`, with a sink; `odd` says what else was on the way."""

    product: Value | None = None
    scale: float = 1.0
    steps: tuple[Step, ...] = ()
    terms: tuple[Term, ...] = ()
    sink: Value | None = None
    odd: str = ""


def attention(a: Algebra, folder: Folder, assumed: Assumed, root: Value) -> Reading | str | None:
    """What `root` is if it is attention; the reason if it looks like it; None if it does not."""
    value, finish = _stripped(root)
    if value.op != "matmul":
        return None
    weights = _weights(a, value.arg)
    if weights is None:
        return "some of the weights are dropped at random" if _dropped(value.arg) else None
    if weights.softmax.attrs[0] != -1:
        return "the softmax is taken over the queries, not over the keys"
    scores = _scores(Scores(), weights.softmax.arg)
    if scores.odd or scores.product is None:
        return scores.odd or None
    if weights.cut != (scores.sink is not None):
        return "the weights are cut, but not from a sink that stands last"
    return _reading(a, folder, assumed, root, value, weights, scores, finish)


def contraction(value: Value) -> Value:
    """What is below casts and other arrangements."""
    return _stripped(value)[0]


def _stripped(root: Value) -> tuple[Value, Finish]:
    """The contraction below what only casts it or arranges it otherwise, and the arrangement, innermost first."""
    finish: list[tuple[str, tuple[Any, ...]]] = []
    value = root.arg if root.op == "cast" else root
    while value.op in ("reshape", "permute"):
        finish.append((value.op, value.shape if value.op == "reshape" else value.attrs))
        value = value.arg
    return value, tuple(reversed(finish))


def _dropped(p: Value) -> bool:
    """Whether what multiplies the values went through dropout."""
    while p.op in ("cast", "reshape", "permute", "getitem") or (p.op.endswith("getitem>") and p.args):
        p = p.arg
    return "dropout" in p.op and any(each.op == "softmax" for each in p.args)


def _weights(a: Algebra, p: Value) -> Weights | None:
    steps, cut = (), False
    while p.op != "softmax":
        step = _step(p)
        if step is not None:
            steps = (step, *steps)
        elif p.op == "slice" and p.attrs[0] == p.rank - 1 and p.attrs[1] == 0 and p.attrs[3] == 1:
            cut = True
        elif p.op != "cast":
            return None
        p = p.arg
    p, order = _turned(a, p)
    steps = (("permute", order), *steps) if order else steps
    rows = arrangement(p.shape[:-1], steps)
    return None if rows is None else Weights(p, rows, cut)


def _turned(a: Algebra, softmax: Value) -> tuple[Value, tuple[int, ...]]:
    """The softmax of scores whose rows stand in the order of the product, and the order in which they stood."""
    scores = _scores(Scores(), softmax.arg)
    lead = () if scores.product is None else scores.product.shape[:-1]
    rows = arrangement(lead, scores.steps) if lead and softmax.attrs[0] == -1 else None
    if rows is None or rows.identity or sorted(rows.before) != sorted(rows.after):
        return softmax, ()
    back = tuple(rows.after.index(run) for run in rows.before)
    z = _permuted(a, softmax.arg, (*back, softmax.rank - 1))
    order = tuple(rows.before.index(run) for run in rows.after)
    return a.make("softmax", (z,), softmax.attrs, z.shape, z.dtype), order


def _permuted(a: Algebra, z: Value, order: Sequence[int]) -> Value:
    """`z` permuted, below all that is done to single scores."""
    if z.op in ("cast", "scale", "add", "where", "cat"):
        rank = len(order)
        args = [_permuted(a, a.reshape(each, (*(1,) * (rank - each.rank), *each.shape)), order) for each in z.args]
        return a.make(z.op, args, z.attrs, tuple(z.shape[axis] for axis in order), z.dtype)
    return a.permute(z, order)


def _step(x: Value) -> Step | None:
    """What a reshape or a permute does to all dims but the last, if it leaves that alone."""
    if x.op == "reshape" and x.rank and x.arg.rank and x.shape[-1] == x.arg.shape[-1]:
        return "reshape", x.shape[:-1]
    return ("permute", x.attrs[:-1]) if x.op == "permute" and x.attrs[-1] == x.rank - 1 else None


# scores ------------------------------------------------------------------------------------------------------------


def _scores(found: Scores, z: Value) -> Scores:
    """Walk down from the argument of the softmax to the product of queries and keys."""
    match z.op:
        case "matmul":
            return replace(found, product=z)
        case "cast":
            return _scores(found, z.arg)
        case "reshape" | "permute":
            step = _step(z)
            return found if step is None else _scores(replace(found, steps=(step, *found.steps)), z.arg)
        case "scale":
            return _scores(replace(found, scale=found.scale * z.attrs[0]), z.arg)
        case "cat" if z.attrs == (z.rank - 1,) and len(z.args) == 2 and z.args[1].shape[-1] == 1:
            if found.scale != 1 or found.terms or found.steps or found.sink is not None:
                return replace(found, odd="a sink is scaled or masked like a score")
            return _scores(replace(found, sink=z.args[1]), z.arg)
        case "add":
            return _added(found, z)
        case "where":
            return _chosen(found, z)
        case "tanh":
            return replace(found, odd="the scores are capped softly by tanh, which the operator does not do")
        case "mul" if _number(z.args[0]) or _number(z.args[1]):
            scores, factor = z.args if _number(z.args[1]) else z.args[::-1]
            return _scores(replace(found, scale=found.scale * _number(factor)), scores)
        case "mul" if _product_in(z) is not None:
            return replace(found, odd="the scores are scaled by a tensor, where the operator takes a number")
        case _:
            return found


def _number(x: Value) -> float:
    """The number of which a tensor consists, 0 where it has others."""
    if x.op == "full":
        return float(x.attrs[0])
    if x.op in ("cast", "expand", "reshape"):
        return _number(x.arg)
    return _number(x.arg) ** x.attrs[0] if x.op == "power" and _number(x.arg) > 0 else 0.0


def _added(found: Scores, z: Value) -> Scores:
    for scores, other in (z.args, z.args[::-1]):
        product = _product_in(scores)
        if product is None:
            continue
        of_rows = other.shape[-1:] == (1,) and z.shape[-1] != 1
        if of_rows and found.sink is None and not found.terms and _computed_from(other, product):
            return _scores(found, scores)  # the same for a whole row, as its maximum: the softmax does not see it
        if found.steps:
            return replace(found, odd="the scores are masked before they are arranged otherwise")
        term = Term("add", other, found.scale)
        return _scores(replace(found, terms=(*found.terms, term)), scores)
    return found


def _chosen(found: Scores, z: Value) -> Scores:
    condition, yes, no = z.args
    for how, scores, fill in (("keep", yes, no), ("drop", no, yes)):
        if _product_in(scores) is not None:
            if found.steps or fill.op != "full" or fill.attrs[0] * found.scale > MASKED:
                return replace(found, odd="scores are replaced by something else than a number of at most -1e4")
            term = Term(how, condition, fill=fill.attrs[0] * found.scale)
            return _scores(replace(found, terms=(*found.terms, term)), scores)
    return found


def _computed_from(x: Value, source: Value) -> bool:
    """Whether `source` is among what `x` is computed from."""
    seen, waiting = {x}, [x]
    while waiting:
        new = {each for each in waiting.pop().args if each.id >= source.id} - seen
        seen |= new
        waiting.extend(new)
    return source in seen


def _product_in(z: Value) -> Value | None:
    """The product of queries and keys of which `z` consists of scores."""
    while z.op in ("cast", "scale", "reshape", "permute", "tanh") or (z.op == "cat" and z.attrs == (z.rank - 1,)):
        z = z.arg
    if z.op in ("add", "where", "mul"):
        return next((each for each in map(_product_in, z.args[-2:]) if each is not None), None)
    return z if z.op == "matmul" else None


# the reading -------------------------------------------------------------------------------------------------------


def _reading(
    a: Algebra,
    folder: Folder,
    assumed: Assumed,
    root: Value,
    product: Value,
    weights: Weights,
    scores: Scores,
    finish: Finish,
) -> Reading | str | None:
    shape = weights.softmax.shape[:-1]
    if not 2 <= len(shape) <= 4 or scores.product is None:
        return "scores of more than five dims"
    batch, heads, queries = _bns(shape)
    q = _queries(a, scores)
    k, v = _keys(a, scores), _values(a, product, weights)
    if k is None or v is None:
        return "keys or values are not the same for the queries of one head"
    q = a.reshape(q, (batch, heads, queries, q.shape[-1]))
    shared = k.shape[1] if _divides(v.shape[1], k.shape[1]) else v.shape[1]
    if not _divides(k.shape[1], shared):
        return "keys and values are shared by other groups of heads"
    k, v = (_spread(a, each, shared) for each in (k, v))
    q, k, v = _narrow(a, root.dtype, q, k, v)
    if len({root.dtype, q.dtype, k.dtype, v.dtype}) != 1:
        return "queries, keys, values and result have different dtypes"
    captures: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": scores.scale}
    steps = _finish((batch, heads, queries), weights, v.shape[-1], finish)
    if steps is None:
        return "the result is arranged by several symbolic sizes"
    captures["finish"] = steps
    if scores.sink is not None:
        sink = _per_head(a, scores.sink, shape, heads)
        if sink is None:
            return "the sink is not one number for each head"
        captures["sink"] = sink
    positions = Positions((*shape, k.shape[2]), folder, assumed.visible)
    told = _mask(a, positions, weights.softmax, scores, shape, (batch, heads, queries, k.shape[2]))
    if isinstance(told, str):
        return told
    return Reading("softmax_attention", captures | told, frozenset(each.attrs[0] for each in positions.relied))


def _bns(shape: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Batch, heads and queries of the rows of scores: [X, S], [B, N, S] or [B, M, G, S]."""
    if len(shape) == 2:
        return shape[0], 1, shape[1]
    return shape[0], prod(shape[1:-1]), shape[-1]


def _queries(a: Algebra, scores: Scores) -> Value:
    """The queries [*rows, D], arranged as the scores are."""
    assert scores.product is not None
    x = scores.product.arg
    q = a.expand(x, (*scores.product.shape[:-1], x.shape[-1]))
    for op, how in scores.steps:
        q = a.reshape(q, (*how, q.shape[-1])) if op == "reshape" else a.permute(q, (*how, q.rank - 1))
    return q


def _keys(a: Algebra, scores: Scores) -> Value | None:
    """The keys [B, M, T, D] for the batch dims that the scores have in the softmax."""
    assert scores.product is not None
    rows = arrangement(scores.product.shape[:-1], scores.steps)
    k = swapped(a, scores.product.args[1])
    return None if rows is None else _heads(a, k, rows, rows.before, rows.after)


def _values(a: Algebra, product: Value, weights: Weights) -> Value | None:
    """The values [B, M, T, E] for the batch dims that the weights have in the softmax."""
    rows = weights.rows
    return _heads(a, product.args[1], rows, rows.after, rows.before)


def _heads(a: Algebra, kv: Value, rows: Arrangement, own: Dims, wanted: Dims) -> Value | None:
    """Keys or values with the batch dims `own` as [B, M, T, D], each of the M heads once, however often repeated."""
    placed = carried(a, _opened(a, kv, len(own)), rows, own, wanted)
    if placed is None:
        return None
    ends = [len(wanted[0]), sum(map(len, wanted[:-1]))]
    full = [rows.sizes[atom] for run in wanted for atom in run]
    lead, last = list(placed.shape[:-2]), placed.shape[-2:]
    if any(size != 1 for size in lead[ends[1] :]):
        return None
    batch = _common(lead[: ends[0]], full[: ends[0]])
    heads = _common(lead[ends[0] : ends[1]], full[ends[0] : ends[1]])
    open_ = a.expand(placed, (*batch, *heads, *lead[ends[1] :], *last))
    kv = _once(a, a.reshape(open_, (prod(batch), prod(heads), *last)))
    return a.expand(kv, (prod(full[: ends[0]]), *kv.shape[1:]))


def _common(lead: Sequence[Any], full: Sequence[Any]) -> list[Any]:
    """The sizes of dims of which only the last may be shared, so that neighbours share: others are repeated."""
    own = next((place for place in reversed(range(len(lead))) if lead[place] != 1), -1)
    return [*full[: own + 1], *lead[own + 1 :]]


def _opened(a: Algebra, kv: Value, rank: int) -> Value:
    """With a dim of size 1 for the rows, and for batch dims that it broadcasts to: [*rank dims, T, E]."""
    lead = kv.shape[:-2]
    return a.reshape(kv, (*(1,) * (rank - 1 - len(lead)), *lead, 1, *kv.shape[-2:]))


def _divides(part: Any, whole: Any) -> bool:
    return part == whole or (isinstance(part, int) and isinstance(whole, int) and part > 0 and whole % part == 0)


def _once(a: Algebra, kv: Value) -> Value:
    """Without the repetition of heads: an expanded head dim, or one that was expanded and joined with it."""
    if kv.op == "cast":
        return a.cast(_once(a, kv.arg), kv.dtype)
    if kv.op == "slice" and kv.attrs[0] >= kv.rank - 2:
        cut = _once(a, kv.arg)
        return a.slice(cut, kv.attrs[0] - kv.rank, *kv.attrs[1:]) or kv
    if kv.op == "permute" and kv.attrs[-2:] == (kv.rank - 1, kv.rank - 2):
        return swapped(a, _once(a, kv.arg))
    if kv.op == "expand" and kv.rank > 3:
        lead = tuple(old if place else new for place, (old, new) in enumerate(zip(kv.arg.shape, kv.shape, strict=True)))
        return a.expand(kv.arg, (*lead[:-2], *kv.shape[-2:]))
    if kv.op != "reshape" or kv.arg.op != "expand" or kv.rank != 4:
        return kv
    wide, base = kv.arg.shape, kv.arg.arg.shape
    grouped = len(wide) == 5 and wide == (kv.shape[0], base[1], wide[2], *kv.shape[2:]) and base[2] == 1
    return a.reshape(kv.arg.arg, (*base[:2], *base[3:])) if grouped and base[0] == wide[0] else kv


def _spread(a: Algebra, kv: Value, heads: Any) -> Value:
    """[B, M, T, D] with each head as often as it takes to have so many."""
    batch, own, *rows = kv.shape
    if own == heads:
        return kv
    opened = a.expand(a.reshape(kv, (batch, own, 1, *rows)), (batch, own, heads // own, *rows))
    return a.reshape(opened, (batch, heads, *rows))


def _narrow(a: Algebra, dtype: Any, *tensors: Value) -> list[Value]:
    """The operands before they were widened, if the result is as narrow."""
    narrowed = [_uncast(a, each, dtype) for each in tensors]
    return narrowed if all(each.dtype == dtype for each in narrowed) else list(tensors)


def _uncast(a: Algebra, x: Value, dtype: Any) -> Value:
    if x.op == "cast" and widens(x.arg.dtype, x.dtype) and x.arg.dtype == dtype:
        return x.arg
    if x.op in ("permute", "expand"):
        inner = _uncast(a, x.arg, dtype)
        return a.permute(inner, x.attrs) if x.op == "permute" else a.expand(inner, x.shape)
    return x


def _per_head(a: Algebra, sink: Value, shape: Sequence[Any], heads: Any) -> Value | None:
    """One number for each head, [N], of a sink that was spread over all rows."""
    while sink.op in ("expand", "cast"):
        sink = sink.arg
    lead = (*(1,) * (len(shape) + 1 - sink.rank), *sink.shape)
    return a.reshape(sink, (heads,)) if len(shape) > 2 and prod(lead[1:-2]) == heads == prod(lead) else None


def _finish(rows: tuple[Any, Any, Any], weights: Weights, width: Any, finish: Finish) -> Finish | None:
    """How [B, N, S, E] becomes the result; a symbolic size is "B", "S" or -1."""
    names = {rows[2]: "S", rows[0]: "B"}
    steps: list[Step] = []
    placed = weights.rows
    if not placed.identity:
        order = [atom for run in placed.before for atom in run]
        wanted = [atom for run in placed.after for atom in run]
        wanted += [atom for atom in order if atom not in wanted]  # those of size 1
        sizes = placed.sizes
        steps.append(("reshape", (*(sizes[atom] for atom in order), width)))
        steps.append(("permute", (*(order.index(atom) for atom in wanted), len(order))))
        steps.append(("reshape", (*(prod(sizes[atom] for atom in run) for run in placed.after), width)))
    elif weights.softmax.shape[:-1] != rows:
        steps.append(("reshape", (*weights.softmax.shape[:-1], width)))
    kept: list[tuple[str, tuple[Any, ...]]] = []
    for op, of in (*steps, *finish):
        if op == "permute" and of == tuple(range(len(of))):
            continue
        if op == "reshape" and kept and kept[-1][0] == "reshape":
            kept.pop()
        if (op, of) != ("reshape", (*rows, width)) or kept:
            kept.append((op, tuple(each if isinstance(each, int) else names.get(each, -1) for each in of)))
    return None if any(op == "reshape" and of.count(-1) > 1 for op, of in kept) else tuple(kept)


# the mask ----------------------------------------------------------------------------------------------------------


def _mask(
    a: Algebra,
    positions: Positions,
    softmax: Value,
    scores: Scores,
    shape: Sequence[Any],
    sizes: tuple[Any, Any, Any, Any],
) -> dict[str, Any] | str:
    """What the operator is told about the mask: `order` and `window`, up to which key, and the mask as it is."""
    queries, keys = sizes[2:]
    if not scores.terms:
        return {"order": "full", "window": None, "known": None, "empty": "zero"}
    formula = visible(positions, scores.terms)
    if isinstance(formula, str):
        return formula
    if formula is True:
        return {"order": "full", "window": None, "known": None, "empty": "zero"}
    bounds = limits(formula, len(shape) + 1)
    some = sees_some(bounds, queries, keys)
    certain = some or scores.sink is not None
    empty = "zero" if certain else unseen(positions, scores.terms, softmax.attrs[1])
    if not empty:
        return "a query that sees no key would see those that are lowered least: the mask must be -inf or replace them"
    told: dict[str, Any] = {"order": "mask", "window": None, "known": None, "empty": empty}
    mask = _explicit(a, scores, shape, sizes)
    if mask is not None:
        told["mask"] = mask
    told_in_words = some or (empty == "zero" and not bounds.moving)
    words = _bounded(a, bounds, sizes) if told_in_words else {}
    return told | words if mask is not None or words else "the mask differs from head to head"


def _bounded(a: Algebra, bounds: Limits, sizes: tuple[Any, Any, Any, Any]) -> dict[str, Any]:
    """Keys up to a bound: as a causal order, as a number of keys that is known, or as a tensor of numbers."""
    batch, _, queries, keys = sizes
    high, low, moving = bounds.high, bounds.low, bounds.moving
    if bounds.rest or high is None or (low is not None and (queries == 1 or not moving)):
        return {}
    window: Any = None
    if low is not None:
        span = high + low.times(-1)
        if span.terms or not isinstance(span.constant, int):
            return {}
        window = span.constant
    order = "right" if moving and queries != 1 else "full"
    if moving and not high.terms and high.constant == 0 and window is None:
        return {"order": "left"}
    seen = high.plus(queries if moving or queries == 1 else 1)
    if not seen.terms:
        if seen.constant == keys:
            return {"order": order, "window": window}
        within = isinstance(seen.constant, int) and isinstance(keys, int) and 0 < seen.constant <= keys
        return {"order": order, "window": window, "known": seen.constant} if within else {}
    length = whole(a, seen, batch)
    if length is None or not isinstance(keys, int):
        return {}
    return {"order": order, "window": window, "length": _clamped(a, length, keys)}


def _clamped(a: Algebra, length: Value, most: int) -> Value:
    """At most as many keys as there are: the operator would read beyond them."""
    return a.make("at_most", (length,), (most,), length.shape, length.dtype)


def _explicit(a: Algebra, scores: Scores, shape: Sequence[Any], sizes: tuple[Any, Any, Any, Any]) -> Value | None:
    """The mask [B or 1, 1, S, T] as booleans, true where a key is hidden; None where it differs between heads."""
    joined: Value | None = None
    for each in _hidden(a, scores.terms):
        joined = each if joined is None else either(a, joined, each)
    if joined is None:
        return None
    wide = joined.arg if joined.op == "expand" else joined
    lead = (*(1,) * (len(shape) + 1 - wide.rank), *wide.shape)
    batch, _, queries, keys = sizes
    if any(size != 1 for size in lead[1:-2]):
        return None
    flat = a.reshape(wide, (lead[0], 1, *lead[-2:]))
    return a.expand(flat, (batch if lead[0] != 1 else 1, 1, queries, keys))


def _hidden(a: Algebra, terms: Sequence[Term]) -> Iterator[Value]:
    for each in terms:
        mask = each.mask
        if each.how == "drop":
            yield mask
        elif each.how == "keep":
            yield mask.arg if mask.op == "not" else a.make("not", (mask,), (), mask.shape, torch.bool)
        else:
            yield hidden(a, mask, each.factor)
