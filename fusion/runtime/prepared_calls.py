"""Prepared weights of a graph whose host adds no inputs: results of one call inside the graph.

The call of `cann_fusion::prepared` has the Parameters as operands and the computations as text, so that code that the
host keeps, and runs in another process, prepares the same tensors.
"""

from __future__ import annotations

import operator
import pickle
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.library import Library, register_fake

from fusion.records import Prepared
from fusion.runtime.prepared_weights import Need, Supply, needs_of

_LIBRARY = Library("cann_fusion", "FRAGMENT")
_LIBRARY.define("prepared(Tensor(a)[] parameters, str recipes, Tensor? anchor=None) -> Tensor(a)[]")
# The results belong to no graph, and some have Parameters as views: of aliases of operands no host reuses the memory.
# In the first call of a graph, torch's check of custom operators holds the last operand: `anchor` is no Parameter,
# whose memory would seem shared.


def call_prepared(source: fx.Graph, prepared: Sequence[Prepared], paths: Mapping[str, str]) -> list[fx.Node]:
    """Replace the prepared inputs of `source` by the results of one call, and return these.

    Args:
        source: the graph; its last inputs are those that `prepared` names.
        prepared: the tensors.
        paths: paths in the model of the inputs that hold Parameters, by their names. Where the tensors are computed
            from constants alone, the first of these inputs is the operand, for its device.
    """
    inputs = {node.name: node for node in source.find_nodes(op="placeholder")}
    names, needs = needs_of(prepared, source)
    operands = [inputs[name] for name in names or [next(iter(paths))]]
    others = (node for name, node in inputs.items() if name not in paths and isinstance(node.meta["val"], Tensor))
    text = _encoded([paths[node.name] for node in operands], needs)
    replaced = [inputs[each.name] for each in prepared]
    anchor = next((node for node in others if node not in replaced), None)
    with source.inserting_after(replaced[-1]):
        call = source.call_function(torch.ops.cann_fusion.prepared.default, (operands, text, anchor))
    call.meta["val"] = [node.meta["val"] for node in replaced]
    with source.inserting_after(call):
        items = [source.call_function(operator.getitem, (call, number)) for number in range(len(replaced))]
    for node, item in zip(replaced, items, strict=True):
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item)
        source.erase_node(node)
    return items


def _encoded(paths: Sequence[str], needs: Sequence[Need]) -> str:
    """Return `needs` as text; equal computations, as those of equal layers, are in it once."""
    first: dict[str, Prepared] = {}
    shared = [replace(each, prepared=first.setdefault(each.prepared.key, each.prepared)) for each in needs]
    return b64encode(zlib.compress(pickle.dumps((list(paths), shared)))).decode()


@cache
def _decoded(recipes: str) -> tuple[list[str], list[Need]]:
    return pickle.loads(zlib.decompress(b64decode(recipes)))


@cache
def _supply(recipes: str) -> Supply:
    paths, needs = _decoded(recipes)
    return Supply.of(range(len(paths)), paths, needs)


def _prepared(parameters: list[Tensor], recipes: str, anchor: Tensor | None = None) -> list[Tensor]:
    """Return the tensors that `recipes` prepares from `parameters`; nothing is held for a tensor that is no Parameter,
    such as a buffer that has taken the place of one.
    """
    supply = _supply(recipes)
    is_known = tuple(map(id, parameters)) in supply.known
    if is_known or all(isinstance(each, nn.Parameter) for each in parameters):
        return supply(parameters)
    return [recipe.computed([parameters[each] for each in numbers]) for recipe, numbers in supply.needs]


def _fake(parameters: list[Tensor], recipes: str, anchor: Tensor | None = None) -> list[Tensor]:
    _, needs = _decoded(recipes)
    return [torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=each.device) for each in needs]


_LIBRARY.impl("prepared", _prepared, "CompositeExplicitAutograd")
register_fake("cann_fusion::prepared", _fake, lib=_LIBRARY)
