"""Mutation: which calls of an FX graph write to memory that others may read, and to whose."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch.fx as fx

from fusion._torch import OpOverload, schema_of, tree_leaves

_RESERVING = {"empty", "new_empty", "empty_like", "empty_strided"}


def reserves(target: Any) -> bool:
    """Whether each call of an operator gives memory of its own, with nothing defined in it."""
    return isinstance(target, OpOverload) and schema_of(target).name.split("::")[-1] in _RESERVING


def is_write(node: fx.Node) -> bool:
    """Whether a call changes memory that others may read."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a call writes to, in the order of its schema."""
    if not is_write(node):
        return []
    target: Any = node.target
    declared = schema_of(target).arguments
    given = {**{each.name: value for each, value in zip(declared, node.args, strict=False)}, **node.kwargs}
    written = [given.get(each.name) for each in declared if each.alias_info is not None and each.alias_info.is_write]
    return [each for each in tree_leaves(written) if isinstance(each, fx.Node)]


def closing_writes(source: fx.Graph) -> set[fx.Node]:
    """The writes with which a graph ends, as functional graphs do: nothing is computed after them."""
    nodes = (node for node in reversed(source.nodes) if node.op != "output")
    return set(takewhile(is_write, nodes))
