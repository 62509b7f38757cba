"""Packed tokens under a constant block-diagonal mask, as eager code of Qwen-VL fills it slice by slice.

    seen[i, j] = segment[i] == segment[j] (and j ≤ i)        segment[i]: constant integers

The mask is folded to its numbers, however it is filled. If it is block diagonal, the attention is one call of the
operator in layout TND with the end of each segment, and the mask is dead code.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from fusion.analysis.constant_folding import Folder
from fusion.graph import Annotation, Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.masks.visible import MASKED
from patterns.attention.varlen.segment_orders import ROWS

_OWN = ("count", "levels", "kv_len", "kv_lens", "window", "mixed")
_UNCHANGED = ("q", "k", "v", "scale", "sink", "output_view")


def block_masked(graph: Graph) -> Iterator[Annotation]:
    """Read every attention of one sequence whose constant mask is block diagonal, as `segmented_attention`."""
    for value, attention in list(graph.readings.all("softmax_attention")):
        reading = _segmented(graph.shared(Folder), attention)
        if reading is not None:
            yield value, reading


@proof
def _segmented(folder: Folder, attention: Reading) -> Reading | None:
    captures = attention.captures
    q, k = captures["q"], captures["k"]
    tokens: Any = q.shape[ROWS]
    must(all(captures.get(name) is None for name in _OWN))
    must(q.shape[0] == k.shape[0] == 1 and k.shape[ROWS] == tokens and isinstance(tokens, int))
    kind, ends = proven(_blocks(proven(_visible_keys(folder, captures, tokens))))
    unchanged = {name: captures[name] for name in _UNCHANGED if name in captures}
    how = {"mask_kind": kind, "window": None, "kv_len": None, "fully_masked_row": "zero"}  # each token sees itself
    return Reading("segmented_attention", {**unchanged, **how, "ends": ends, "key_ends": ends}, attention.relies)


@proof
def _visible_keys(folder: Folder, captures: Any, tokens: int) -> Any:
    """Return constant booleans [T, T] for T = `tokens`, true where a query sees a key, the same for all heads.

    They are the negated mask in `captures`, or true where a bias that is used as a mask is 0. Unproven if there is
    neither, or if the bias has a number that is not 0 and hides no key.
    """
    mask, bias = captures.get("mask"), captures.get("bias")
    must((mask is None) != (bias is None))
    if bias is None:
        must(captures["mask_kind"] == "dense")
        return ~proven(_table(folder, mask, tokens))
    must(captures["mask_kind"] == "none")
    numbers = proven(_table(folder, bias, tokens))
    must(((numbers == 0) | (numbers <= MASKED)).all())
    return numbers == 0


@proof
def _table(folder: Folder, mask: Value, tokens: int) -> Any:
    """Fold `mask` [.., T, T], T = `tokens`, the same for all sequences and heads, to its numbers [T, T]; else
    unproven.
    """
    must(mask.shape[-2:] == (tokens, tokens) and all(isinstance(each, int) for each in mask.shape))
    must(prod(mask.shape) > 0)
    tables = proven(folder.fold(mask)).reshape(-1, tokens, tokens)
    must((tables == tables[0]).all())
    return tables[0]


@proof
def _blocks(seen: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the order within the diagonal blocks of `seen` [T, T], and the end of each block; None for other masks.

    The order is "none" or "causal_lower_right". A single block gives None.
    """
    must(seen.any(-1).all())
    segment = np.unique(seen.argmax(-1), return_inverse=True)[1]  # a block starts at the first visible key of its rows
    must((np.diff(segment) >= 0).all() and segment[-1] > 0)
    alike = segment[:, None] == segment
    ends = tuple(int(each) for each in np.searchsorted(segment, np.arange(segment[-1] + 1), side="right"))
    if (seen == alike).all():
        return "none", ends
    must((seen == np.tril(alike)).all())
    return "causal_lower_right", ends
