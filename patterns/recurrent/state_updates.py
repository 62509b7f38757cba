"""Updates of a state by an outer product: S' = a · S + k uᵀ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion.analysis.rounding import is_float
from fusion.graph import Graph, Value

ARRANGED = ("cast", "permute", "reshape", "scale")
_CUT = ("reshape", "slice")


@dataclass(frozen=True)
class Update:
    """An outer product that is added to a decayed state.

    Attributes:
        decayed: the decayed state [.., K, V].
        state: the state before its decay [.., K, V].
        decays: the factors of the state, which broadcast to it.
        added: the outer product [.., K, V].
    """

    decayed: Value
    state: Value
    decays: tuple[Value, ...]
    added: Value

    @property
    def is_decayed(self) -> bool:
        """Return True if the state is multiplied by tensors or a number."""
        return self.decayed.below("cast") is not self.state


def state_updates(graph: Graph) -> Mapping[Value, Update]:
    """Return value -> update for all updates of a state in `graph`, in its order."""
    read = {value: _update(graph, value) for value in graph.places}
    return {value: each for value, each in read.items() if each is not None}


def _update(graph: Graph, value: Value) -> Update | None:
    """Read `value` [.., K, V] as the sum of a state and an outer product of computed tensors; None for others."""
    if value.op != "add" or value.rank < 3 or 1 in value.shape[-2:] or not is_float(value):
        return None
    for decayed, added in (value.args, value.args[::-1]):
        states, decays = _decayed(decayed, value.rank)
        if len(states) != 1 or decayed.shape != value.shape or not _is_state(graph, states[0]):
            continue
        update = Update(decayed, states[0], tuple(decays), added)
        if is_outer(graph, added) or (update.is_decayed and _is_product(graph, added)):
            return update
    return None


def _is_state(graph: Graph, x: Value) -> bool:
    """Return True if `x` may come from another token: it is neither a Parameter nor a matmul."""
    return not graph.is_fixed(x) and x.below(*ARRANGED).op != "matmul"


def _decayed(x: Value, rank: int) -> tuple[list[Value], list[Value]]:
    """Split the factors of `x` into states, which have all its `rank` dims, and decays: exponentials, and factors that
    broadcast.
    """
    factors = x.factors("cast", "scale")
    decays = [each for each in factors if each.below("cast", *_CUT).op == "exp" or _broadcasts(each, rank)]
    return [each for each in factors if each not in decays], decays


def _broadcasts(x: Value, rank: int) -> bool:
    return x.rank < rank or 1 in x.shape[-2:]


def is_outer(graph: Graph, x: Value) -> bool:
    """Return True if `x` [.., K, V] is the outer product of computed columns [.., K, 1] and rows [.., 1, V].

    `x` may be sliced from a product for all tokens, if every factor of that product broadcasts.
    """
    product = x.below("cast", "scale", *_CUT)
    if product.op == "matmul":
        return product.arg.shape[-1] == 1 and _is_product(graph, product)
    factors = product.factors("cast", "scale")
    if any(map(graph.is_fixed, factors)):
        return False
    if product.shape != x.shape:
        return len(factors) > 1 and all(each.shape != product.shape for each in factors)
    sides = [last_dims(each) for each in factors]
    columns, rows = (any(side[axis] == 1 != side[1 - axis] for side in sides) for axis in (1, 0))
    return columns and rows and all(1 in side for side in sides)


def last_dims(x: Value) -> Sequence[object]:
    """Return the sizes of the last two dims of `x`, 1 for those that it lacks."""
    return (1, 1, *x.shape)[-2:]


def _is_product(graph: Graph, x: Value) -> bool:
    """Return True if `x` [.., K, V] is a matmul kᵀ u of computed matrices of each head, as of a chunk of tokens."""
    product = x.below(*ARRANGED)
    return product.op == "matmul" and product.rank > 2 and not any(map(graph.is_fixed, product.args))
