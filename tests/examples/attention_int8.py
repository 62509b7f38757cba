"""Attention over keys and values in int8 as serving code writes it (C8 caches), and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Example
from tests.examples.attention_pages import BLOCKS, LENGTHS, ROOM, SIZE, TABLE
from tests.examples.inputs import Inputs, Part, fixed, tensors
from tests.examples.masks import behind, below
from tests.examples.quantisation import scales, weights

B, N, M, D = 2, 4, 2, 32
CHANNELS, HEADS, ALL = (1, M, 1, D), (M, 1, 1), (1,)
ROWS, PAGE, OF_HEADS = (
    (B, M, ROOM, D),
    (BLOCKS, SIZE, M, D),
    (BLOCKS, M, SIZE, D),
)
Attend = Callable[..., Tensor]


def cache(*shape: int) -> list[Tensor]:
    """Keys and values."""
    return [weights(seed, *shape) for seed in (1, 2)]


def parameters(*shape: int, seed: int = 3) -> list[Tensor]:
    """Scales of both, in the dtype of the model."""
    return [fixed(scales(each, *shape).double()) for each in (seed, seed + 1)]


def zeros(*shape: int) -> list[Tensor]:
    """Zero points of both, whole numbers in the dtype of the model."""
    return [fixed((weights(seed, *shape) // 8).double()) for seed in (5, 6)]


def inputs(held: tuple[int, ...], *scale: int, queries: int = 1, more: tuple[Part, ...] = ()) -> Inputs:
    """Queries, an int8 cache of these dims, scales, lengths, the block table, and more."""
    return tensors((B, N, queries, D), *cache(*held), *parameters(*scale), LENGTHS, TABLE, *more)


def attended(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """By matmuls."""
    k, v = (each.repeat_interleave(N // M, 1) for each in (k, v))
    scores = (q @ k.mT).float() * D**-0.5
    return scores.masked_fill(behind(lengths, ROOM), -math.inf).softmax(-1).to(v.dtype) @ v


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """By sdpa."""
    return scaled_dot_product_attention(q, k, v, below(lengths, ROOM), enable_gqa=True)


def stored(x: Tensor, table: Tensor) -> Tensor:
    """Rows as they are."""
    return x


def of_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of pages [Block, Size, M, D]."""
    return pages[table].flatten(1, 2).transpose(1, 2)


