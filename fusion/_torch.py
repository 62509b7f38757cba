"""The private APIs of torch that the project needs, but for Inductor's; all of them checked against torch 2.13.0."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    has_meta,  # pyright: ignore[reportPrivateImportUsage]
    in_kernel_invocation_manager,
    op_implementations_checks,  # pyright: ignore[reportPrivateImportUsage]
    torch_decomp_decompositions,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

__all__ = [  # types and functions of torch that are used as they are
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

aten = torch.ops.aten
Mode = TypeVar("Mode", bound=FakeTensorMode)

COMPOSITES: tuple[OpOverload, ...] = (
    aten.linear.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
    aten.softmax.int,
    aten.einsum.default,
    aten.rms_norm.default,
    aten.layer_norm.default,
    aten.repeat_interleave.self_int,
)
"""Composite operators that stay whole while a model is captured, because rules are written with them."""

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


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """The fake mode in which `gm` was captured: that of the values that its placeholders carry.

    Private: `torch._guards.detect_fake_mode`.
    """
    return detect_fake_mode([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])


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


def higher_order(target: Any) -> str:
    """The name of an operator that calls graphs, such as "cond"; "" for any other call.

    Private: `torch._ops.HigherOrderOperator`.
    """
    return target.name() if isinstance(target, HigherOrderOperator) else ""


def in_fake_mode(op: Any, mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that calls graphs gives in a fake mode, a mode of a derived type too.

    torch looks up by the type of the mode what it does not find among the functions for all fake modes.
    Private: `torch._higher_order_ops.utils.registered_hop_fake_fns`, `HigherOrderOperator.python_key_table`.
    """
    from torch._higher_order_ops.utils import registered_hop_fake_fns

    if op in registered_hop_fake_fns:
        return FakeTensorMode.__torch_dispatch__(mode, op, [], args, kwargs)
    return op.python_key_table[FakeTensorMode](mode, *args, **kwargs)


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Name, arguments and writes of an operator. Private: `OpOverload._schema`."""
    return op._schema


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

    Private: `torch.fx.experimental.proxy_tensor.make_fx` with `torch.fx.traceback.preserve_node_meta`.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with mode, preserve_node_meta(), torch.no_grad():
        return make_fx(run, decomposition_table=dict(decompositions), tracing_mode="real")(*values)


def fresh_fake_mode(kind: type[Mode] = FakeTensorMode) -> Mode:
    """A fake mode of its own, in which real tensors that a function closes over may appear."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return kind(allow_non_fake_inputs=True, shape_env=ShapeEnv())


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

    compiler: Any = compile_graph
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


def fake_like(fake: Any) -> torch.Tensor:
    """A fresh fake tensor with the shape, strides, dtype and device of `fake`."""
    if not isinstance(fake, FakeTensor):
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return fake_tensor(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, fake.device)


