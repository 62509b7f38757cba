"""Every private API of torch that lowering needs, one function each; all of them checked against torch 2.13.0."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import os
import sysconfig
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten

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


def preserve_composites() -> AbstractContextManager[None]:
    """Tracing inside this context records the `COMPOSITES` whole instead of decomposing them.

    For AOT autograd and `run_decompositions` only: a bare make_fx in it recurses without end. Leave the context before
    anything else is traced, a vendor's second AOT included: it would preserve the composites as well.
    Private: `torch.export.exported_program._override_composite_implicit_decomp`, which `run_decompositions` uses.
    """
    from torch._export.utils import _special_op_to_preserve_cia
    from torch.export.exported_program import _override_composite_implicit_decomp

    return _override_composite_implicit_decomp(dict.fromkeys(COMPOSITES, _special_op_to_preserve_cia))


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """The fake mode in which `gm` was captured: that of the values that its placeholders carry.

    Private: `torch._guards.detect_fake_mode`.
    """
    from torch._guards import detect_fake_mode

    return detect_fake_mode([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])


@contextmanager
def tracing_apart(mode: FakeTensorMode | None) -> Generator[None, None, None]:
    """A tracing context of its own under `mode`, so that a nested compilation leaves the outer one's records alone.

    Private: `torch._guards.TracingContext`, used the same way by `torch._inductor.standalone_compile`.
    """
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(mode)):
        yield


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


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`gm` compiled for inference by Inductor with its own decompositions; the result takes its inputs one by one.

    Handing decompositions to `compile_fx` would turn off Inductor's cache of compiled graphs: they cannot be pickled
    into its key. `compile_fx` owns and changes what it is given, hence the copy.
    Private: `torch._inductor.compile_fx.compile_fx`.
    """
    from torch._inductor.compile_fx import compile_fx

    owned = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    with torch.no_grad():
        run: Any = compile_fx(owned, list(example_inputs))
    return run


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


def fake_mode_in(values: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among `values`."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
