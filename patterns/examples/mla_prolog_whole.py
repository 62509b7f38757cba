"""What stands before attention over a latent in whole numbers, as serving code in W8A8C8 writes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_attention_whole import SCALE, Attend, explicit, in_line, restored
from patterns.examples.mla_prolog import DR, HE, B, D, E, N, norm, rope_last, tables, turned
from patterns.examples.mla_prolog_quantised import multiplied, whole
from patterns.examples.quantisation import quantised
from patterns.examples.quantisation import weights as whole_numbers

BLOCKS, SIZE, HCQ, C = 9, 4, 48, 64
TABLE = torch.tensor([[3, 8, 1], [5, 2, 7]])
LENGTHS = torch.tensor([6, 11])
STORED = 1 / 32
PAGES, LINES, HEADS = "pages", "lines", "lines of a head"


def shaped(kind: str, width: int, line: int) -> tuple[int, ...]:
    """The shape of a cache for rows of `width` lanes, in lines of so many."""
    lines = (width // line, SIZE, line)
    shapes = {PAGES: (BLOCKS, SIZE, width), LINES: (BLOCKS, *lines), HEADS: (BLOCKS, 1, *lines)}
    return shapes[kind]


def inputs(queries: int, kind: str, lines: tuple[int, int] = (32, 16)) -> Inputs:
    """Hidden states, layers with their scales, gains, the scale, tables, caches, the block table, lengths, slots."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        sizes = ((HCQ, HE), (N * (D + DR), HCQ), (C + DR, HE))
        layers = [each for number, size in enumerate(sizes) for each in whole(20 + 2 * number, *size)]
        floats = 1 + normal(4, HCQ) / 8, 1 + normal(5, C) / 8, normal(3, N * (D + E), C) / 8
        fixed = [*layers, *(each.to(dtype) for each in floats), torch.tensor([STORED])]
        x, cos, sin = (each.to(dtype) for each in (normal(8, B, queries, HE), *tables((B, queries))))
        caches = whole_numbers(9, *shaped(kind, C, lines[0])), normal(10, *shaped(kind, DR, lines[1])).to(dtype)
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in fixed)
        return x, *parameters, cos, sin, *caches, TABLE.clone(), LENGTHS.clone(), slots

    return make


Write = Callable[[Tensor, Tensor, Tensor], None]
Store = Callable[[Tensor, Tensor], Tensor]


def by_inverse(latent: Tensor, scale: Tensor) -> Tensor:
    """Times the inverse of the scale."""
    return torch.round(latent.float() * (1.0 / scale)).clamp(-128, 127).to(torch.int8)


def divided(latent: Tensor, scale: Tensor) -> Tensor:
    """Divided by the scale, bounded before it is rounded."""
    return (latent / scale).clamp(-128, 127).round().char()


def by_number(latent: Tensor, scale: Tensor) -> Tensor:
    """By a scale that is a number."""
    return torch.clamp(torch.round(latent.float() / 0.25), min=-128, max=127).to(torch.int8)


def narrow(latent: Tensor, scale: Tensor) -> Tensor:
    """Between bounds of one magnitude."""
    return torch.round(latent.float() / scale).clamp(-127, 127).to(torch.int8)


def model(
    write: Write, read: Callable[..., tuple[Tensor, Tensor]], store: Store, attend: Attend
) -> Callable[..., Tensor]:
    """A function that writes the rows of some tokens and attends to the cache."""

    def forward(
        x: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor, dkv_scale: Tensor,
        gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, latents: Tensor,
        ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        queries = x.shape[1]
        rows = quantised(x)
        low = norm(multiplied(rows, dq, dq_scale, x.dtype), gain_q)
        q = multiplied(quantised(low), uq, uq_scale, x.dtype).reshape(B, queries, N, -1).transpose(1, 2)
        nope, rope = rope_last(q, cos.unsqueeze(-3), sin.unsqueeze(-3)).split((D, DR), -1)
        latent, turning = multiplied(rows, dkv, dkv_scale, x.dtype).split((C, DR), dim=-1)
        for cache, new in ((latents, store(norm(latent, gain_kv), scale)), (ropes, turned(turning, cos, sin))):
            write(cache, new.flatten(0, 1), slots)
        up = ukv.unflatten(0, (N, -1))[:, :D]
        keys = read(latents, ropes, table)
        seen = in_line(lengths, queries, keys[0].shape[1])
        return attend(nope @ up, rope, *keys, seen, scale)

    return forward


def paged(latents: Tensor, ropes: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of pages."""
    latent, rope = (pages[table].reshape(B, -1, pages.shape[-1]) for pages in (latents, ropes))
    return latent, rope


def lined(latents: Tensor, ropes: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of pages in lines."""
    latent, rope = (
        pages[table].permute(0, 1, 3, 2, 4).reshape(B, table.shape[1] * SIZE, -1) for pages in (latents, ropes)
    )
    return latent, rope


def lined_of_a_head(latents: Tensor, ropes: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a dim for the one head."""
    return lined(latents.squeeze(1), ropes.squeeze(1), table)


def viewed(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows of all pages by their number."""
    pages.view(-1, rows.shape[-1])[slots] = rows


def by_block(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    pages[slots // SIZE, slots % SIZE] = rows


def in_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A place in every line of a block."""
    pages[slots // SIZE, :, slots % SIZE] = rows.unflatten(-1, (-1, pages.shape[-1]))


def in_lines_of_a_head(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same with a dim for the one head."""
    pages[slots // SIZE, :, :, slots % SIZE] = rows.unflatten(-1, (1, -1, pages.shape[-1]))


def numbered(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """A scale that is a number."""
    whole_queries, tokens = quantised(q)
    scores = (whole_queries.float() * tokens) @ (latent.float() * 0.25).unsqueeze(1).mT
    scores = scores + rope.float() @ k_rope.float().unsqueeze(1).mT
    shares = (scores * SCALE).masked_fill(~seen, -math.inf).softmax(-1)
    return (shares @ (latent.float() * 0.25).unsqueeze(1)).to(q.dtype)


def doubled(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Another scale than that of the rows that are written."""
    return explicit(q, rope, latent, k_rope, seen, scale * 2)


EXAMPLES = (
    Example("pages through a view", model(viewed, paged, by_inverse, explicit), inputs(1, PAGES)),
    Example("several tokens by block", model(by_block, paged, divided, explicit), inputs(2, PAGES)),
    Example("lines", model(in_lines, lined, divided, restored), inputs(1, LINES)),
    Example("lines of a head", model(in_lines_of_a_head, lined_of_a_head, by_inverse, explicit), inputs(2, HEADS)),
    Example("a scale that is a number", model(in_lines, lined, by_number, numbered), inputs(1, LINES)),
)
REJECTS = (
    Example("another scale", model(in_lines, lined, divided, doubled), inputs(1, LINES), "with another scale"),
    Example(
        "shorter lines",
        model(in_lines, lined, divided, explicit),
        inputs(1, LINES, (8, 8)),
        "lines of 8 numbers, not of 32",
    ),
    Example("other bounds", model(in_lines, lined, narrow, explicit), inputs(1, LINES), "bounded by -127 and 127"),
)
