"""A single call of a graph as a graph of its own, and as a key of its operator and the metadata of its inputs."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from fusion._torch.nested import map_only
from fusion.planning.plan_json import frozen


def alone(node: fx.Node) -> fx.GraphModule:
    """Return a graph with the call `node` alone; each of its input nodes is a placeholder, in order."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {key: source.meta[key] for key in ("val",) if key in source.meta}
    graph.output(graph.node_copy(node, copies.__getitem__))
    return fx.GraphModule({}, graph)


def signature(node: fx.Node) -> Hashable:
    """Return a key of a call: its operator, shapes and strides of its arguments, and which of them are one tensor."""
    looks = {source: (at, frozen(source.meta.get("val"))) for at, source in enumerate(node.all_input_nodes)}
    return frozen((node.target, map_only(fx.Node, looks.__getitem__, (node.args, dict(node.kwargs)))))
