"""Packed tokens behind a constant mask of blocks along its diagonal, as eager code of Qwen-VL fills it slice by slice.

    seen[i, j] = segment[i] == segment[j] (and j ≤ i)        segment[i] in whole numbers that the graph holds

The mask is folded to its numbers, however it was filled; where these are such blocks, it is one call of the operator in
TND, told where each segment ends, and nobody makes the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from fusion.analysis.constant_folding import Folder
from fusion.graph import Found, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.masks.visible import MASKED
from patterns.attention.varlen.segment_orders import ROWS

_OWN = ("count", "levels", "kv_len", "kv_lens", "window", "mixed")
_KEPT = ("q", "k", "v", "scale", "sink", "output_view")


def block_masked(graph: Graph) -> Iterator[Found]:
    """Attention of one sequence of which a constant mask makes segments."""
    for value, attention in list(graph.readings.all("softmax_attention")):
        found = _segmented(graph.shared(Folder), attention)
        if found is not None:
            yield value, found


@proof
def _segmented(folder: Folder, attention: Reading) -> Reading | None:
    said = attention.captures
    q, k = said["q"], said["k"]
    tokens: Any = q.shape[ROWS]
    must(all(said.get(name) is None for name in _OWN))
    must(q.shape[0] == k.shape[0] == 1 and k.shape[ROWS] == tokens and isinstance(tokens, int))
    kind, ends = proven(_blocks(proven(_seen(folder, said, tokens))))
    kept = {name: said[name] for name in _KEPT if name in said}
    how = {"mask_kind": kind, "window": None, "kv_len": None, "fully_masked_row": "zero"}  # each token sees itself
    return Reading("segmented_attention", {**kept, **how, "ends": ends, "key_ends": ends}, attention.relies)


@proof
def _seen(folder: Folder, said: Any, tokens: int) -> Any:
    """Which keys each query sees [T, T], alike for all heads: where a mask is False, or where a bias is 0, else low."""
    mask, bias = said.get("mask"), said.get("bias")
    must((mask is None) != (bias is None))
    if bias is None:
        must(said["mask_kind"] == "dense")
        return ~proven(_table(folder, mask, tokens))
    must(said["mask_kind"] == "none")
    numbers = proven(_table(folder, bias, tokens))
    must(((numbers == 0) | (numbers <= MASKED)).all())
    return numbers == 0


@proof
def _table(folder: Folder, mask: Value, tokens: int) -> Any:
    """The numbers of a mask [.., T, T] that are the same for every sequence and head."""
    must(mask.shape[-2:] == (tokens, tokens) and all(isinstance(each, int) for each in mask.shape))
    must(prod(mask.shape) > 0)
    tables = proven(folder.fold(mask)).reshape(-1, tokens, tokens)
    must((tables == tables[0]).all())
    return tables[0]


@proof
def _blocks(seen: Any) -> tuple[str, tuple[int, ...]] | None:
    """Which order there is within blocks along the diagonal, and where each ends; None of one block, or of others."""
    must(seen.any(-1).all())
    segment = np.unique(seen.argmax(-1), return_inverse=True)[1]  # blocks begin where the first key of a row does
    must((np.diff(segment) >= 0).all() and segment[-1] > 0)
    alike = segment[:, None] == segment
    ends = tuple(int(each) for each in np.searchsorted(segment, np.arange(segment[-1] + 1), side="right"))
    if (seen == alike).all():
        return "none", ends
    must((seen == np.tril(alike)).all())
    return "causal_lower_right", ends