def of_heads(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of pages [Block, M, Size, D]."""
    return pages[table].transpose(1, 2).flatten(2, 3)


def of_lines(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of pages in NZ."""
    return pages[table].permute(0, 2, 1, 4, 3, 5).reshape(B, M, ROOM, -1)


def over(read: Callable[[Tensor, Tensor], Tensor] = stored, attend: Attend = attended) -> Attend:
    """Attention to int8 times their scales."""

    def forward(
        q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
    ) -> Tensor:
        k, v = (read(each, table).to(q.dtype) * scale for each, scale in ((keys, by), (values, of)))
        return attend(q, k, v, lengths)

    return forward


def wide(q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """All of it in float32."""
    k, v = (each.float() * scale.float() for each, scale in ((keys, by), (values, of)))
    return attended(q.float(), k, v, lengths).to(q.dtype)


def before(q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """Scales of channels on whole rows of all heads, before these are told apart."""
    rows = [each[table].flatten(1, 2).flatten(2) for each in (keys, values)]
    k, v = (
        (each.to(q.dtype) * scale.flatten()).view(B, ROOM, M, D).transpose(1, 2)
        for each, scale in zip(rows, (by, of), strict=True)
    )
    return by_sdpa(q, k, v, lengths)


def behind_products(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """Scales of heads on the scores and on the result."""
    by, of = (each.repeat_interleave(N // M, 0) for each in (by, of))
    k, v = (each.to(q.dtype).repeat_interleave(N // M, 1) for each in (keys, values))
    scores = (q @ k.mT).float() * by.float() * D**-0.5
    return (scores.masked_fill(behind(lengths, ROOM), -math.inf).softmax(-1).to(v.dtype) @ v) * of


def shifted(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """With zero points of both."""
    by, of, lengths, table, zero, zero_of = more
    k, v = (
        (of_pages(each, table).to(q.dtype) - z) * scale for each, z, scale in ((keys, zero, by), (values, zero_of, of))
    )
    return attended(q, k, v, lengths)


def shifted_keys(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """With zero points of keys alone."""
    by, of, lengths, table, zero, _ = more
    k, v = (of_pages(keys, table).float() - zero.float()) * by.float(), of_pages(values, table).to(q.dtype) * of
    return attended(q, k.to(q.dtype), v, lengths)


def with_sink(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """Zero points of keys beside a logit that is none of a key."""
    by, of, lengths, _, zero, _ = more
    k, v = (keys.to(q.dtype) - zero) * by, values.to(q.dtype) * of
    k, v = (each.repeat_interleave(N // M, 1) for each in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(behind(lengths, ROOM), -math.inf)
    sink = torch.arange(N, dtype=q.dtype).view(1, -1, 1, 1).expand(B, -1, 1, 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v


def between(q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """With a zero point between two numbers."""
    return attended(q, keys.to(q.dtype) * by, (values.to(q.dtype) - 0.5) * of, lengths)


def doubled(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """With zero points that are multiplied first."""
    by, of, lengths, _, _, zero_of = more
    return attended(q, keys.to(q.dtype) * by, (values.to(q.dtype) - 2 * zero_of) * of, lengths)


def narrow_values(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """Values of fewer lanes than keys."""
    half = D // 2
    return attended(q, keys.to(q.dtype) * by, values[..., :half].to(q.dtype) * of[..., :half], lengths)


def narrow_keys(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """Keys of fewer lanes than values; every key is seen, as encoders attend."""
    half = D // 2
    k, v = keys[..., :half].to(q.dtype) * by[..., :half], values.to(q.dtype) * of
    return scaled_dot_product_attention(q[..., :half], k, v, enable_gqa=True)


def narrowed(q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """By scales in float32."""
    k, v = ((each.float() * scale).to(q.dtype) for each, scale in ((keys, by), (values, of)))
    return attended(q, k, v, lengths)


def only_keys(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """Values are floats."""
    return attended(q, keys.to(q.dtype) * by, of.expand(B, M, ROOM, D), lengths)


def tokens_of(held: tuple[int, ...], *scale: int) -> Inputs:
    """Scales of each token in float32, beside the rows."""
    return tensors((B, N, 1, D), *cache(*held), *(scales(seed, *scale) for seed in (3, 4)), LENGTHS, TABLE)


def by_tokens(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:  # fmt: skip
    """Scales in float32, of each token and head."""
    k, v = ((each.float() * scale).to(q.dtype) for each, scale in ((keys, by), (values, of)))
    return attended(q, k, v, lengths)


def by_tokens_of_pages(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:  # fmt: skip
    """Scales that lie in pages as well."""
    k, v, by, of = (of_pages(each, table) for each in (keys, values, by, of))
    return by_tokens(q, k, v, by, of, lengths, table)


def by_pages(
    q: Tensor, keys: Tensor, values: Tensor, by: Tensor, of: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:  # fmt: skip
    """A scale of each page and head, [Block, M]."""
    k, v = (of_pages(each, table) for each in (keys, values))
    by, of = (each[table].repeat_interleave(SIZE, dim=1).transpose(1, 2).unsqueeze(-1) for each in (by, of))
    return by_tokens(q, k, v, by, of, lengths, table)


def tokens_and_zeros(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """A zero point beside scales of each token: it does not cancel."""
    by, of, lengths, _, zero, _ = more
    return attended(q, (keys.to(q.dtype) - zero) * by, values.to(q.dtype) * of, lengths)


ZEROS = tuple(zeros(M, 1, D))
W = 64
"""Lanes of which a row in lines of 32 has two lines."""
LINES = tensors((B, N, 1, W), *cache(BLOCKS, M, W // 32, SIZE, 32), *parameters(1, M, 1, W), LENGTHS, TABLE)
EXAMPLES = (
    Example("int8 pages in lines", over(of_lines), LINES),
    Example("int8 rows", over(), inputs(ROWS, *CHANNELS)),
    Example("int8 rows, sdpa", over(attend=by_sdpa), inputs(ROWS, *CHANNELS)),
    Example("int8 rows, scales of heads", over(), inputs(ROWS, *HEADS)),
    Example("int8 rows, one scale", over(), inputs(ROWS, *ALL)),
    Example("int8 rows, float32", wide, inputs(ROWS, *CHANNELS)),
    Example("int8 rows, several queries", over(), inputs(ROWS, *CHANNELS, queries=3)),
    Example("int8 rows, scales behind products", behind_products, inputs(ROWS, *HEADS)),
    Example("int8 pages", over(of_pages), inputs(PAGE, *CHANNELS)),
    Example("int8 pages, scales of whole rows", before, inputs(PAGE, *CHANNELS)),
    Example("int8 pages of heads", over(of_heads, by_sdpa), inputs(OF_HEADS, *CHANNELS)),
    Example("int8 pages, zero points", shifted, inputs(PAGE, *CHANNELS, more=ZEROS)),
    Example("int8 rows, scales of tokens", by_tokens, tokens_of(ROWS, B, M, ROOM, 1)),
    Example("int8 pages, scales of tokens", by_tokens_of_pages, tokens_of(PAGE, BLOCKS, SIZE, M, 1)),
    Example("int8 pages, scales of pages", by_pages, tokens_of(PAGE, BLOCKS, M)),
    Example("int8 pages, zero points of keys", shifted_keys, inputs(PAGE, *HEADS, more=ZEROS)),
)


def of_float32(*shape: int) -> Inputs:
    """Scales that only float32 holds."""
    by = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 64 for seed in (3, 4)]
    return tensors((B, N, 1, D), *cache(*ROWS), *by, LENGTHS, TABLE)


REJECTS = (
    Example("int8 rows, scales of sequences", over(), inputs(ROWS, B, 1, 1, 1), "or of each sequence"),
    Example(
        "int8 rows, tokens and zero points", tokens_and_zeros, inputs(ROWS, B, M, ROOM, 1, more=ZEROS), "and an offset"
    ),
    Example("int8 keys", only_keys, inputs(ROWS, *CHANNELS), "alone are int8"),
    Example("int8 rows, a zero point between numbers", between, inputs(ROWS, *HEADS), "the offset is -0.5"),
    Example(
        "int8 rows, zero points doubled",
        doubled,
        inputs(ROWS, *CHANNELS, more=ZEROS),
        "the dtype of the queries rounds their offset",
    ),
    Example(
        "int8 rows, wider values", narrow_keys, inputs(ROWS, *CHANNELS, queries=3), "they have more lanes than keys"
    ),
    Example(
        "int8 rows, narrower values",
        narrow_values,
        inputs(ROWS, *CHANNELS),
        "they have fewer channels than keys, and a",
    ),
    Example("int8 rows, a sink beside zero points", with_sink, inputs(ROWS, *CHANNELS, more=ZEROS), "does not cancel"),
)
"""What is read as floats, after the model has made such of it."""
FORM = "written"

TRIED = {"attention": (*EXAMPLES, *(Example(e.name, e.function, e.inputs, e.refusal, FORM) for e in REJECTS))}
