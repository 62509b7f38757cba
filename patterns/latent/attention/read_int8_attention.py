"""The readers of attention over an int8 latent: with weights in floats, or rounded to int8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Value
from patterns.attention.core.core import Core, cores_of
from patterns.attention.core.frames import Frame, scaled_queries
from patterns.attention.core.operands import Outcome, Read
from patterns.attention.core.places import is_end, may_attend
from patterns.attention.core.read import annotated, cores_by_value, read_attention
from patterns.attention.masks.assumed import Assumed
from patterns.attention.reasons.blame import RULE
from patterns.latent.attention import int8_operands
from patterns.latent.attention.int8_probabilities import int8_probability_attention
from patterns.latent.words import FOLDED_QUERY, INT8_LATENT_ATTENTION, INT8_PROBABILITY_ATTENTION

_GIVEN = (INT8_LATENT_ATTENTION, FOLDED_QUERY, INT8_PROBABILITY_ATTENTION)


@reader(gives=_GIVEN, needs=("attention_core", "softmax_attention"), supersedes=("softmax_attention",))
def int8_latent_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every attention over an int8 latent, as `int8_latent_attention` or `int8_probability_attention`."""
    if torch.int8 not in graph.dtypes:
        return
    assumed = Assumed.of(graph)
    read = {value for value, _ in (*graph.readings.all(RULE), *graph.readings.missed(RULE))}
    for value, cores in cores_by_value(graph):
        outcome = _over_int8(assumed, cores)
        read |= {value} if outcome else set()
        yield from annotated(value, cores[0], outcome)
    for value in list(graph.places):
        if value in read or not may_attend(graph, value):
            continue
        rounded = int8_probability_attention(graph.algebra, value, lambda root: _at(assumed, root))
        if isinstance(rounded, Miss):
            yield from [(value, rounded)] if is_end(graph, value) else ()
        else:
            yield from (rounded or {}).items()


def _at(assumed: Assumed, root: Value) -> Outcome | Miss | None:
    """Read `root`, which need not be a value of the graph, as `int8_latent_attention`."""
    cores = cores_of(assumed, root)
    return cores if isinstance(cores, Miss) else _over_int8(assumed, cores)


def _over_int8(assumed: Assumed, cores: list[Core]) -> Outcome | Miss | None:
    outcome = read_attention(assumed, cores, "int8_latent_attention", _in_int8)
    return None if isinstance(outcome, Miss) and outcome.rule == RULE else outcome


def _in_int8(assumed: Assumed, core: Core, frame: Frame, q: Value, k: Value, v: Value) -> Read | Miss | None:
    a = assumed.algebra
    return int8_operands.parts(a, scaled_queries(a, q, core.scores.factors, frame), k, v)
