"""What plans say of a graph: whose memory, what is prepared, and which nodes go."""

from __future__ import annotations

import torch
from sympy import Symbol

from fusion.facts import Facts
from fusion.options import Options
from fusion.recording import Fakes
from fusion.stages.canonicalise import canonicalise
from fusion.stages.plan.recorded import PlanBook
from fusion.testing import capture
from fusion.weights import marks, parameter_inputs

from .graphs import numbers

X, W = numbers(2, 64), torch.nn.Parameter(numbers(1, 64, seed=1))


def test_what_is_repeated_a_symbolic_number_of_times_is_not_prepared():
    captured = capture(lambda x, w: x * w, (X, W))
    source = captured.graph.graph
    graph = canonicalise(source, Facts(parameter_inputs(source, marks(captured.inputs))))
    (weight,) = (graph.held[node] for node in graph.fixed)
    book = PlanBook(graph, Fakes(graph), (), "", Options(), None)
    assert book.is_prepared(graph.algebra.expand(weight, (3, 64)))
    assert not book.is_prepared(graph.algebra.expand(weight, (Symbol("tokens"), 64)))
