"""Hints to GE in a fused graph: prefetches of weights, and super-kernel scopes around decode layers.

Hints change no number. They are inserted behind all rewrites, so that no match is split by them.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tensors import byte_count
from fusion.graph.aliasing import memory_of
from fusion.graph.execution_scopes import STREAM, enters_scope, is_scope_boundary
from fusion.graph.launches import is_launch
from fusion.graph.origin import module_path
from fusion.options import HINTS
from fusion.planning.cost import has_flops, price
from fusion.planning.target import Target
from fusion.report.folding import layers_of

PREFETCH, SUPER_KERNEL = HINTS
_LEAST = 2**20  # bytes: less is read faster than a prefetch is launched
_SHARE = 0.5  # of the bytes that memory moves in the time of the calls beside a prefetch; they move bytes too


def hinted(gm: fx.GraphModule, hints: Collection[str], weights: Collection[str], machine: Target) -> fx.GraphModule:
    """Return a copy of `gm` with `hints`, of `HINTS`; `weights` are the inputs that hold weights."""
    made = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta.update(gm.meta)
    calls = list(awaited_launches(made.graph, weights, machine))
    if PREFETCH in hints:
        insert_prefetches(calls, machine)
    if SUPER_KERNEL in hints:
        importlib.import_module("torchair.scope")  # registers the operators of scopes
        for number, layers in enumerate(matched_runs(calls)):
            _enclose(layers, f"layers{number}")
    made.recompile()
    return made


@dataclass(frozen=True)
class _Launch:
    """A launch, or the boundary of a scope.

    Attributes:
        node: its node.
        us: predicted microseconds.
        weight: the weight that takes most of its time to read; None where the call does not wait for a weight.
        is_matched: True if the pass has made it, or if it is a product with weights that it waits for.
    """

    node: fx.Node
    us: float = 0.0
    weight: fx.Node | None = None
    is_matched: bool = False

    @property
    def is_boundary(self) -> bool:
        return is_scope_boundary(self.node) or STREAM in self.node.meta


def awaited_launches(source: fx.Graph, weights: Collection[str], machine: Target) -> Iterator[_Launch]:
    """Yield each launch of `source`, and each call that begins or ends a scope, with the weight that it waits for.

    `weights` are the names of inputs that hold weights; `machine` predicts the times.
    """
    for node in source.nodes:
        if is_scope_boundary(node):
            yield _Launch(node)
        elif is_launch(node):
            us = price(node, machine).us
            weight = _awaited(node, weights, us, machine)
            product = has_flops(node.target) and weight is not None
            yield _Launch(node, us, weight, "fusion" in node.meta or product)


def _awaited(node: fx.Node, weights: Collection[str], us: float, machine: Target) -> fx.Node | None:
    """Return the largest weight that `node` reads, if reading it takes most of its time; else None."""
    read = [memory_of(each) for each in node.all_input_nodes]
    stored = [each for each in read if each.op == "placeholder" and each.name in weights]
    largest = max(stored, key=lambda each: byte_count(each.meta["val"]), default=None)
    is_bound = largest is not None and byte_count(largest.meta["val"]) / machine.bandwidth > (us - machine.launch) / 2
    return largest if is_bound else None


# prefetches ----------------------------------------------------------------------------------------------------------


def insert_prefetches(calls: Sequence[_Launch], machine: Target) -> None:
    """Insert, for each weight that a call waits for, a prefetch beside the calls before that wait for none."""
    for position, call in enumerate(calls):
        start = position
        while start and calls[start - 1].weight is None and not calls[start - 1].is_boundary:
            start -= 1
        if call.weight is None or call.is_boundary or start in (0, position) or calls[start - 1].is_boundary:
            continue
        window = sum(each.us for each in calls[start:position])
        size = min(byte_count(call.weight.meta["val"]), int(window * machine.bandwidth * _SHARE))
        behind = _tensor_of(calls[start - 1].node)
        if size >= _LEAST and behind is not None:
            with behind.graph.inserting_after(behind):
                hint = behind.graph.call_function(torch.ops.npu.npu_prefetch.default, (call.weight, behind, size))
            hint.meta["val"] = None


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """Return the first tensor that `node` gives: itself, or an item of its results; None where nobody reads one."""
    items = [node, *node.users]
    return next((each for each in items if isinstance(each.meta.get("val"), torch.Tensor)), None)


# super kernels -------------------------------------------------------------------------------------------------------


def matched_runs(calls: Sequence[_Launch]) -> Iterator[list[_Launch]]:
    """Yield the calls of each run of adjacent layers whose calls are all matched, without scopes in or between them."""
    layer_of = layers_of(module_path(each.node) for each in calls)
    owners = [layer_of.get(module_path(each.node)) for each in calls]
    partial = {owner for each, owner in zip(calls, owners, strict=True) if not each.is_matched or each.is_boundary}
    depth, run = 0, list[_Launch]()
    for call, owner in zip(calls, owners, strict=True):
        depth += _step(call.node)
        if owner is None or owner in partial or depth or call.is_boundary:
            yield from [run] * bool(run)
            run = []
        else:
            run.append(call)
    yield from [run] * bool(run)


def _step(node: fx.Node) -> int:
    if not is_scope_boundary(node):
        return 0
    return 1 if enters_scope(node) else -1


def _enclose(calls: Sequence[_Launch], name: str) -> None:
    """Put a super-kernel scope around `calls`, as `torchair.scope.super_kernel` does."""
    air: Any = torch.ops.air
    first, last = calls[0].node, calls[-1].node
    with first.graph.inserting_before(first):
        keys = ["_super_kernel_scope", "_super_kernel_options"]
        first.graph.call_function(air.scope_enter.default, (keys, [name, ""])).meta["val"] = None
    with last.graph.inserting_after(last):
        last.graph.call_function(air.scope_exit.default).meta["val"] = None
