"""Tracing and compiling by Dynamo and AOT autograd, and copies of their graphs."""

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

from fusion._torch.fakes import fake_mode_of
from fusion._torch.operators import COMPOSITES
from fusion._torch.size_guards import agree_on_sizes
from fusion._torch.tensors import as_distinct

Boxed = Callable[[list[Any]], Any]
"""A compiled graph in the calling convention of AOT autograd: one list of inputs, which the callee empties."""


def extended(run: Boxed, more: Callable[[Sequence[Any]], Iterable[Any]]) -> Boxed:
    """Return `run` with further inputs, computed by `more` from the caller's inputs at every call."""

    def call(values: list[Any]) -> Any:
        values.extend(list(more(values)))
        return run(values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def preserve_composites(gm: fx.GraphModule) -> AbstractContextManager[None]:
    """Preserve the `COMPOSITES` where `gm` is traced inside the context, instead of decomposing them.

    Where autocast is on, a composite without a kernel of its own for it is decomposed: autocast casts the operands of
    the products that `aten.einsum` is made of, and would cast nothing of a preserved one.

    For AOT autograd and `run_decompositions` only: a bare make_fx in it recurses without end. Leave the context before
    anything else is traced, a vendor's second AOT included: it would preserve the composites as well.
    Private: `torch.export.exported_program._override_composite_implicit_decomp`, which `run_decompositions` uses.
    """
    from torch._export.utils import _special_op_to_preserve_cia
    from torch.export.exported_program import _override_composite_implicit_decomp

    devices = autocast_devices(gm)
    preserved = [each for each in COMPOSITES if all(casts_itself(each, device) for device in devices)]
    return _override_composite_implicit_decomp(dict.fromkeys(preserved, _special_op_to_preserve_cia))


def autocast_devices(gm: fx.GraphModule) -> frozenset[str]:
    """Return the device types for which autocast is on where `gm` is called, or is turned on inside of `gm`."""
    from torch.amp.autocast_mode import _enter_autocast

    types = ("cpu", "cuda", torch._C._get_privateuse1_backend_name())
    around = {each for each in types if torch.is_autocast_enabled(each)}
    graphs = [each.graph for each in gm.modules() if isinstance(each, fx.GraphModule)]
    regions = (_enter_autocast, torch.ops.higher_order.wrap_with_autocast)
    entered = [node for graph in graphs for node in graph.nodes if node.target in regions]
    return frozenset({*around, *(str(node.args[0]) for node in entered)})


def casts_itself(op: OpOverload, device: str) -> bool:
    """Return True if autocast for `device` has a kernel for `op`, which casts its operands before it is traced.

    Private: `torch._C._dispatch_key_for_device`, `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def tracing_apart(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Return a new tracing context with the fake mode of `gm`, so that a nested compilation leaves the outer one.

    Private: `torch._guards.TracingContext`, used the same way by `torch._inductor.standalone_compile`.
    """
    return tracing(TracingContext(fake_mode_of(gm)))


outside_modes = _disable_current_modes
"""Context without active dispatch modes, for compiling while a compiled graph is called.

AOT autograd runs the first call of a graph under a mode of its own, in which nothing can be traced.
Private: `torch.utils._python_dispatch._disable_current_modes`."""


def inline_regions(gm: fx.GraphModule) -> None:
    """Inline the regions of `torch.compiler.nested_compile_region` in a Dynamo graph, so that they can be fused.

        y = invoke_subgraph(body, name, x)   →   the nodes of body, with x for its input, nested regions inlined as well

    Nodes keep the stack traces and modules of the call that Dynamo has traced.
    Private: `torch._higher_order_ops.passes.inline_invoke_subgraph`.
    """
    from torch._higher_order_ops.passes.inline_invoke_subgraph import inline_invoke_subgraph

    if gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        inline_invoke_subgraph(gm)
        gm.graph.lint()
        gm.recompile()


def boxed(call: Callable[..., Any]) -> Boxed:
    """Return `call(*values)` as a boxed callable.

    `aot_module_simplified` needs it: its result has `_boxed_call = True`, but takes its inputs one by one.
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
    """Trace `run(*values)` to an aten graph under `mode`, decomposing by `decompositions`.

    Symbolic sizes, mutating nodes and node meta are kept. A tensor that is passed for several inputs gives a
    placeholder for each.
    Private: `torch.fx.experimental.proxy_tensor.make_fx` with `torch.fx.traceback.preserve_node_meta`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with mode, preserve_node_meta(), torch.no_grad():
        traced = make_fx(run, decomposition_table=dict(decompositions), tracing_mode="real")
        return traced(*as_distinct(values))


def compile_apart(function: Callable[..., Any], backend: Any, dynamic: bool | None) -> Callable[..., Any]:
    """Compile `function` by `backend` independently of everything compiled before and after.

    Dynamo's cache, its limit of recompilations and its record of dynamic sizes are per code object: a new caller has
    its own. The limits are lifted for functions that graph breaks lead into. `dynamic` is as in `torch.compile`.
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
    """Copy the marks of `mark_dynamic` and the like from `tensors` to their `copies`, by the id of the original.

    Private: the names of the attributes in which `torch._dynamo` stores these marks.
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
    """Trace `gm` by AOT autograd for inference, and return what `compile_graph` makes of the traced graph.

    That graph is functional aten, decomposed by `decompositions`; mutated inputs are written by `copy_` at its end.
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
    """Count the results that the graph being compiled returns for mutated inputs, before its own results.

    Private: `torch._guards.TracingContext.fw_metadata`.
    """
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    return 0 if known is None else known.num_mutated_inp_runtime_indices


def static_inputs(count: int) -> list[int]:
    """Return the positions, among `count` inputs of the graph being compiled, of those that keep their address.

    These are parameters and buffers, as Dynamo guards them, and inputs that were added behind those of AOT autograd.
    Outside of a compilation there are none.
    Private: `torch._guards.TracingContext.fw_metadata`.
    """
    context = TracingContext.try_get()
    known = None if context is None else context.fw_metadata
    return [] if known is None else [*known.static_input_indices, *range(len(known.input_info), count)]


def forget_output_strides() -> None:
    """Clear the output strides of the tracing context, so that another graph is compiled in its place.

    Private: `torch._guards.TracingContext.output_strides`.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.clear()


def aot_plain(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile `gm` by the backend "aot_eager", for graphs that are not fused."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, list(example_inputs))


def specialise_floats(gm: fx.GraphModule) -> None:
    """Restart Dynamo with the floats of a model (an eps, a scale) as constants of the graph.

    With dynamic shapes Dynamo turns Python floats into inputs; no operator takes a tensor as eps. torch's own pass
    restarts the same way for floats that cannot stay tensors; a float argument of the call stays dynamic.
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
    """Return True if a float input of a Dynamo graph is an argument of the compiled function, not a part of one."""
    from torch._dynamo.source import LocalSource

    source: Any = getattr(node, "_dynamo_source", None)
    return isinstance(getattr(source, "base", source), LocalSource)


def argument_path(node: fx.Node) -> tuple[str, ...]:
    """Return the path of a tensor input of a Dynamo graph in the arguments of the compiled function.

    ("attention_mask", "full_attention") is the item "full_attention" of the argument `attention_mask`; empty for inputs
    that are reached in another way, such as parameters and buffers.
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
    """Return the position in the inputs of the Dynamo graph of an input of the graph of AOT autograd.

    None where the input is no plain one: AOT autograd passes the common base of mutated inputs that share memory,
    before all others.
    Private: `torch._functorch._aot_autograd.descriptors.PlainAOTInput` in the meta of nodes.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    described = node.meta.get("desc")
    return described.idx if isinstance(described, PlainAOTInput) else None


def dynamo_inputs(source: fx.Graph) -> list[tuple[fx.Node, Any]]:
    """Return the inputs of the graph of Dynamo that is being compiled, each with its value, a real tensor.

    `source` is a graph of AOT autograd that comes from it. Nothing is returned where Dynamo compiles nothing, and where
    `source` is a graph of training: its results are gradients, or are saved for these.
    Private: `torch._dynamo.symbolic_convert.InstructionTranslator`, `grapharg` in the meta of its placeholders, and
    `torch._functorch._aot_autograd.descriptors`.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._functorch._aot_autograd import descriptors as aot

    results = source.output_node().meta.get("desc") or [None]
    if any(isinstance(each, aot.GradAOTOutput | aot.SavedForBackwardsAOTOutput | None) for each in results):
        return []
    try:
        traced: Any = InstructionTranslator.current_tx().output.graph
    except AttributeError:  # the caller is not Dynamo
        return []
    inputs = traced.find_nodes(op="placeholder")
    return [(node, node.meta["grapharg"].example) for node in inputs] if _have_values(inputs) else []


def _have_values(inputs: Iterable[fx.Node]) -> bool:
    return all("grapharg" in node.meta for node in inputs)


def copied(graph: fx.Graph) -> fx.Graph:
    """Copy `graph`, node for node and name for name."""
    fresh = copy.deepcopy(graph)
    keep_names(graph, fresh)
    return fresh


def keep_names(graph: fx.Graph, fresh: fx.Graph) -> None:
    """Rename the nodes of `fresh`, a copy of `graph`, to those of `graph`: fx renames nodes named like a builtin.

    torch.export names inputs like the arguments of a model, `input` for one.
    """
    for node, other in zip(graph.nodes, fresh.nodes, strict=True):
        _give(other, node.name)


def refill(graph: fx.Graph, original: fx.Graph) -> None:
    """Replace the nodes of `graph` by those of `original`, an earlier copy of it, name for name.

    Private: `torch.fx.Graph._graph_namespace`, which would not give out the same names again.
    """
    for node in graph.nodes:  # so that nodes can be erased in any order
        node.args, node.kwargs = (), {}
    for node in list(graph.nodes):
        graph.erase_node(node)
    graph._graph_namespace = type(graph._graph_namespace)()
    copies: dict[fx.Node, fx.Node] = {}
    for node in original.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    keep_names(original, graph)


def rename(node: fx.Node, name: str) -> None:
    """Rename `node`; another node of the graph with that name gets a new one.

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
    """Return the error that a backend raised, without the exception that Dynamo wraps around it.

    Private: `torch._dynamo.exc.BackendCompilerFailed.inner_exception`.
    """
    return getattr(error, "inner_exception", error)
