"""Operators whose schema hides their writes from GE: passed on where data dependences order them, else decomposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.fx as fx

from fusion._torch.operators import OpOverload
from fusion.graph.aliasing import memory_of, shown, written_by
from fusion.operators import OPERATORS, Operator
from fusion.operators.registration import has_default, run_by_default


def handed_over(source: fx.Graph) -> dict[OpOverload, Callable[..., Any]]:
    """Map each overload with hidden writes that the graph calls to the vendor's operator, or to its decomposition.

    GE sees no order between a hidden write and other accesses to the same memory: the vendor's operator is used only
    where data dependences order all of them, and where its package, with the converter, is installed.
    """
    result: dict[OpOverload, Callable[..., Any]] = {}
    for operator in filter(_is_hidden, OPERATORS.values()):
        calls = source.find_nodes(op="call_function", target=operator.overload())
        if calls:
            safe = has_default(operator) and all(map(_in_order, calls))
            result[operator.overload()] = partial(run_by_default, operator) if safe else operator.fallback
    return result


def _is_hidden(operator: Operator) -> bool:
    return operator.runs_default and "torchair" in operator.lowerings


def _in_order(call: fx.Node) -> bool:
    """Return True if every access to the memory that `call` writes is an ancestor or a descendant of `call`."""
    before, after = _reached(call, "all_input_nodes"), _reached(call, "users")
    return all(each in before or each in after for each in _touching(call))


def _touching(call: fx.Node) -> Iterator[fx.Node]:
    """Yield the other nodes that read or write the memory that `call` writes; views do neither."""
    written = set(map(memory_of, written_by(call)))
    for node in call.graph.nodes:
        computes = node is not call and node.op == "call_function" and shown(node) is None
        if computes and any(memory_of(each) in written for each in node.all_input_nodes):
            yield node


def _reached(node: fx.Node, step: str) -> set[fx.Node]:
    """Return the nodes that are reachable from `node` by the attribute `step`: "users" or "all_input_nodes"."""
    result, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(getattr(waiting.pop(), step)) - result
        result |= new
        waiting.extend(new)
    return result