def fake_tensor(
    mode: FakeTensorMode, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fresh fake tensor.

    Built directly: running `empty_strided` under the fake mode costs twenty times as much.
    Private: `torch._subclasses.fake_tensor.FakeTensor`.
    """
    with unset_fake_temporarily():
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


class FakesMode(TorchDispatchMode):
    """A mode that sees what runs on fake tensors while a graph is compiled: Dynamo need not be kept from it.

    Private: `TorchDispatchMode._should_skip_dynamo`, whose wrapper costs as much as a call.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_view_tracking() -> AbstractContextManager[None]:
    """Views do not remember what they are of, so that one tensor may be the result of several calls.

    Private: `torch._C._ExcludeDispatchKeyGuard`.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))


def run_on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives on fake tensors.

    A layer norm whose weights are wider than x gives its statistics in their dtype; its Meta kernel says that of x.
    """
    result = _on_fakes(func, args, kwargs)
    if func is not aten.native_layer_norm.default:
        return result
    dtype = next((each.dtype for each in args[2:4] if each is not None), args[0].dtype)
    return (result[0], *(each.to(dtype) for each in result[1:])) if dtype != args[0].dtype else result


def _on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The same: an operator by its Meta kernel, if that is all that fake mode would run.

    Fake mode itself takes five times as long, the look into its cache included.
    Private: `torch._subclasses.fake_tensor`, `FakeTensor._find_common_device`.
    """
    if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    if not _is_meta_enough(func) or kwargs.get("device") is not None:
        return func(*args, **kwargs)
    given = leaves(args, kwargs)
    mode = next((each.fake_mode for each in given if isinstance(each, FakeTensor)), None)
    if mode is None or not all(map(_is_known, given)):
        return func(*args, **kwargs)
    try:
        with unset_fake_temporarily():
            device = _common_device(func, given)
            with in_kernel_invocation_manager(mode), torch._C._DisablePythonDispatcher():
                result = func(*args, **kwargs)
            return map_only(torch.Tensor, lambda each: FakeTensor(mode, each, device), result)
    except Exception:  # fake mode says why
        return func(*args, **kwargs)


def _common_device(func: Any, given: Sequence[Any]) -> torch.device:
    devices = {each.fake_device for each in given if isinstance(each, FakeTensor)}
    return devices.pop() if len(devices) == 1 else FakeTensor._find_common_device(func, given)[0]


def leaves(*arguments: Any) -> list[Any]:
    """What stands in arguments or results of calls, in lists, tuples and mappings: quicker than torch's trees."""
    found: list[Any] = []
    for each in arguments:
        if isinstance(each, (list, tuple)):
            found.extend(leaves(*each))
        elif isinstance(each, dict):
            found.extend(leaves(*each.values()))
        else:
            found.append(each)
    return found


def map_only(kinds: type | tuple[type, ...], change: Callable[[Any], Any], argument: Any) -> Any:
    """Arguments or results of calls with those of their `leaves` changed that are of some kinds."""
    if isinstance(argument, tuple):
        return tuple([map_only(kinds, change, each) for each in argument])
    if isinstance(argument, list):
        return [map_only(kinds, change, each) for each in argument]
    if isinstance(argument, dict):
        return {name: map_only(kinds, change, each) for name, each in argument.items()}
    return change(argument) if isinstance(argument, kinds) else argument


_SPECIAL_FOR_SYMBOLS = (aten.view.default, aten._unsafe_view.default, aten.select.int, aten.slice.Tensor)
"""Views whose Meta kernels do not know symbolic sizes: for them alone fake mode has its own ways."""


@cache
def _is_meta_enough(func: Callable[..., Any]) -> bool:
    """Whether fake mode runs the Meta kernel of an operator and nothing else, where all sizes are known."""
    from torch._decomp import decomposition_table, meta_table

    if not isinstance(func, OpOverload) or func.namespace in ("prim", "prims"):
        return False
    if func._schema.is_mutable or not has_meta(func):
        return False
    if func in _SPECIAL_FOR_SYMBOLS:
        return True
    if any(check(func) for check, _ in op_implementations_checks):
        return False
    by_meta = func in meta_table or func in FakeTensorMode._cpp_meta_supports_symint or torch.Tag.view_copy in func.tags
    decomposed = func in decomposition_table and torch_decomp_decompositions(func)
    return by_meta or not (decomposed or func._can_decompose())


def _is_known(argument: Any) -> bool:
    """Whether an argument is no tensor but a fake one, and has no symbolic size."""
    if isinstance(argument, torch.Tensor):
        return isinstance(argument, FakeTensor) and not argument._has_symbolic_sizes_strides
    return not isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool))


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, are views of one storage.

    Private: `torch.UntypedStorage._cdata`.
    """
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


_MOST_NUMBERS = 256
_NUMBERS = frozenset({torch.int32, torch.int64, torch.float32})


def constant_numbers(node: fx.Node) -> tuple[float, ...] | None:
    """The numbers of a small tensor that the code itself writes down; else None.

    A graph holds it as an attribute and copies it wherever it is read; Parameters and buffers, which others may change,
    are read as they are.
    Private: `torch._subclasses.fake_tensor.FakeTensor.constant`, which keeps the numbers of a constant under fakes.
    """
    if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
        return None
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    if isinstance(found, FakeTensor):
        found = found.constant
    if not isinstance(found, torch.Tensor) or found.is_complex():
        return None
    if found.numel() > (_MOST_NUMBERS if found.dtype in _NUMBERS else 1):
        return None
    with unset_fake_temporarily():
        return tuple(found.detach().reshape(-1).tolist())


def has_kernel(operator: str, device: str) -> bool:
    """Whether an operator (`npu::npu_rms_norm`) has a kernel of its own for a dispatch key such as "CPU".

    Private: `torch._C._dispatch_has_kernel_for_dispatch_key`.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, device)


def stamps(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Addresses and versions: one of them changes when a tensor is written to, except through `.data`.

    Tensors made under `torch.inference_mode` count no versions. Private: `Tensor._version`.
    """
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    if any(map(torch.Tensor.is_inference, tensors)):
        return addresses, [-1 if each.is_inference() else each._version for each in tensors]
    return addresses, [each._version for each in tensors]


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its memory to itself, all of it. Private: `torch._C._storage_Use_Count`."""
    storage = tensor.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)  # the tensor, and `storage`
    return users <= 2 and storage.nbytes() == tensor.numel() * tensor.element_size()


def memory_order(x: torch.Tensor) -> list[int]:
    """Dims of `x` from the outermost in memory to the innermost, as elementwise results keep them.

    Private: `torch._prims_common.compute_elementwise_output_logical_to_physical_perm`.
    """
    return list(compute_elementwise_output_logical_to_physical_perm(x)[0])


def unwrapped(error: Exception) -> Exception:
    """What a backend raised, out of the exception that Dynamo wraps around it.

    Private: `torch._dynamo.exc.BackendCompilerFailed.inner_exception`.
    """
    return getattr(error, "inner_exception", error)


@cache
def core_table() -> dict[OpOverload, Callable[..., Any]]:
    """The decompositions to core aten, not to be changed. Private: `torch._decomp.core_aten_decompositions`."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())  # pyright: ignore[reportReturnType]


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on symbolic sizes holds for all of them.

    Private: `torch.fx.experimental.symbolic_shapes.statically_known_true`.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def hint(size: Any) -> int:
    """A size, of the example where it is symbolic."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    known: Any = size.node.hint
    return int(known) if known is not None else 1


def count(x: torch.Tensor) -> int:
    """How many elements a tensor has, for the sizes of the example where they are symbolic."""
    return math.prod(hint(size) for size in x.shape)
