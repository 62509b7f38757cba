"""Linters of casts: around one operator, and around a chain of elementwise operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.fx as fx

from fusion._torch.operators import arguments_of, short_name
from fusion.graph.origin import source_text
from fusion.operators import operator_of
from fusion.records import Refusal
from fusion.report.lint.finding import Finding, at
from fusion.report.lint.kernels import (
    NARROW,
    calls_before,
    dtype_of,
    elements_of,
    inputs_of,
    is_cast,
    is_float,
    is_of_model,
    kernels,
    plain,
    readers_of,
    widened,
)

_ACCUMULATING = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "einsum", "softmax", "_softmax", "log_softmax",
        "_log_softmax", "native_layer_norm", "layer_norm", "rms_norm", "sigmoid", "silu", "gelu", "tanh", "relu",
    }
)  # fmt: skip
"""Operators of aten whose 16-bit kernels compute in float32 and round the result once."""
_ROUNDED = ", computes in float32 and rounds once"
_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "pow", "square", "abs", "sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p",
        "sigmoid", "silu", "gelu", "tanh", "relu", "softplus", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
        "where", "cat",
    }
)  # fmt: skip
_SHORTEST = 2
"""Number of elementwise calls from which on they are a chain."""


def casts_around(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find operators whose operands are cast to float32 and whose results are cast back, and that take 16 bits."""
    for node in kernels(source):
        dtype = _narrow_around(node)
        if dtype is None or not _takes(node, dtype):
            continue
        saves = sum(len(readers_of(each)) == 1 for each in inputs_of(node) if widened(each)) + len(readers_of(node))
        name = short_name(node.target)
        yield at(
            node,
            "casts_around",
            f"{name}: its operands are {plain(dtype)}, it runs in float32, and its result is cast back",
            f"leave the casts out; {name} takes {plain(dtype)}{_ROUNDED if is_of_model(node) else ''}",
            saves,
        )


def _narrow_around(node: fx.Node) -> torch.dtype | None:
    """Return the 16-bit dtype that all operands of `node` are cast from, and all results cast back to; or None."""
    operands = [each for each in inputs_of(node) if is_float(each)]
    dtypes = {widened(each) or dtype_of(each) for each in operands}
    dtype = next(iter(dtypes), None)
    if len(dtypes) != 1 or dtype not in NARROW or dtype_of(node) != torch.float32:
        return None
    readers = readers_of(node)
    return dtype if readers and all(is_cast(each, torch.float32, dtype) for each in readers) else None


def _takes(node: fx.Node, dtype: torch.dtype) -> bool:
    """Return True if the operator of `node` accepts `dtype` for every operand that is float32 in this call."""
    operator = operator_of(node.target)
    if operator is None:
        return is_of_model(node) and short_name(node.target) in _ACCUMULATING
    given = arguments_of(cast(Any, node.target), node.args, node.kwargs)
    wide = [name for name, each in given.items() if isinstance(each, fx.Node) and dtype_of(each) == torch.float32]
    return bool(wide) and not operator.rounds and all(dtype in operator.dtypes.get(name, ()) for name in wide)


def float32_islands(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find chains of elementwise calls in float32 between tensors of 16 bits."""
    for chain in _chains(source):
        entries = {each for node in chain for each in inputs_of(node) if each not in chain and is_float(each)}
        exits = {each for node in chain for each in readers_of(node) if each not in chain}
        dtypes = {dtype for each in entries if (dtype := widened(each))}
        dtype = next(iter(dtypes), None)
        if dtype is None or len(dtypes) > 1 or not all(is_cast(each, torch.float32, dtype) for each in exits):
            continue
        narrow = {each for each in entries if dtype in (widened(each), dtype_of(each))}
        if not all(_is_apart(each, chain, narrow) for each in entries - narrow):
            continue
        saves = sum(set(chain).issuperset(readers_of(each)) for each in entries if widened(each)) + len(exits)
        steps = ", ".join(dict.fromkeys(short_name(node.target) for node in chain))
        line = source_text(chain[0])
        yield at(
            chain[0],
            "float32_islands",
            f"{steps}: {len(chain)} calls run in float32 between tensors in {plain(dtype)}",
            f"leave the casts out of `{line}` where rounding to {plain(dtype)} at each step is precise enough",
            saves,
        )


def _chains(source: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the connected elementwise calls of the model in float32, in the order of the graph."""
    chain_of: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in kernels(source):
        if not _is_elementwise(node):
            continue
        chain: dict[fx.Node, None] = {}
        for each in inputs_of(node):
            chain.update(chain_of.get(each, {}))
        chain[node] = None
        chain_of.update(dict.fromkeys(chain, chain))
    for chain in {id(each): each for each in chain_of.values()}.values():
        if len(chain) >= _SHORTEST:
            yield list(chain)


def _is_elementwise(node: fx.Node) -> bool:
    return dtype_of(node) == torch.float32 and short_name(node.target) in _ELEMENTWISE and is_of_model(node)


def _is_apart(tensor: fx.Node, chain: Iterable[fx.Node], narrow: Iterable[fx.Node]) -> bool:
    """Return True if `tensor` is broadcast to the results of `chain` and is not computed from one of `narrow`."""
    if elements_of(tensor) >= max(map(elements_of, chain)):
        return False
    return calls_before(tensor).isdisjoint(narrow)
