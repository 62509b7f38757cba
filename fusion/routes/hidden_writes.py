"""Calls that write into their arguments unseen by GE: handed over where data alone orders them, else expanded."""

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
    """For each overload of ours that a graph for GE calls: the vendor's own, or the decomposition.

    The vendor's schema hides the writes, so that GE sees no order between such a call and what else touches the memory
    that it writes; and the package that has its converter may not be there.
    """
    found: dict[OpOverload, Callable[..., Any]] = {}
    for operator in filter(_is_hidden, OPERATORS.values()):
        calls = source.find_nodes(op="call_function", target=operator.overload())
        if calls:
            safe = has_default(operator) and all(map(_in_order, calls))
            found[operator.overload()] = partial(run_by_default, operator) if safe else operator.fallback
    return found


def _is_hidden(operator: Operator) -> bool:
    return operator.runs_default and "torchair" in operator.lowerings


def _in_order(call: fx.Node) -> bool:
    """Whether all that touches what a call writes is needed by the call, or needs it."""
    before, after = _reached(call, "all_input_nodes"), _reached(call, "users")
    return all(each in before or each in after for each in _touching(call))


def _touching(call: fx.Node) -> Iterator[fx.Node]:
    """The other nodes that read or write the memory that a call writes; a view does neither."""
    written = set(map(memory_of, written_by(call)))
    for node in call.graph.nodes:
        computes = node is not call and node.op == "call_function" and shown(node) is None
        if computes and any(memory_of(each) in written for each in node.all_input_nodes):
            yield node


def _reached(node: fx.Node, step: str) -> set[fx.Node]:
    """All that is reached from a node by such steps."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(getattr(waiting.pop(), step)) - found
        found |= new
        waiting.extend(new)
    return found
