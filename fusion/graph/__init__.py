"""The canonical graph: hash-consed values over a user's FX graph, which stays untouched."""

from fusion.graph.algebra import Algebra
from fusion.graph.dims import Dim, broadcast, but_ones, dim_of, dims_of, is_dense, lie_alike
from fusion.graph.node_values import Graph, unviewed
from fusion.graph.readings import Annotation, Miss, Reading, Readings
from fusion.graph.value import Value

__all__ = [
    "Algebra",
    "Annotation",
    "Dim",
    "Graph",
    "Miss",
    "Reading",
    "Readings",
    "Value",
    "broadcast",
    "but_ones",
    "dim_of",
    "dims_of",
    "is_dense",
    "lie_alike",
    "unviewed",
]
