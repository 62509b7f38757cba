"""What stands before attention over caches of whole numbers by channel, as serving code writes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_attention_whole import in_line
from patterns.examples.mla_prolog import HE, B, D, E, N, norm, tables, turned
from patterns.examples.mla_prolog_quantised import multiplied, whole
from patterns.examples.quantisation import quantised, scales
from patterns.examples.quantisation import weights as whole_numbers

BLOCKS, SIZE, HCQ, C, DR = 9, 4, 48, 64, 32
TABLE = torch.tensor([[3, 8, 1], [5, 2, 7]])
LENGTHS = torch.tensor([6, 11])
SCALE = (D + DR) ** -0.5


def inputs(queries: int, *heads: int, batch: int = B, of_all: bool = False, line: int = 0) -> Inputs:
    """Hidden states, layers, gains, W_ukv, both scales, tables, caches, the block table, lengths, slots."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        uq = whole(22, N * (D + DR), HCQ)
        floats = normal(0, HCQ, HE) / 8, normal(2, C + DR, HE) / 8, 1 + normal(4, HCQ) / 8, 1 + normal(5, C) / 8
        dq, dkv, gain_q, gain_kv = (each.to(dtype) for each in floats)
        ukv = (normal(3, N * (D + E), C) / 8).to(dtype)
        of_latent, of_rope = (scales(30 + width, 1 if of_all else width) * 4 for width in (C, DR))
        fixed = dq, *uq, dkv, gain_q, gain_kv, ukv, of_latent, of_rope
        x, cos, sin = (each.to(dtype) for each in (normal(8, batch, queries, HE), *tables((batch, queries), DR)))
        shapes = ((SIZE, *heads, width) if not line else (width // line, SIZE, line) for width in (C, DR))
        caches = (whole_numbers(9 + n, BLOCKS, *shape) for n, shape in enumerate(shapes))
        table, lengths = TABLE[:batch].clone(), LENGTHS[:batch].clone()
        at = lengths[:, None] - queries + torch.arange(queries)
        slots = (table.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in fixed)
        return x, *parameters, cos, sin, *caches, table, lengths, slots

    return make


Store = Callable[[Tensor, Tensor], Tensor]
Write = Callable[[Tensor, Tensor, Tensor], None]


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """Divided by the scale."""
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)


def by_inverse(x: Tensor, scale: Tensor) -> Tensor:
    """Times its inverse, bounded before it is rounded."""
    return torch.round(torch.clamp(x.float() * scale.reciprocal(), -128, 127)).char()


def by_number(x: Tensor, scale: Tensor) -> Tensor:
    """By a scale that is a number."""
    return (x.float() * 16).round().clamp(-128, 127).to(torch.int8)


def narrow(x: Tensor, scale: Tensor) -> Tensor:
    """Between bounds of one magnitude."""
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8)


def rows_of(pages: Tensor, table: Tensor) -> Tensor:
    """The rows of the pages that a table names."""
    return pages[table].reshape(table.shape[0], -1, pages.shape[-1])


def rows_of_lines(pages: Tensor, table: Tensor) -> Tensor:
    """The same of pages [Block, A, Size, L]."""
    return pages[table].transpose(2, 3).reshape(table.shape[0], table.shape[1] * SIZE, -1)


def model(
    write: Write, store: Store = divided, power: int = 1, read: Callable[[Tensor, Tensor], Tensor] = rows_of
) -> Callable[..., Tensor]:
    """A function that writes the rows of some tokens and attends to the caches, read by a power of their scales."""

    def forward(
        x: Tensor, dq: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor,
        of_latent: Tensor, of_rope: Tensor, cos: Tensor, sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor,
        lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        batch, queries = x.shape[:2]
        low = norm(linear(x, dq), gain_q)
        q = multiplied(quantised(low), uq, uq_scale, x.dtype).view(batch, queries, N, -1).transpose(1, 2)
        nope, rope = q.split((D, DR), dim=-1)
        rope = turned(rope, cos.unsqueeze(-3), sin.unsqueeze(-3))
        latent, turning = linear(x, dkv).split((C, DR), dim=-1)
        write(latents, store(norm(latent, gain_kv), of_latent).flatten(0, 1), slots)
        write(ropes, store(turned(turning, cos, sin), of_rope).flatten(0, 1), slots)
        latent, k_rope = (
            (read(pages, table).unsqueeze(1).float() * scale**power).to(x.dtype)
            for pages, scale in ((latents, of_latent), (ropes, of_rope))
        )
        up = ukv.unflatten(0, (N, -1))[:, :D]
        scores = (nope @ up @ latent.mT + rope @ k_rope.mT) * SCALE
        seen = in_line(lengths, queries, latent.shape[2])
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ latent

    return forward


def viewed(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows of all pages by their number."""
    pages.view(-1, rows.shape[-1])[slots] = rows


def of_a_head(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same of pages [Block, Size, 1, D]."""
    pages.view(-1, 1, rows.shape[-1])[slots] = rows.unsqueeze(1)


def by_block(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    pages[slots // SIZE, slots % SIZE] = rows


def in_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A place in every line of a block."""
    pages[slots // SIZE, :, slots % SIZE] = rows.unflatten(-1, (-1, pages.shape[-1]))


def two_in_a_row(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, Size, 2, D] that take two tokens of a sequence at one slot."""
    pages.view(-1, *pages.shape[2:])[slots.view(B, 2)[:, 0]] = rows.view(B, 2, -1)


EXAMPLES = (
    Example("a token", model(viewed), inputs(1)),
    Example("a token of one sequence", model(viewed), inputs(1, batch=1)),
    Example("several tokens, times the inverse", model(viewed, by_inverse), inputs(2)),
    Example("pages of one head, a scale of all channels", model(of_a_head), inputs(2, 1, of_all=True)),
    Example("lines", model(in_lines, read=rows_of_lines), inputs(2, line=32)),
    Example("a scale that is a number", model(by_block, by_number), inputs(1)),
    Example("read by other scales", model(viewed, divided, 2), inputs(1)),
)
REJECTS = (
    Example("short lines", model(in_lines, read=rows_of_lines), inputs(1, line=16), "in lines of 16 numbers"),
    Example("other bounds", model(viewed, narrow), inputs(1), "bounded by -127 and 127"),
    Example("two tokens at a slot", model(two_in_a_row), inputs(2, 2), "hold several heads"),
)
