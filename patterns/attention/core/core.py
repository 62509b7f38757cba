"""The core of attention, softmax(z) v: weights times values, with rows that are not yet sequences, heads and queries.

The product with values is read by `products`, the softmax by `weights`, and its scores z down to q kᵀ by `scores`.
Readers of kinds of attention start from this word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fusion import reader, word
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from patterns.attention.core.addends import product_in
from patterns.attention.core.divided_late import Finish
from patterns.attention.core.empty_rows import Empty
from patterns.attention.core.joined_heads import with_all_heads
from patterns.attention.core.places import may_attend
from patterns.attention.core.products import contraction
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import Weights, dropped, empty_rows, weights_of
from patterns.attention.masks.assumed import Assumed
from patterns.attention.reasons.blame import DROPPED, missed, why_not_decomposed
from patterns.attention.reasons.not_softmax import OVER_QUERIES

ATTENTION_CORE = word(
    "attention_core",
    "softmax(z) v, with rows that are not yet split into sequences, heads and queries; several, if z is a sum of "
    "several products",
    core="the `Core`: the product with values, weights, scores, and the views of the result",
)


@dataclass(frozen=True)
class Core:
    """The parts of softmax(z) v.

    Attributes:
        root: the result, equal to the value that is read.
        product: P v, weights times values.
        weights: P, down to the softmax.
        scores: z, down to q kᵀ; its `product` is None if the walk ended at another value, `scores.at`.
        finish: the reshapes, permutes and casts from `product` to `root`.
    """

    root: Value
    product: Value
    weights: Weights
    scores: Scores
    finish: Finish

    @property
    def empty(self) -> Empty:
        """The behaviour of the softmax on rows without a key."""
        return empty_rows(self.weights, self.scores)


@reader(gives=(ATTENTION_CORE,))
def attention_cores(graph: Graph) -> Iterator[Annotation]:
    """Read every product of a softmax over keys with values as `attention_core`; report softmaxes over other dims."""
    assumed = Assumed.of(graph)
    for value in list(graph.places):
        if value.op == "aten.scaled_dot_product_attention.default":  # which the canonicaliser has not expanded
            yield value, Miss("softmax_attention", why_not_decomposed(graph.places[value][0]))
        joined = with_all_heads(graph.algebra, value) if value.op in ("cat", "matmul") else None
        if joined is None and not may_attend(graph, value):
            continue
        result = cores_of(assumed, value if joined is None else joined)
        if isinstance(result, Miss):
            yield value, result if joined is None else replace(result, of=value)
        else:
            yield from ((value, Reading("attention_core", {"core": each})) for each in result)


def cores_of(assumed: Assumed, root: Value) -> list[Core] | Miss:
    """List the cores of `root`: one for each product among the addends of the scores that may be q kᵀ.

    [] if `root` is no product of a softmax with values; a `Miss` if it is one of another kind.
    """
    a, cores, biases = assumed.algebra, list[Core](), frozenset[Value]()
    product, finish = contraction(a, root, assumed.computed)
    while product.op == "matmul":
        walk = Scores(biases=biases)
        weights = weights_of(a, product.arg, walk)
        if weights is None:
            return missed(DROPPED, product) if not cores and dropped(product.arg) else cores
        if weights.softmax.attrs[0] != -1:
            return missed(OVER_QUERIES, product, (weights.softmax,))
        cores.append(Core(root, product, weights, scores_of(a, walk, weights.softmax.arg), finish))
        addend = product_in(weights.softmax.arg, biases)
        if addend is None or product_in(weights.softmax.arg, biases | {addend}) is None:
            break
        biases |= {addend}
    return cores
