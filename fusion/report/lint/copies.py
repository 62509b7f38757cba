"""Linters of copies: layout copies between fused operators, and copies of caches that are written functionally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx

from fusion._torch.operators import short_name
from fusion.graph.launches import is_contiguous_copy, is_data, is_reshaping_copy
from fusion.graph.origin import location, source_text
from fusion.operators import operator_of
from fusion.records import Refusal
from fusion.report.lint.finding import Finding, at
from fusion.report.lint.kernels import (
    dtype_of,
    elements_of,
    inputs_of,
    is_fused,
    is_of_model,
    kernel_of,
    kernels,
    readers_of,
)

_WRITES = frozenset(
    {
        "index_put", "index_copy", "scatter", "slice_scatter", "select_scatter", "masked_scatter", "index_fill",
        "masked_fill", "where",
    }
)  # fmt: skip
"""Functional operators of aten that write into a copy of a tensor."""
_LAYOUTS = ("input_layout", "layout")
"""Arguments by which fused operators are given the order of the dims in memory."""


def layout_copies(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find contiguous copies between fused operators, one of which takes the layout as an argument."""
    for node in kernels(source):
        if not is_of_model(node) or not (is_contiguous_copy(node.target, node.kwargs) or is_reshaping_copy(node)):
            continue
        made, readers = inputs_of(node)[0], readers_of(node)
        with_layout = [_name(each) for each in (made, *readers) if _has_layout(each)]
        if not with_layout or not is_fused(made) or not all(map(is_fused, readers)):
            continue
        yield at(
            node,
            "layout_copies",
            f"{_name(made)}: its result is copied to another layout before {_name(readers[0])}",
            f"leave the copy out of `{source_text(node)}`; {with_layout[0]} takes the layout as an argument",
            1,
        )


def _has_layout(node: fx.Node) -> bool:
    """Return True if `node` calls a fused operator that has an argument for the order of dims in memory."""
    operator = operator_of(node.target)
    return operator is not None and any(f"str {name}" in operator.schema for name in _LAYOUTS)


def _name(node: fx.Node) -> str:
    return short_name(node.target)


def functional_writes(source: fx.Graph, refusals: Sequence[Refusal]) -> Iterator[Finding]:
    """Find caches that are written into a copy, which is copied back over the whole cache."""
    for copy in source.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        cache, write = kernel_of(copy.all_input_nodes[0]), _written(copy)
        if cache.op != "placeholder" or not _writes_into(write, cache):
            continue
        val = cache.meta["val"]
        mebibytes = elements_of(cache) * val.element_size() / 2**20
        reasons = [each.reason for each in refusals if "cache" in each.rule and each.where == location(write)]
        yield at(
            write,
            "functional_writes",
            f"{_name(write)}: it writes into a copy of the cache {list(val.shape)}, which is copied back at each call "
            f"({mebibytes:.2f} MiB)",
            reasons[0] if reasons else "write rows by index_copy_ along one dim, or by index_put_ at slots of pages",
            1,
        )


def _writes_into(write: fx.Node, cache: fx.Node) -> bool:
    """Return True if `write` is a functional write of a part of `cache`, or the last one of several."""
    if _name(write) not in _WRITES or not is_data(write.meta.get("val")):
        return False
    bases = [each for each in inputs_of(write) if _is_base(each, write)]
    return cache in bases or any(_writes_into(each, cache) for each in bases)


def _is_base(node: fx.Node, write: fx.Node) -> bool:
    """Return True if `node` has the dtype and the number of elements of the result of `write`."""
    return dtype_of(node) == dtype_of(write) and elements_of(node) == elements_of(write)


def _written(copy: fx.Node) -> fx.Node:
    """Return the call that computes what `copy` copies over an input, behind copies without effect."""
    node = kernel_of(copy.all_input_nodes[-1])
    while _name(node) == "copy":
        node = kernel_of(node.all_input_nodes[-1])
    return node
