"""Expansion of composite operators into their parts, for compilers that support only the parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from fusion._torch.fakes import FakeTensorMode, fake_mode_of
from fusion._torch.operators import OpOverload
from fusion._torch.tracing import trace
from fusion.errors import FusionError
from fusion.operators.attention.softmax import shared_matmul
from fusion.operators.dtype_sets import compute_dtype

aten = torch.ops.aten

Table = Mapping[OpOverload, Callable[..., Any]]


def expand(gm: fx.GraphModule, table: Table) -> fx.GraphModule:
    """Return `gm` with every composite operator, and every operator in `table`, decomposed.

    A function in `table` takes the operator's arguments and computes its result with torch; it may return
    `NotImplemented` to leave a call unchanged. Symbolic sizes, the `copy_` epilogue, mutating operators, the names of
    the placeholders and the nodes' `stack_trace` and `nn_module_stack` are kept. `gm` is not changed.

    Raises:
        FusionError: a placeholder has no `meta["val"]` to trace with.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [_value(node) for node in placeholders]
    mode = fake_mode_of(gm) or FakeTensorMode()
    constants = _constants(gm)
    fakes = [mode.from_tensor(value, static_shapes=True) for value in constants.values()]

    def run(*inputs: Any) -> Any:
        lifted = dict(zip(constants, inputs[len(values) :], strict=True))
        return _Expander(gm, table, lifted).run(*inputs[: len(values)])

    traced = trace(run, [*values, *fakes], mode, table)
    return _renamed(gm, traced, list(constants))


class _Expander(fx.Interpreter):
    """Interpreter that runs a decomposition in place of each operator that has one."""

    def __init__(self, gm: fx.GraphModule, table: Table, lifted: Mapping[str, Tensor]) -> None:
        super().__init__(gm)
        self._table = {**_FORMS, **table}
        self._lifted = lifted

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in self._table:
            result = self._table[target](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._lifted[target] if target in self._lifted else super().get_attr(target, args, kwargs)


def _value(node: fx.Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    raise FusionError(
        f"Replacing operators by their parts, with input {node.name!r} of the graph: it has no meta['val'] to trace. "
        "Hand over a graph that was captured under fake tensors, as torch.compile and torch.export capture it."
    )


def _constants(gm: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that the graph reads by `get_attr`, by name; traced as inputs, they stay references."""
    names = dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    attributes = {name: attrgetter(name)(gm) for name in names}
    return {name: value for name, value in attributes.items() if isinstance(value, Tensor)}


def _renamed(gm: fx.GraphModule, traced: fx.GraphModule, constants: list[str]) -> fx.GraphModule:
    """Return `traced` with the placeholders of `gm`, and with its last placeholders turned back into `constants`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = traced.graph.find_nodes(op="placeholder")
    for node, old in zip(inputs, placeholders, strict=False):
        copies[node] = graph.create_node("placeholder", old.target, old.args, old.kwargs, old.name, old.type)
        copies[node].meta = {**old.meta}
    for node, name in zip(inputs[len(placeholders) :], constants, strict=True):
        copies[node] = graph.create_node("get_attr", name)
        copies[node].meta = {**node.meta}
    for node in traced.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output_node().meta.update(gm.graph.output_node().meta)
    _adopt(traced, gm, constants)
    renamed = fx.GraphModule(traced, graph)
    renamed.meta.update(gm.meta)
    graph.lint()
    return renamed


def _adopt(traced: fx.GraphModule, gm: fx.GraphModule, constants: list[str]) -> None:
    for name in constants:
        path, _, leaf = name.rpartition(".")
        if path not in dict(traced.named_modules()):
            traced.add_submodule(path, torch.nn.Module())
        setattr(traced.get_submodule(path), leaf, attrgetter(name)(gm))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute softmax(scale · q kᵀ + mask) v, with the softmax in float32; fully masked rows are 0.

    query [*, N, S, D], key [*, Nkv, T, D], value [*, Nkv, T, Dv] → [*, N, S, Dv]. With `enable_gqa`, N is a multiple of
    Nkv and the heads of one group share a matmul, so that keys and values are not repeated. `NotImplemented` for
    dropout.
    """
    if dropout_p != 0.0:
        return NotImplemented
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    multiply = shared_matmul if enable_gqa else torch.matmul
    scores = multiply(query * scale, key.transpose(-2, -1)).to(compute_dtype(query))
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    return multiply(_masked_softmax(scores, attn_mask).to(query.dtype), value)


def _masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores.softmax(-1)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf).softmax(-1).masked_fill(~mask, 0.0)
    scores = scores + mask
    sees_something = (scores != -math.inf).any(-1, keepdim=True)  # NaN must propagate
    return scores.softmax(-1).masked_fill(~sees_something, 0.0)


def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dims, in float32, rounded once to the dtype of `x`."""
    wide = x.to(compute_dtype(x))
    dims = list(range(-len(normalized_shape), 0))
    floor = torch.finfo(wide.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + floor)
    return (normed if weight is None else normed * weight).to(x.dtype)


_FORMS: dict[OpOverload, Callable[..., Any]] = {
    # torch decomposes it by device, on a CPU to a flash operator that no NPU has.
    aten.scaled_dot_product_attention.default: attention,
    # torch decomposes it to _fused_rms_norm, which torchair cannot convert.
    aten.rms_norm.default: rms_norm,
    # A view that is legal for the strides of a fused result may not be for those of its decomposition.
    aten.view.default: aten.reshape.default,
}
