"""Tracing and compiling: Dynamo, AOT autograd, and the graphs that they give."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from fusion._torch.agreed_sizes import agree_on_sizes
from fusion._torch.fakes import fake_mode_of
from fusion._torch.operators import COMPOSITES
from fusion._torch.tensors import told_apart

Boxed = Callable[[list[Any]], Any]
"""A compiled graph as AOT autograd calls it: with one list of inputs, which the callee empties."""


def extended(run: Boxed, more: Callable[[Sequence[Any]], Iterable[Any]]) -> Boxed:
    """`run` with further inputs behind the caller's own; they are got from these at every call."""

    def call(values: list[Any]) -> Any:
        values.extend(list(more(values)))
        return run(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def preserve_composites() -> AbstractContextManager[None]:
    """Tracing inside this context records the `COMPOSITES` whole instead of decomposing them.

    For AOT autograd and `run_decompositions` only: a bare make_fx in it recurses without end. Leave the context before
    anything else is traced, a vendor's second AOT included: it would preserve the composites as well.
    Private: `torch.export.exported_program._override_composite_implicit_decomp`, which `run_decompositions` uses.
    """
    from torch._export.utils import _special_op_to_preserve_cia
    from torch.export.exported_program import _override_composite_implicit_decomp

    return _override_composite_implicit_decomp(dict.fromkeys(COMPOSITES, _special_op_to_preserve_cia))


def tracing_apart(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """A tracing context of its own in the mode of `gm`, so that a nested compilation leaves the outer one's alone.

    Private: `torch._guards.TracingContext`, used the same way by `torch._inductor.standalone_compile`.
    """
    return tracing(TracingContext(fake_mode_of(gm)))


outside_modes = _disable_current_modes
"""Inside, no dispatch mode is active: for compiling while a compiled graph is called.

AOT autograd has a mode of its own around the first call of a graph, in which nothing can be traced.
Private: `torch.utils._python_dispatch._disable_current_modes`.
"""


def inline_regions(gm: fx.GraphModule) -> None:
    """Put what `torch.compiler.nested_compile_region` keeps apart where it is called, to be fused: in a Dynamo graph.

        y = invoke_subgraph(body, name, x)   →   the nodes of body, with x for its input, regions inside it as well

    Nodes keep their stack traces and modules: those of the call that Dynamo has traced.
    Private: `torch._higher_order_ops.passes.inline_invoke_subgraph`.
    """
    from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph

    if gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        inline_invoke_subgraph(gm)
        gm.graph.lint()
        gm.recompile()


def boxed(call: Callable[..., Any]) -> Boxed:
    """`call(*values)` as a boxed callable.

    Also for what `aot_module_simplified` returns: it says `_boxed_call = True`, but takes its inputs one by one.
    """

    def run(values: list[Any]) -> Any:
        inputs = tuple(values)
        values.clear()
        return call(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def trace(
    run: Callable[..., Any],
    values: Sequence[Any],
    mode: FakeTensorMode,
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> fx.GraphModule:
    """The aten graph of `run(*values)` under `mode`; symbolic sizes, mutating nodes and node meta survive.

    Inputs are told apart even where one tensor stands for several, as it may for values that look the same.
    Private: `torch.fx.experimental.proxy_tensor.make_fx` with `torch.fx.traceback.preserve_node_meta`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with mode, preserve_node_meta(), torch.no_grad():
        traced = make_fx(run, decomposition_table=dict(decompositions), tracing_mode="real")
        return traced(*told_apart(values))


def compile_apart(function: Callable[..., Any], backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    """`function` compiled as if nothing had been compiled before, and without traces for what is compiled later.

    Dynamo keeps its cache, its limit of recompilations and what it learns about sizes per code object: a fresh caller
    has its own. The limits are lifted for functions that graph breaks lead into.
    Private: the names of `torch._dynamo.config`.
    """
    from torch._dynamo import config

    def call(fn: Any, args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=getattr(function, "__name__", "call"))
    compiled: Any = torch.compile(call, backend=backend, dynamic=dynamic)
    lifted = {"recompile_limit": 2**16, "accumulated_recompile_limit": 2**16, "automatic_dynamic_shapes": False}

    def run(*args: Any, **kwargs: Any) -> Any:
        with config.patch(lifted):
            return compiled(function, args, kwargs)

    return run


def keep_marks(tensors: Iterable[Any], copies: Mapping[int, Any]) -> None:
    """Give the copies (by the id of their original) what `mark_dynamic` and its like have said of the originals.

    Private: the names of the attributes in which `torch._dynamo` keeps these marks.
    """
    for each in tensors:
        if isinstance(each, torch.Tensor) and id(each) in copies:
            for name, value in vars(each).items():
                if name.startswith("_dynamo_"):
                    setattr(copies[id(each)], name, value)


def aot_inference(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, Sequence[Any]], Boxed],
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Trace `gm` by AOT autograd for inference: functional aten, mutated inputs written by `copy_` at the end.

    Private: `torch._functorch.aot_autograd.aot_module_simplified`.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    def agreed(captured: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        agree_on_sizes(captured.graph)
        return compile_graph(captured, inputs)

    compiler: Any = agreed
    with torch.no_grad():
        return aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=dict(decompositions or {}),
            keep_inference_input_mutations=True,
        )


def results_before() -> int:
    """How many inputs that it changes the graph that AOT autograd is compiling returns before its own results.

    Private: `torch._guards.TracingContext.fw_metadata`.
    """
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    return 0 if known is None else known.num_mutated_inp_runtime_indices


def forget_output_strides() -> None:
    """Let a graph be compiled in the place of one of which AOT autograd was told the strides of the results.

    Private: `torch._guards.TracingContext.output_strides`.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()


def aot_plain(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`gm` as the backend "aot_eager" compiles it, for graphs that are not fused."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(example_inputs))


def specialise_floats(gm: fx.GraphModule) -> None:
    """Make Dynamo start again with the floats of a model (an eps, a scale) as constants of the graph.

    With dynamic shapes Dynamo turns Python floats into inputs; no operator takes a tensor as eps. Asking for another
    start is what torch's own pass does for floats that cannot stay tensors; a float argument of the call stays dynamic.
    Private: `torch._dynamo.symbolic_convert.TensorifyState`, `torch._dynamo.exc.TensorifyScalarRestartAnalysis`.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    names: set[str] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        item = getattr(node.meta.get("example_value"), "item_memo", None)
        if isinstance(item, torch.SymFloat) and not _is_argument(node):
            names.add(item.node._expr.name)
    fresh = {name for name in names if not TensorifyState.should_specialize(name)}
    for name in fresh:
        TensorifyState.specialize(name)
    if fresh:
        raise TensorifyScalarRestartAnalysis


def _is_argument(node: fx.Node) -> bool:
    """Whether an input of a Dynamo graph is an argument of the compiled function itself, not reached from one."""
    from torch._dynamo.source import LocalSource

    source: Any = getattr(node, "_dynamo_source", None)
    return isinstance(getattr(source, "base", source), LocalSource)


def argument_path(node: fx.Node) -> tuple[str, ...]:
    """Where a tensor input of a Dynamo graph is found in the arguments of the compiled function.

    ("attention_mask", "full_attention") is the item "full_attention" of the argument `attention_mask`; empty for what
    is reached in another way, such as parameters and buffers.
    Private: `torch._dynamo.source` and the attribute `_dynamo_source` of placeholders.
    """
    from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, LocalSource

    source: Any = getattr(node, "_dynamo_source", None)
    steps: list[str] = []
    while not isinstance(source, LocalSource):
        if isinstance(source, (DictGetItemSource, GetItemSource)):
            steps.append(str(source.index))
        elif type(source) is AttrSource:
            steps.append(source.member)
        else:
            return ()
        source = source.base
    return (source.local_name, *reversed(steps)) if source.is_input else ()


def dynamo_position(node: fx.Node) -> int | None:
    """Which input of the Dynamo graph an input of the graph of AOT autograd is; None where it is not just that.

    It often has the same position, but not where inputs that share memory are written to: AOT autograd passes their
    common memory first. Private: `torch._functorch._aot_autograd.descriptors.PlainAOTInput` in the meta of nodes.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = node.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, node for node and name for name."""
    fresh = copy.deepcopy(graph)
    keep_names(graph, fresh)
    return fresh


def keep_names(graph: fx.Graph, fresh: fx.Graph) -> None:
    """Give the nodes of `fresh`, a copy of `graph`, their names: fx renames those that are named like a builtin.

    torch.export names inputs like the arguments of a model, `input` for one.
    """
    for node, other in zip(graph.nodes, fresh.nodes, strict=True):
        _give(other, node.name)


def refill(graph: fx.Graph, kept: fx.Graph) -> None:
    """Make a graph what a copy of it still is, node for node and name for name.

    Private: `torch.fx.Graph._graph_namespace`, which else would not give the names again.
    """
    for node in graph.nodes:  # in whatever order they stand
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    graph._graph_namespace = type(graph._graph_namespace)()
    copies: dict[fx.Node, fx.Node] = {}
    for node in kept.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    keep_names(kept, graph)


def rename(node: fx.Node, name: str) -> None:
    """Give `node` a name; another node of the graph that has it gets a fresh one.

    Private: `torch.fx.Node._rename`, which does nothing where it is given the name that a node has.
    """
    for other in node.graph.nodes:
        if other is not node and other.name == name:
            other._rename(f"{name}_1")
    _give(node, name)


def _give(node: fx.Node, name: str) -> None:
    """Set the name of `node`, which its graph then gives to no other node.

    Private: `torch.fx.Graph._graph_namespace`.
    """
    node.graph._graph_namespace._used_names.add(name)
    node.name = name


def unwrapped(error: Exception) -> Exception:
    """What a backend raised, out of the exception that Dynamo wraps around it.

    Private: `torch._dynamo.exc.BackendCompilerFailed.inner_exception`.
    """
    return getattr(error, "inner_exception", error)
