"""Graphs and tensors in float64: without rounding, only the algebra of two graphs is left to compare.

widen(graph)       the same graph for inputs in float64
widened(x)         the same numbers in float64
run_wide(graph)    the results of the widened graph for narrow inputs, each converted when a node reads it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.nested import tree_map_only
from fusion._torch.operators import OpOverload, arguments_of, is_random, schema_of
from fusion.graph.subgraphs import with_bodies
from fusion.operators.encodings import STORED


def widen(gm: fx.GraphModule, device: torch.device | None = None) -> fx.GraphModule:
    """Copy `gm`, and the bodies that its calls run, with float64 for every floating dtype and complex128 for complex.

    A default epsilon stays that of the narrow dtype, views as bytes stay bytes of narrow numbers, and random numbers
    are drawn in the narrow dtype. Fused operators run by their decompositions, which compute float64 in float64. With
    `device`, the tensors that the graph creates are created there.
    """
    wide = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    for node in wide.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(wide, node.target, None), Tensor):
            setattr(wide, node.target, widened(getattr(wide, node.target), device))
        if node.op == "call_function":
            _widen_call(node)
        if device is not None:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: device, (node.args, dict(node.kwargs)))
    with_bodies(wide, partial(widen, device=device))
    wide.recompile()
    return wide


def widened(value: Any, device: torch.device | None = None) -> Any:
    """Copy `value` with its floating-point tensors in float64, and all tensors on `device` where one is given."""

    def convert(x: Tensor) -> Tensor:
        return x.detach().to(device=device or x.device, dtype=_wide(x.dtype), copy=True)

    return tree_map_only(Tensor, convert, value)


def run_wide(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    device: torch.device | None = None,
    at: Callable[[fx.Node], None] | None = None,
) -> Any:
    """Run the widened form of `gm` on narrow `inputs` and return its results.

    Each narrow tensor is converted when a node reads it, so that one widened weight at a time is alive. Inputs that the
    graph writes to must be widened already. `at` is called with each node before the node runs.
    """
    return _WideRun(widen(gm, device), device, at).run(*inputs)


class _WideRun(fx.Interpreter):
    def __init__(self, wide: fx.GraphModule, device: torch.device | None, at: Callable[[fx.Node], None] | None) -> None:
        super().__init__(wide)
        self._device, self._at = device, at

    def run_node(self, n: fx.Node) -> Any:
        if self._at is not None:
            self._at(n)
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map_only(Tensor, self._converted, super().fetch_args_kwargs_from_env(n))

    def _converted(self, x: Tensor) -> Tensor:
        there = self._device is None or x.device == self._device
        return x if there and x.dtype == _wide(x.dtype) else widened(x, self._device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype in STORED:  # a float of 8 bits is how a number is stored, as an int8 is
        return dtype
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _widen_call(node: fx.Node) -> None:
    """Make `node` compute in float64, in place."""
    target: Any = node.target
    if node.target is torch.ops.aten.view.dtype:
        source = node.all_input_nodes[0].meta["val"].dtype
        node.target, node.args = _as_bits, (*node.args, source)
    elif _multiplies_groups(node):
        node.target = _by_groups
    elif _draws(node.target, node.args, node.kwargs):
        read = [each.meta.get("val") for each in (*node.all_input_nodes, node)]
        narrow = next((each.dtype for each in read if isinstance(each, Tensor) and each.is_floating_point()), None)
        node.target, node.args = _drawn, (target, narrow, *node.args)
    else:
        node.args, node.kwargs = tree_map_only(torch.dtype, _wide, (_pinned(node), dict(node.kwargs)))
        _make_wide(node)


def _as_bits(x: Tensor, dtype: torch.dtype, source: torch.dtype) -> Tensor:
    """View the memory that `x` has in its narrow dtype `source` as `dtype`."""
    return widened(x.to(source).view(dtype))


def _draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call draws random numbers: attention without dropout does not, though its operator may."""
    if not is_random(target):
        return False
    return arguments_of(target, args, kwargs).get("dropout_p", 1.0) != 0


def _drawn(target: OpOverload, narrow: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """Call the random operator `target` on floats in the dtype `narrow`: other dtypes draw other numbers."""

    def narrowed(x: Tensor) -> Tensor:
        return x.to(narrow) if x.is_floating_point() and narrow is not None else x

    args, kwargs = tree_map_only(Tensor, narrowed, (args, kwargs))
    return widened(target(*args, **kwargs))


def _multiplies_groups(node: fx.Node) -> bool:
    """Return True if `node` multiplies rows by a matrix for each group, which torch computes in float32 at most."""
    grouped = node.target is torch.ops.aten._grouped_mm.default
    return grouped and tuple(each.meta["val"].dim() for each in node.all_input_nodes[:2]) == (2, 3)


def _by_groups(x: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: Any = None) -> Tensor:
    """Multiply rows `x` [T, K] that end at `offs` [G] by `matrices` [G, K, N]; rows of no group are 0."""
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for start, end, matrix in zip((0, *offs.tolist()), offs.tolist(), matrices, strict=False):
        y[start:end] = x[start:end] @ matrix
    return y


def _pinned(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments, with defaults that would follow the dtype made explicit."""
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
    """Pass the wide dtype to a factory that relies on the default one."""
    val = node.meta.get("val")
    if isinstance(node.target, OpOverload) and isinstance(val, Tensor) and not node.all_input_nodes:
        names = [argument.name for argument in schema_of(node.target).arguments]
        if "dtype" in names[len(node.args) :] and _wide(val.dtype) != val.dtype:
            node.kwargs = {**node.kwargs, "dtype": _wide(val.dtype)}
