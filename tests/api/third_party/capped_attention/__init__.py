"""softmax(c · tanh(s / c), masked) v, s = scale · q kᵀ: attention whose scores are capped softly (Gemma 2, 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion import (
    Example,
    Library,
    Operator,
    Rule,
    attribute,
    lowering,
    pattern,
    reader,
    scalar,
    tensor,
    variants,
    word,
)
from fusion.graph import Algebra, Annotation, Graph
from patterns.attention import (
    SOFTMAX_ATTENTION,
    Assumed,
    Core,
    Dense,
    Scores,
    Unmasked,
    Visibility,
    annotated,
    cores_by_value,
    in_floats,
    read_attention,
    scores_of,
    viewed,
)  # fmt: skip

CAPPED = word(
    "softmax_of_capped",
    "softmax(cap · tanh(scale · q kᵀ / cap)) v over the visible keys",
    **{**(SOFTMAX_ATTENTION.captures or {}), "cap": "a number"},
)


def _below_cap(a: Algebra, core: Core) -> tuple[Core, float] | None:
    """The core with the scores below its tanh in the place of those above, and the cap; None without a tanh."""
    above = core.scores
    if above.product is not None or not above.at or above.at[0].op != "tanh":
        return None
    below = scores_of(a, Scores(), above.at[0].arg)
    if below.product is None or below.terms or below.factors or below.sink is not None or above.factors:
        return None
    steps = (*below.steps, *above.steps)
    capped = replace(above, product=below.product, steps=steps, scale=below.scale * above.scale, reason="")
    return replace(core, scores=capped), above.scale


@reader(gives=(CAPPED,), needs=("attention_core",), supersedes=("softmax_attention",))
def capped_attentions(graph: Graph) -> Iterator[Annotation]:
    """Every attention whose scores go through c · tanh(s / c)."""
    assumed = Assumed.of(graph)
    for value, (core, *_) in cores_by_value(graph):
        found = _below_cap(graph.algebra, core)
        if found is None:
            continue
        core, cap = found

        def operands(*parts: Any, cap: float = cap) -> Any:
            read = in_floats(*parts)
            return read if isinstance(read, str) else ({**read[0], "cap": cap}, read[1])

        yield from annotated(value, core, read_attention(assumed, [core], "softmax_of_capped", operands))


def _compute(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None) -> Tensor:
    """Group g of queries reads head g of keys [B, M, T, D] and values; no keys give 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1).to(wide) for each in (k, v))
    scores = cap * (q.to(wide) @ k.mT * scale / cap).tanh()
    hidden = scores if mask is None else scores.masked_fill(mask, -torch.inf)
    return (hidden.softmax(-1).nan_to_num(0) @ v).to(q.dtype)


OPERATOR = Operator(
    schema="own_attention::capped(Tensor q, Tensor k, Tensor v, float scale, float cap, Tensor? mask=None) -> Tensor",
    compute=_compute,
    outputs=lambda q, k, v, scale, cap, mask: q.new_empty(*q.shape[:-1], v.shape[-1]),
    dims={"q": "B N S D", "k": "B M T D", "v": "B M T E"},
    dtypes={name: frozenset({torch.float16, torch.bfloat16}) for name in "qkv"},
    limits={"host": (), "ascend910_93": ()},
    source="this package",
    summary="softmax(cap · tanh(scale · q kᵀ / cap), masked) v",
)


class CappedAttention(Rule):
    """Softmax attention with softly capped scores."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> Tensor:
        """The meaning, without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E]."""
        return (cap * (q @ k.mT * scale / cap).tanh()).softmax(-1) @ v

    @pattern
    def written(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), scale=scalar(), cap=scalar(),
        seen: Any = Visibility, view: Any = attribute(),
    ):  # fmt: skip
        """softmax(cap · tanh(scale · q kᵀ / cap), masked) v."""
        return p.softmax_of_capped(q=q, k=k, v=v, scale=scale, cap=cap, **seen.captures(), output_view=view)

    @lowering
    @variants(seen=(Unmasked,))
    def unmasked(self, q, k, v, scale, cap, view, seen):
        """Call the operator without a mask."""
        seen.refuse_others()
        return viewed(torch.ops.own_attention.capped(q, k, v, scale, cap), view)

    @lowering
    @variants(seen=(Dense,))
    def masked(self, q, k, v, scale, cap, view, seen):
        """Call the operator with the dense mask."""
        mask = seen.shown()
        return viewed(seen.restored(torch.ops.own_attention.capped(q, k, v, scale, cap, mask), values=v), view)


def library() -> Library:
    """For the entry point `fusion.patterns`."""
    return Library((CappedAttention(),), (capped_attentions,), (OPERATOR,))


def _inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, heads, 6, 64, generator=draw).to(dtype) for heads in (4, 2, 2))


def _capped(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    scores = torch.tanh(q @ k.mT * 0.125 / 30.0) * 30.0
    hidden = torch.full((6, 6), torch.finfo(q.dtype).min).triu(1).to(q.dtype)
    weights = (scores + hidden if causal else scores).float().softmax(-1).to(q.dtype)
    return (weights @ v).transpose(1, 2).reshape(2, 6, 256)


def examples() -> dict[str, tuple[Example, ...]]:
    """For the entry point `fusion.examples`."""
    return {
        "capped_attention": (
            Example("causal", lambda q, k, v: _capped(q, k, v, True), _inputs),
            Example("unmasked", lambda q, k, v: _capped(q, k, v, False), _inputs),
        )
    }
