"""Scores of experts that a table lists for each token of the vocabulary  (DeepSeek-V4, 2026, hash routing).

experts = table[tokens]     scores = sigmoid or sqrt(softplus) of logits, at the experts
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fusion import reader
from fusion.analysis.dtypes import elements_below
from fusion.analysis.intervals import uncast
from fusion.graph import Annotation, Graph, Reading, Value
from patterns.moe.router.scores import scores_of, with_casts
from patterns.moe.words import LISTED_SCORES


@reader(gives=(LISTED_SCORES,))
def listed_scores(graph: Graph) -> Iterator[Annotation]:
    """Read every `listed_scores`: scores of a router, gathered at rows of a table."""
    a = graph.algebra
    for taken in [each for each in list(graph.places) if each.op == "take"]:
        rows, scores = _lookup(taken.args[1]), scores_of(elements_below(taken.arg))
        if rows is None or scores is None or scores[0] == "softmax" or taken.rank != taken.args[1].rank:
            continue
        (table, tokens), (norm, logits) = rows.args, scores
        shape = (*taken.shape[:-1], taken.arg.shape[-1])
        if prod(logits.shape) != prod(shape) or prod(tokens.shape) != prod(shape[:-1]):
            continue
        captures = {"norm": norm, "table": table, "tokens": a.reshape(tokens, shape[:-1])}
        captures["logits"] = a.reshape(logits, shape)
        for value in with_casts(graph, taken):
            yield value, Reading("listed_scores", {**captures, "dtype": value.dtype})


def _lookup(experts: Value) -> Value | None:
    """Return the lookup of rows of a table [V, K] that `experts` is a cast or reshape of; None if there is none."""
    rows = uncast(experts, "reshape")
    is_lookup = (rows.op, rows.attrs) == ("index", (0,)) and rows.arg.rank == 2
    return rows if is_lookup and rows.shape[-1] == experts.shape[-1] else None
