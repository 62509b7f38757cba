"""Compilation by Inductor, with repairs of the graph where Inductor of torch 2.13.0 would compute other numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.inductor import inductor_compile, inductor_table
from fusion._torch.tracing import Boxed
from fusion.graph.aliasing import is_returned, memory_of, outputs, shown, written_by

aten = torch.ops.aten
_REINPLACED = {"index_put", "_unsafe_index_put", "slice_scatter", "select_scatter", "diagonal_scatter"}
_REMOVED: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}
"""Copies that Inductor removes, with the position of the argument that replaces them."""


def compile_repaired(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """Compile `gm` by Inductor with every repair of this module applied, and return the compiled callable."""
    return inductor_compile(gm, example_inputs, (hide_exp, show_exp, copy_results))


def guest_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of nodes that a guest pass adds: Inductor's, and exp hidden as by `hide_exp`."""
    return {**inductor_table(), aten.exp.default: _hidden_exp}


def _hidden_exp(x: torch.Tensor) -> Any:
    return torch.ops.prims.exp.default(x) if x.is_floating_point() else NotImplemented


def hide_exp(graph: fx.Graph) -> None:
    """Replace `aten.exp` by `prims.exp`, so that none of Inductor's attention patterns, all of which have exp, match.

    torch 2.13 takes `softmax(dim=-2)` between two products for scaled_dot_product_attention, whose softmax is over the
    last dim: results are wrong by half (pytorch #195320).
    """
    _rename(graph, aten.exp.default, torch.ops.prims.exp.default)


def show_exp(graph: fx.Graph) -> None:
    """Undo `hide_exp` once the attention patterns have run."""
    _rename(graph, torch.ops.prims.exp.default, aten.exp.default)


def _rename(graph: fx.Graph, old: Any, new: Any) -> None:
    for node in graph.find_nodes(op="call_function", target=old):
        node.target = new


def copy_results(graph: fx.Graph) -> None:
    """Copy in place the results whose memory Inductor could replace by that of an input.

    For `y = k.index_copy(..); k.copy_(y); return y`, torch 2.13 writes into `k` and returns `k` itself: a later write
    to it shows in the result (pytorch #198096 is of this kind).
    """
    for memory in filter(_may_become_input, dict.fromkeys(map(memory_of, outputs(graph)))):
        returning = [
            each for each in memory.users if each.op == "output" or (shown(each) is memory and is_returned(each))
        ]
        fresh = _copied(memory)
        for user in returning:
            user.replace_input_with(memory, fresh)


def copy_before_writes(graph: fx.Graph, prepared: Collection[fx.Node]) -> None:
    """Copy in place what calls change of `prepared` tensors, which Inductor could make writes into these tensors."""
    for node in [each for each in graph.nodes if _is_reinplaced(each)]:
        changed: Any = node.args[0]
        if memory_of(changed) in prepared:
            node.replace_input_with(changed, _copied(changed))


def _copied(memory: fx.Node) -> fx.Node:
    """Insert a copy of `memory` that no pass of Inductor removes: a choice between the tensor and itself."""
    val = memory.meta["val"]
    with memory.graph.inserting_after(memory):
        choice = memory.graph.call_function(aten.full.default, ((), False), {"dtype": torch.bool, "device": val.device})
    with memory.graph.inserting_after(choice):
        fresh = memory.graph.call_function(aten.where.self, (choice, memory, memory))
    with val.fake_mode:
        choice.meta["val"] = aten.full.default(*choice.args, **choice.kwargs)
        fresh.meta["val"] = val.clone()
    return fresh


def _may_become_input(memory: fx.Node) -> bool:
    """Return True if `memory` is made by writes, and copies that Inductor removes, from an input that the graph
    mutates.
    """
    writes = False
    while _is_reinplaced(memory) or memory.target in _REMOVED:
        writes |= memory.target not in _REMOVED
        source: Any = memory.args[_REMOVED.get(memory.target, 0)]
        memory = memory_of(source)
    is_input = memory.op in ("placeholder", "get_attr")  # AOTInductor reads buffers by get_attr
    return writes and is_input and any(memory in written_by(user) for user in memory.users)


def _is_reinplaced(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _REINPLACED
