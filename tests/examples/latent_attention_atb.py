"""Attention of few queries over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples import latent_attention_paged as paged
from tests.examples import sparse_attention as sparse
from tests.examples.caches import of_nz, turned
from tests.examples.inputs import Inputs, Part, normal, tensors, under
from tests.examples.latent_attention import UP, absorbed, at_position, by_hand, by_table, chunk, given, prompt, step
from tests.examples.masks import added, causal
from tests.examples.ring_mla import summed
from tests.examples.sparse_attention import B, C, D, Form, N, S, T, eager, lowered, over_latent

FEW = 3
TABLE = torch.tensor([[2, 0], [3, 1]])
SOME = torch.rand(B, 1, FEW, T, generator=torch.Generator().manual_seed(3)) > 0.5
TREE = SOME | (causal(FEW, T, T - FEW) & ~causal(FEW, T, T - FEW - 1))
"""Which keys a query sees [B, 1, FEW, T], itself among them."""

several, unmasked = by_hand(lambda: ~causal(FEW, T, T - FEW)), by_hand()
drafted = over_latent(lambda q, k, v, there: eager(q, k, v, added(~there, q.dtype)).flatten(2))
"""Some tokens that were guessed in several ways, what each sees told by a mask; heads side by side [B, S, N·E]."""


@over_latent
def with_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of one part of the cache: what they give is merged elsewhere, by log-sum-exps in the dtype of the model."""
    out, sums = summed()(q, k, v)
    return out, sums.to(q.dtype)


def in_order(form: Form) -> Form:
    """The same over NZ pages in their own order."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, *more: Tensor) -> Any:
        latent, rope = (x.permute(0, 2, 1, 3).reshape(B, T, -1) for x in (latents, ropes))
        return form(q, latent, rope, up, *more)

    return forward


def in_thirds(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor) -> Tensor:
    """Half as many pages again as sequences, one step over all of them."""
    both = (x.permute(0, 2, 1, 3).reshape(B, -1, x.shape[1] * x.shape[3]) for x in (latents, ropes))
    return step(q, *both, up)


def pages(queries: int, *more: Part, nz: bool = True, table: bool = True) -> Inputs:
    """The inputs with two pages for each sequence, in NZ with 16 and 4 lanes or whole, and perhaps a block table."""
    size = T // 2
    both = ((2 * B, width // n, size, n) if nz else (2 * B, size, width) for width, n in ((C, 16), (sparse.DR, 4)))
    return tensors((B, N, queries, D + sparse.DR), *both, UP, *([TABLE] if table else []), *more)


QUERY, LINES = (B, N, 1, D + sparse.DR), ((C // 16, T // 2, 16), (sparse.DR // 4, T // 2, 4))
APART = tensors(QUERY, *(turned(normal(1, 2 * B, *each)) for each in LINES), UP)
THIRDS = tensors(QUERY, *((3, *each) for each in LINES), UP)
MODES = (
    (", of a table", by_table, partial(pages, nz=False), slice(2, None)),
    (", in lines of a table", partial(by_table, read=of_nz), pages, slice(None)),
    (", in lines", in_order, partial(pages, table=False), slice(None)),
)
"""Name, form, inputs, and which of these are tried so."""
PAGED = (
    ("one query", step, 1),
    ("queries that see all", unmasked, FEW),
    ("the last queries", several, FEW),
    ("a mask", drafted, FEW, TREE),
)
PLAIN = (*PAGED, ("absorbed", absorbed(), 1), ("at a position", at_position, 1, sparse.POSITION))
EXAMPLES = (
    *(Example(name, form, given(queries, T, *more)) for name, form, queries, *more in PLAIN),
    Example("pages of a table", paged.whole, paged.inputs(1)),
    Example("queries that see all, pages of a table", by_table(unmasked), paged.inputs(FEW)),
    Example("pages of a table, cut behind", by_table(step, keys=T - 3), pages(1, nz=False)),
    Example("one query, with its sum", with_sums, given(1, T)),
    Example("one query, with its sum, pages of a table", by_table(with_sums), pages(1, nz=False)),
    *(
        Example(name + mode, over(form), inputs(queries, *more))
        for mode, over, inputs, chosen in MODES
        for name, form, queries, *more in PAGED[chosen]
    ),
    Example("one query, in lines apart", in_order(step), APART),
)
LOWERED = lowered(lambda there: there)
LEFT = (
    (Example("pages of thirds", in_thirds, THIRDS), "pages are not the same number for each of"),
    (Example("queries with their sums", with_sums, given(FEW, T)), "something reads it"),
    (Example("a prompt", prompt, given()), "a sequence has more than four"),
    (Example("a chunk", chunk, given(S, T)), "a sequence has more than four"),
    (Example("a mask that leaves nothing", LOWERED, given(FEW, T, TREE)), "is not proven to be causal or a length"),
)
"""What is left to the other operator, and why."""

TRIED = {
    "latent_attention": under("few queries", (each for each, _ in LEFT)),
    "latent_attention_atb": (*EXAMPLES, *(replace(each, refusal=reason) for each, reason in LEFT)),
}
