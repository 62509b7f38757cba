"""The private APIs of Inductor that the project needs, and what keeps its errors from our graphs; torch 2.13.0."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from fusion._torch.fakes import fake_mode_of
from fusion._torch.functional import functional_graph
from fusion._torch.tracing import Boxed, forget_output_strides
from fusion.mutation import is_returned, memory_of, outputs, shown, written_by

aten = torch.ops.aten
_REINPLACED = {"index_put", "_unsafe_index_put", "slice_scatter", "select_scatter", "diagonal_scatter"}
_REMOVED: dict[Any, int] = {aten.clone.default: 0, aten.copy.default: 1}
"""Copies that Inductor removes, with the argument that takes their place."""


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
    """`gm` compiled for inference by Inductor with its own decompositions, as part of the AOT autograd that traced it.

    So it is told which inputs stay where they are, such as weights and static caches, which CUDA graphs need to know.
    Private: `torch._inductor.compile_fx.compile_fx_forward`, which is the inner compiler of `compile_fx`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_forward, create_compiler_config_extra
    from torch._inductor.virtualized import V

    given: Any = config
    forget_output_strides()
    functional = functional_graph(gm, inductor_table())
    results: Any = functional.graph.output_node().args[0]
    with torch.no_grad(), given.patch(_passes()), V.set_fake_mode(fake_mode_of(functional)):
        run: Any = compile_fx_forward(
            functional, list(example_inputs), len(results), len(example_inputs),
            create_compiler_config_extra(functional), is_inference=True,
        )  # fmt: skip
    return run


def inductor_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor applies before its own passes.

    Private: `torch._inductor.decomposition.select_decomp_table`.
    """
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def guest_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions for what a guest adds: Inductor's, and the exp of a softmax, as `_hide_exp` says."""
    return {**inductor_table(), aten.exp.default: _hidden_exp}


def _hidden_exp(x: torch.Tensor) -> Any:
    return torch.ops.prims.exp.default(x) if x.is_floating_point() else NotImplemented


def hosts_pass() -> bool:
    """True if Inductor is compiling a graph in this thread, so that a pass that is called is its guest.

    Private: `torch._inductor.virtualized.V.fake_mode`, set from AOT autograd to the end of code generation.
    """
    from torch._inductor.virtualized import NullHandler, V

    return not isinstance(V.fake_mode, NullHandler)


def inductor_mode(mode: str) -> AbstractContextManager[Any]:
    """Let Inductor compile inside this context as `torch.compile(mode=mode)` lets it: CUDA graphs, tuning.

    Raises:
        RuntimeError: Inductor has no such mode.
    """
    from torch._inductor import config, list_mode_options

    given: Any = config
    return given.patch(list_mode_options(mode))


def _passes() -> dict[str, Any]:
    """Configuration of one compilation by Inductor: the passes of the user, and within or behind them ours.

    Inductor's configuration is one of each thread.
    Private: `torch._inductor.config.joint_custom_pre_pass`, `.joint_custom_post_pass`, `.post_grad_custom_post_pass`.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    given: Any = config
    first, last = _graph_pass("exp hidden", _hide_exp), _graph_pass("exp shown", _show_exp)
    return {
        "joint_custom_pre_pass": (*get_custom_graph_passes(given.joint_custom_pre_pass), first),
        "joint_custom_post_pass": (last, *get_custom_graph_passes(given.joint_custom_post_pass)),
        "post_grad_custom_post_pass": (
            *get_custom_graph_passes(given.post_grad_custom_post_pass),
            _graph_pass("results copied", copy_results),
        ),
    }


def _graph_pass(name: str, change: Callable[[fx.Graph], None]) -> Any:
    """A pass of Inductor that changes a graph; its name is part of the key of Inductor's cache.

    Private: `torch._inductor.custom_graph_pass.CustomGraphPass`.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return f"cann_fusion: {name}"

    return Pass()


def _hide_exp(graph: fx.Graph) -> None:
    """Keep Inductor's attention patterns from a graph: all of them, and no others, hold the exp of a softmax.

    torch 2.13 takes `softmax(dim=-2)` between two products for scaled_dot_product_attention, whose softmax is over the
    last dim: results are wrong by half (pytorch #195320). So exp is another operator while patterns are looked for.
    """
    _rename(graph, aten.exp.default, torch.ops.prims.exp.default)


def _show_exp(graph: fx.Graph) -> None:
    _rename(graph, torch.ops.prims.exp.default, aten.exp.default)


def _rename(graph: fx.Graph, old: Any, new: Any) -> None:
    for node in graph.find_nodes(op="call_function", target=old):
        node.target = new


def copy_results(graph: fx.Graph) -> None:
    """Copy what a graph returns of memory that Inductor could take for an input's, in place.

    For `y = k.index_copy(..); k.copy_(y); return y`, torch 2.13 writes into `k` and returns `k` itself: a later write
    to it shows in the result (pytorch #198096 is of this kind).
    """
    for memory in filter(_may_become_input, dict.fromkeys(map(memory_of, outputs(graph)))):
        returning = [each for each in memory.users if each.op == "output" or _is_returned_view(each, memory)]
        fresh = _copied(memory)
        for user in returning:
            user.replace_input_with(memory, fresh)


def _is_returned_view(node: fx.Node, memory: fx.Node) -> bool:
    return shown(node) is memory and is_returned(node)


def _copied(memory: fx.Node) -> fx.Node:
    """Add a copy of a tensor that no pass of Inductor removes: a choice between the tensor and itself."""
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
    """True if memory is made by writes, and copies that go, over an input that the graph writes to anyway."""
    writes = False
    while _is_reinplaced(memory) or memory.target in _REMOVED:
        writes |= memory.target not in _REMOVED
        source: Any = memory.args[_REMOVED.get(memory.target, 0)]
        memory = memory_of(source)
    is_input = memory.op in ("placeholder", "get_attr")  # AOTInductor reads buffers by get_attr
    return writes and is_input and any(memory in written_by(user) for user in memory.users)


def _is_reinplaced(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _REINPLACED


def inductor_can_build(device_type: str) -> bool:
    """Whether Inductor finds the compiler that it needs for `device_type`: C++ for "cpu", Triton for the others.

    Private: `torch._inductor.cpp_builder.get_cpp_compiler`, `torch.utils._triton.has_triton`.
    """
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return has_triton()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
