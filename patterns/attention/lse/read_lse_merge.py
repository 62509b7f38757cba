"""Outputs of attention over parts of the keys, merged by the log-sum-exps of their scores.

Every weight is normalised to a product of powers of exponentials and of their sums, in which maxima and partial sums
cancel. The rest must be one exponential for each part, divided by the sum of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion import reader
from fusion.analysis.dtypes import rounded_number
from fusion.analysis.equal_rows import on_equal_rows
from fusion.analysis.exp_monomials import ONE, Share, divides, total
from fusion.analysis.logarithms import bare
from fusion.analysis.rounding import exact, is_float
from fusion.analysis.softmax_shares import Exponentials
from fusion.analysis.stacked_entries import Pick, Picked, arranged_pick, cut, pick_on, stacked
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value, but_ones
from fusion.graph.algebra import widens
from fusion.graph.proof_steps import proof, proven
from patterns.attention.masks.visible import MASKED
from patterns.attention.words import LSE_MERGE, PARTS

Outs = Mapping[Value, Share]

_LOW = (-1e4, -1e9, torch.finfo(torch.float32).min)
_OF_LOW = (
    "lse: a query that sees no key of any part has low finite log-sum-exps, whose weights do not add up to 1 in "
    "npu_attention_update; write torch.logsumexp over the parts and exp(lse - total), or hide keys by -inf"
)


@reader(gives=(LSE_MERGE,), needs=("softmax_attention",))
def merges(graph: Graph) -> Iterator[Annotation]:
    """Read every merge of attention over parts of the keys as `lse_merge`; give why similar sums are none."""
    a = graph.algebra
    seeing = {
        each
        for each, attention in graph.readings.all("softmax_attention")
        if attention.captures["fully_masked_row"] == "zero"
    }
    walk = _Merges(a, Exponentials(a))
    outcomes: dict[Value, Reading | Miss] = {}
    for value in list(graph.places):
        merged = bare(value)
        single = value.op == "reshape" and merged.op != "matmul"
        if single or merged.op not in ("add", "mul", "scale", "matmul") or not is_float(value) or value.rank < 2:
            continue
        outs = walk.outs(value, None)
        if len(outs) >= 2 and all(share.is_weight for share in outs.values()):
            outcome = _read(a, walk.exponentials, value, outs)
            if isinstance(outcome, Reading) and not seeing & set(outs) and _gives_other(value, outcome):
                outcome = _OF_LOW
            outcomes[value] = Miss("attention_update", outcome) if isinstance(outcome, str) else outcome
    inner = _below(outcomes)
    for value, outcome in outcomes.items():
        if isinstance(outcome, Reading) or value not in inner:
            yield value, outcome


def _below(values: Iterable[Value]) -> set[Value]:
    """Return all values from which `values` are computed."""
    operands: set[Value] = set()
    waiting = [arg for value in values for arg in value.args]
    while waiting:
        value = waiting.pop()
        if value not in operands:
            operands.add(value)
            waiting.extend(value.args)
    return operands


@dataclass
class _Merges:
    """Values expanded to weighted sums of the outputs of parts.

    Attributes:
        a: the algebra of the graph.
        exponentials: the normal form of the weights.
        known: the memo of `outs`.
    """

    a: Algebra
    exponentials: Exponentials
    known: dict[tuple[Value, Pick], Outs] = field(default_factory=dict[tuple[Value, Pick], Outs])

    def outs(self, x: Value, pick: Pick) -> Outs:
        """Expand `x`, or its entry `pick`, to a weighted sum of values: map each value to its weight; memoised in
        `known`.

        {x: 1} if `x` is no weighted sum.
        """
        key = (x, pick)
        if key not in self.known:
            self.known[key] = self._opened(x, pick) or self._as_one_value(x, pick)
        return self.known[key]

    def _as_one_value(self, x: Value, pick: Pick) -> Outs:
        while (x.op == "cast" and widens(x.arg.dtype, x.dtype)) or x.op == "permute":
            below = arranged_pick(x, pick) if x.op == "permute" else Picked(pick)
            if below is None:
                break
            x, pick = x.arg, below.pick
        part = cut(self.a, x, pick)
        while (stored := exact(bare(part))) is not part:
            part = stored
        return {self.a.reshape(part, but_ones(part.shape)): ONE}

    def _opened(self, x: Value, pick: Pick) -> Outs | None:
        if not is_float(x):
            return None
        match x.op:
            case "add":
                return self._sum([self.outs(each, pick_on(each, pick)) for each in x.args])
            case "scale" if divides(x.attrs[0]):
                return _times(self.outs(x.arg, pick), ONE.scaled(x.attrs[0]))
            case "mul":
                return self._weighed(x, pick)
            case "cast":  # the result of an inner merge may be rounded
                outs = self._opened(x.arg, pick)
                return outs if outs and any(share.is_weight for share in outs.values()) else None
            case "matmul" if pick is None and x.shape[-2:-1] == (1,):
                return self._contracted(*x.args)
            case "reshape":
                inner = arranged_pick(x, pick)
                return None if inner is None else self.outs(x.arg, inner.pick)
            case "mean":
                parts = None if pick is not None else stacked(x)
                if parts is None:
                    return None
                opened = self._sum([self.outs(x.arg, each) for each in parts])
                return opened and _times(opened, ONE.scaled(1 / len(parts)))
            case _:
                return None

    def _weighed(self, x: Value, pick: Pick) -> Outs | None:
        """Expand `x` = weights [.., 1] · y [.., E], or its entry `pick`, to the values of y, each times the weight of
        its row.

        None for other products.
        """
        for weight, y in x.operands():
            rows = (*y.shape[:-1], 1)
            if weight.shape[-1:] != (1,) or y.shape[-1:] in ((), (1,)) or but_ones(weight.shape) != but_ones(rows):
                continue
            if but_ones(x.shape) == but_ones(y.shape):
                return _times(self._differing(y, pick_on(y, pick)), self._share(weight, pick_on(weight, pick)))
        return None

    def _contracted(self, weights: Value, y: Value) -> Outs | None:
        """Expand `weights` [.., 1, P] @ `y` [.., P, E], where `y` is a stack of P parts; None if it is none."""
        stack = y.below("cast", "permute", "reshape")
        if stack.op != "cat" or len(stack.args) != y.shape[-2]:
            return None
        entries = range(len(stack.args))
        return self._sum([_times(self.outs(y, (-2, each)), self._share(weights, (-1, each))) for each in entries])

    def _share(self, weight: Value, pick: Pick) -> Share:
        share = self.exponentials.value(weight, pick)
        assert share is not None  # only while it is computed
        return share

    def _differing(self, y: Value, pick: Pick) -> Outs:
        """Expand `y`, or its entry `pick`, as `outs` does; but of a difference x - z both terms, even if neither has a
        weight.
        """
        minus = y.op == "add" and is_float(y) and any(each.op == "scale" for each in y.args)
        if not minus:
            return self.outs(y, pick)
        return _added([self.outs(each, pick_on(each, pick)) for each in y.args]) or self.outs(y, pick)

    def _sum(self, terms: list[Outs]) -> Outs | None:
        """Add the expansions `terms`; None if none of them has a weight, or if there are too many values.

        A sum without weights stays one value: it is no merge.
        """
        weighed = any(share.is_weight for each in terms for share in each.values())
        return _added(terms) if weighed and sum(map(len, terms)) <= 2 * PARTS else None


def _times(outs: Outs, factor: Share) -> Outs:
    return {out: share * factor for out, share in outs.items()}


@proof
def _added(terms: list[Outs]) -> Outs | None:
    shares: dict[Value, list[Share]] = {}
    for each in terms:
        for out, share in each.items():
            shares.setdefault(out, []).append(share)
    return {out: proven(total(each)) for out, each in shares.items()}


def _is_undivided(out: Value) -> bool:
    """Return True if `out` is a matmul of exponentials that are not divided by their sum."""
    product = out.below("cast", "reshape", "permute")
    return product.op == "matmul" and product.arg.below("cast", "reshape").op == "exp"


def _gives_other(value: Value, merge: Reading) -> bool:
    """Return True if the operator may give another merged `value` than `merge` does for a row that all parts hide by a
    finite number.

    There lse = number + log(parts), which rounds to the number itself if that is large: the operator, which weighs by
    exp(lseᵢ - lse), then gives each part the weight 1.
    """
    captures = merge.captures
    sums = [each for name, each in captures.items() if name.startswith("lse")]
    outs = [each for name, each in captures.items() if name.startswith("out")]
    if not all(map(_may_be_low, sums)):
        return False
    for number in _LOW:
        known = {bare(each): number for each in sums} | {bare(each): 1.0 for each in outs}
        merged = on_equal_rows(value, {}, known)
        total = rounded_number(number + math.log(len(sums)), torch.float32)
        wanted = None if total is None else len(sums) * math.exp(number - total)
        if merged is None or wanted is None or not math.isclose(merged, wanted, rel_tol=1e-6):
            return True
    return False


def _may_be_low(lse: Value) -> bool:
    """Return True if a number of at most `MASKED`, but above -inf, is among what the scores of `lse` are made from."""
    sources = lse.sources(lambda each: () if each.op == "matmul" else each.args)
    return any(each.op in ("full", "scale") and -math.inf < each.attrs[0] <= MASKED for each in sources)


def _read(a: Algebra, exponentials: Exponentials, value: Value, outs: Outs) -> Reading | str:
    """Read the outputs and log-sum-exps of the parts that `value` merges; return the reason if it is no merge.

    `outs` maps each output to its weight as a share; `exponentials` finds the values of which the shares are
    exponentials.
    """
    shares = list(outs.values())
    if len(shares) > PARTS:
        return (
            f"parts: more than {PARTS} are merged; npu_attention_update requires {PARTS} at most; merge in "
            "several steps"
        )
    added = total(shares)
    if added is None or added.powers or added.sums or abs(added.factor - 1) > 1e-9:
        if any(map(_is_undivided, outs)):
            return (
                "parts: they are divided by the sum of all at the end, not each by its own; "
                "npu_attention_update requires softmax outputs; divide each part by its own sum"
            )
        return (
            "weights of the parts: they are not exp(lseᵢ - lse) with lse = logsumexp of all lseᵢ; "
            "npu_attention_update requires these; write exp(lse_i - torch.logsumexp(lses, 0))"
        )
    if len({share.sums for share in shares}) > 1:
        return (
            "weights of the parts: one has factors beside exp(lseᵢ - lse); npu_attention_update requires the "
            "exponential alone"
        )
    rows = value.shape[:-1]
    sums = exponentials.logarithms(shares, but_ones(rows))
    if sums is None:
        return (
            "lse: the weights of the parts are computed from something else than their log-sum-exps; "
            "npu_attention_update requires the log-sum-exp of each part, as attention returns it"
        )
    if any(but_ones(out.shape) != but_ones(value.shape) for out in outs):
        return (
            "parts: their shape differs from that of the result; npu_attention_update requires parts of the same shape"
        )
    captures: dict[str, Any] = {}
    for number, (out, lse) in enumerate(zip(outs, sums, strict=True)):
        captures |= {f"out{number}": a.reshape(out, value.shape), f"lse{number}": a.reshape(lse, rows)}
    return Reading("lse_merge", captures)
