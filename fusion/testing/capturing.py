"""Functions captured as the graphs that a backend would see, and the same graphs in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.operators import OpOverload, core_table, schema_of
from fusion._torch.tensors import tree_map_only
from fusion._torch.tracing import Boxed, aot_inference, boxed, preserve_composites
from fusion.facts import Facts
from fusion.known import Known
from fusion.language import Example

Level = Literal["composite", "decomposed", "core"]
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True)
class Captured:
    """A functional aten graph and the tensors (and sizes) that it takes, parameters included.

    `assumed` names inputs of the graph of which a user says what they are, as `Facts.assumed`; `known` is what Dynamo's
    graph tells of it.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    known: Known
    assumed: Mapping[str, str] = immutable_dict()

    @property
    def facts(self) -> Facts:
        """What is known of the inputs, and how the results lie when the function runs without a compiler."""
        return self.known.completed(Facts(assumed=self.assumed), self.graph.graph)


class _Stop(Exception):  # noqa: N818 - carries the result out of a compiled function
    def __init__(self, captured: Captured) -> None:
        self.captured = captured


def capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    level: Level = "composite",
    *,
    dynamic: bool | None = False,
    **kwargs: Any,
) -> Captured:
    """Trace the call `function(*args, **kwargs)` for inference; nothing is run and no input is written to.

    `level` says how far operators are decomposed: "composite" as the backend captures, "decomposed" as torch does it
    without a table, "core" to the core aten operators. Resets Dynamo, so that captures do not depend on each other.

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
    """
    table = core_table() if level == "core" else {}

    def compile_graph(known: Known, gm: fx.GraphModule, _: Sequence[Any]) -> Boxed:
        def stop(*inputs: Any) -> Any:
            raise _Stop(Captured(gm, inputs, known))

        return boxed(stop)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with preserve_composites() if level == "composite" else nullcontext():
            return aot_inference(gm, example_inputs, partial(compile_graph, Known.of(gm, example_inputs)), table)

    torch.compiler.reset()
    try:
        with torch.no_grad():
            torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    except _Stop as stop:
        return stop.captured
    raise AssertionError(f"capturing {function}: it computes nothing on tensors")


@lru_cache(maxsize=512)
def captured(example: Example, dtype: torch.dtype, level: Level = "composite") -> Captured:
    """What `capture` gives for an example, once: whoever changes a graph changes a copy.

    Sizes that the inputs mark as dynamic for Dynamo are symbolic.
    """
    return capture(example.function, example.inputs(dtype), level, dynamic=None)


def widen(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of `gm` in which every floating dtype is float64 and every complex one complex128, for such inputs.

    A default epsilon stays that of the narrow dtype, and bytes stay those of narrow numbers. Fused operators run by
    their fallbacks, which compute float64 in float64.
    """
    wide = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in wide.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(wide, node.target, None), Tensor):
            setattr(wide, node.target, widened(getattr(wide, node.target)))
        if node.target is torch.ops.aten.view.dtype:
            source = node.all_input_nodes[0].meta["val"].dtype
            node.target, node.args = _as_bits, (*node.args, source)
        elif _multiplies_groups(node):
            node.target = _by_groups
        elif node.op == "call_function":
            node.args, node.kwargs = tree_map_only(torch.dtype, _wide, (_pinned(node), dict(node.kwargs)))
            _make_wide(node)
    wide.recompile()
    return wide


def widened(value: Any) -> Any:
    """`value` with its floating-point tensors in float64; every tensor is copied."""
    return tree_map_only(Tensor, lambda each: each.detach().to(_wide(each.dtype), copy=True), value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _as_bits(x: Tensor, dtype: torch.dtype, source: torch.dtype) -> Tensor:
    """The memory that `x` has in its narrow dtype `source`, read as another."""
    return widened(x.to(source).view(dtype))


def _multiplies_groups(node: fx.Node) -> bool:
    """Whether rows are multiplied by a matrix for each group, which torch does in float32 at most."""
    grouped = node.target is torch.ops.aten._grouped_mm.default
    return grouped and tuple(each.meta["val"].dim() for each in node.all_input_nodes[:2]) == (2, 3)


def _by_groups(x: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """The same; rows of no group are 0."""
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for start, end, matrix in zip((0, *offs.tolist()), offs.tolist(), matrices, strict=False):
        y[start:end] = x[start:end] @ matrix
    return y


def _pinned(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, with what would follow the dtype made explicit."""
    name = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
    if name in ("aten::rms_norm", "aten::_fused_rms_norm"):
        given: tuple[Any, ...] = (*node.args, None, None)
        x, shape, weight, eps = given[:4]
        narrow = torch.finfo(torch.promote_types(x.meta["val"].dtype, torch.float32)).eps
        return x, shape, weight, narrow if eps is None else eps
    if name in ("aten::_softmax", "aten::_log_softmax"):
        return (*node.args[:2], False)
    return node.args


def _make_wide(node: fx.Node) -> None:
    """Give a factory that relies on the default dtype the wide one."""
    val = node.meta.get("val")
    if isinstance(node.target, OpOverload) and isinstance(val, Tensor) and not node.all_input_nodes:
        names = [argument.name for argument in schema_of(node.target).arguments]
        if "dtype" in names[len(node.args) :] and _wide(val.dtype) != val.dtype:
            node.kwargs = {**node.kwargs, "dtype": _wide(val.dtype)}
