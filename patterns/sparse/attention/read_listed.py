"""The reader of attention over rows that the model gathers by lists of its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf, prod

from fusion import reader
from fusion.analysis.row_layout import unwidened
from fusion.graph import Annotation, Graph, Miss, Reading
from patterns.attention.core.core import Core
from patterns.attention.core.frames import Attended
from patterns.attention.core.output_view import view_steps
from patterns.attention.core.read import cores_by_value, why_not_scores
from patterns.attention.masks.assumed import Assumed
from patterns.sparse.attention.gathered_attention import Operands, listed_attention
from patterns.sparse.lists.read_lists import shows_one
from patterns.sparse.words import LISTED_ATTENTION, SUNK

_SCALED = (
    "scores: those of listed rows are multiplied by a tensor; npu_sparse_flash_attention requires one number "
    "for all; multiply the queries by that tensor"
)
_CLAMPED = (
    "scores: masked ones of listed rows are clamped to a finite number; npu_sparse_flash_attention requires "
    "-inf, or scores that are not clamped"
)


@reader(gives=(LISTED_ATTENTION,), needs=("attention_core", "softmax_attention"), supersedes=("softmax_attention",))
def listed_attentions(graph: Graph) -> Iterator[Annotation]:
    """Read every attention over rows that lists of keys gather as `listed_attention`; report why others are not read.

    What is attention over all the gathered rows as well gives no report.
    """
    assumed = Assumed.of(graph)
    for value, cores in cores_by_value(graph):
        listed = _over_lists(assumed, cores[0]) if cores[0].root is value else []
        dense = graph.readings.of(value, "softmax_attention")
        yield from ((value, each) for each in listed if not dense or isinstance(each, Reading))


def _over_lists(assumed: Assumed, core: Core) -> list[Reading | Miss]:
    """Read `core` as attention over gathered rows, see `listed_attention`; [] if no rows are gathered."""
    if why_not_scores(core) != "":
        return []
    a, weights, scores = assumed.algebra, core.weights, core.scores
    shape = weights.softmax.shape[:-1]
    attended = Attended.by(a, scores, core.product, weights)
    if attended is None or not 2 <= len(shape) <= 4:
        return []
    k, v = attended.keys_and_values(attended.plain(shape))
    if k is None or v is None:
        return []
    q = attended.queries
    masks = assumed.masks((*shape, k.shape[2]), scores.terms, (shape[0], prod(shape[1:-1]), shape[-1], k.shape[2]))
    steps = view_steps(weights, v.shape[-1], core.finish)
    rounded = assumed.rounded(core.root)
    narrow = rounded is not None and all(unwidened(a, each).dtype is rounded for each in (q, k, v))
    cast = ("cast", (core.root.dtype,))
    operands = Operands(q, k, v, *((rounded, [*steps, cast]) if narrow else (core.root.dtype, steps)))
    reasons = {SUNK: scores.sink is not None, _SCALED: scores.factors, _CLAMPED: scores.floor > -inf}
    reason = next((why for why, met in reasons.items() if met), "")
    return listed_attention(masks, operands, scores.scale, core.empty, reason, partial(shows_one, assumed)) or []
