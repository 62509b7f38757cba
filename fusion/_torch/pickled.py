"""Serialisation of graphs, with fake tensors and symbolic sizes."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any, cast

from torch import fx

from fusion._torch.fakes import fresh_fake_mode
from fusion._torch.nested import map_only
from fusion._torch.tracing import copied

_METADATA = ("val", "stack_trace", "nn_module_stack", "fusion")


def pack(gm: fx.GraphModule) -> bytes:
    """Pickle `gm`: its nodes with their fake tensors and their provenance; other metadata is dropped.

    Private: `torch.fx._graph_pickler.GraphPickler`, which AOT precompilation uses.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(_portable(gm), Options(ops_filter=None, node_metadata_key_filter=None))


def unpack(packed: bytes) -> fx.GraphModule:
    """Unpickle a graph of `pack`, with fake tensors of a new fake mode."""
    from torch.fx._graph_pickler import GraphPickler

    return cast(fx.GraphModule, GraphPickler.loads(packed, fresh_fake_mode()))


def _portable(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy `gm` and its bodies, with metadata that any process can read."""
    portable = fx.GraphModule(gm, copied(gm.graph))
    for name, each in portable.named_children():
        if isinstance(each, fx.GraphModule):
            portable.add_submodule(name, _portable(each))
    for node in portable.graph.nodes:
        node.meta = portable_metadata(node)
    return portable


def portable_metadata(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of `node`, with the names of classes of the model instead of the classes."""
    metadata = {name: node.meta[name] for name in _METADATA if name in node.meta}
    return {name: map_only(type, lambda kind: kind.__qualname__, each) for name, each in metadata.items()}
