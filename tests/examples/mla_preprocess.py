"""What stands before latent attention over pages with all layers in W8A8, and what only looks like it.

`tried` puts a model together: layers by token or static, rotation, caches in floats or int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples import caches
from tests.examples import latent_model as mla
from tests.examples.caches import SIZE, Write, in_nz, shapes, viewed
from tests.examples.inputs import Inputs, under
from tests.examples.latent_attention_atb_int8 import written_out
from tests.examples.latent_model import LAYERS, Encoding, Given, Layers, Rows, Setting, changed
from tests.examples.mla_prolog_int8 import Quantise, by_channel, by_tensor
from tests.examples.quantisation import int8, product
from tests.examples.rope import half


def setting(
    queries: int = 1, *nz: int, heads: tuple[int, ...] = (), size: int = SIZE, c: int = 32, dr: int = 16, **other: Any
) -> Setting:
    """Inputs with all layers in W8A8 and pages, with dims for heads or in NZ of so many lanes."""
    pages = shapes(c, dr, *nz, heads=heads, size=size)
    return replace(Setting(queries, pages, LAYERS, hcq=96, gains=4), size=size, c=c, dr=dr, **other)


def of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes rotated, the first of each pair in the first half of the result."""
    return half(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def biased(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias among the whole numbers."""
    return (product(rows, weight) + bias).float() * scale


def bare(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """No bias."""
    return product(rows, weight).float() * scale


def late(rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias behind the scales."""
    return product(rows, weight).float() * scale + bias.float() / 4096


def times_heads(query: Tensor, scales: Tensor, least: int = -128) -> Tensor:
    """Absorbed queries times a scale of each head."""
    return int8(query.float() * scales.float()[:, None, None], least)


def over_int8(nope: Tensor, rope: Tensor, rows: Rows, g: Given, query: Quantise = times_heads) -> Tensor:
    """Queries that the model absorbs and `query` quantises, over an int8 latent of lengths without the new tokens."""
    at = g.seen[:, None] + torch.arange(nope.shape[2])
    seen = torch.arange(rows[0].shape[1]) <= at[:, None, :, None]
    return written_out(query(nope @ g.up, g.of_queries), rope, *rows, seen, g.of_scores, g.of_values)


def rounded(quotient: Callable[[Tensor, Tensor, Tensor], Tensor], least: int = -128) -> mla.QuantiseRows:
    """Rows in int8 by what is computed of them, their scale and their zero point."""
    return lambda x, scale, zero: int8(quotient(x.float(), scale.float(), zero), least)


TOKEN = Layers(eps=1e-6)
STATIC = replace(TOKEN, quantise=rounded(lambda x, scale, zero: x / scale + zero), shift=torch.add, multiply=biased)
STORED = by_tensor(lambda x, scale: int8(x.float() / scale.float()), "of_latent")
SHIFTED = by_tensor(lambda x, scale: int8(x.float() / scale.float() + 3), "of_latent")
INT8: dict[str, Any] = dict(write=in_nz, encoding=STORED, attend=over_int8)
ONE, TWO = setting(), setting(2)
# Of other gains a number in float16 lies halfway between two int8, and the one that it becomes decides the result.
STATIC_ONE = setting(static=True, gains=6)
INT8_ONE = replace(setting(1, 32, 16, c=64, dr=32), int8_caches=(True, False))


def tried(
    name: str,
    of: Layers = TOKEN,
    given: Inputs = ONE,
    refusal: str = "",
    write: Write = viewed,
    encoding: Encoding = Encoding(),
    attend: mla.Attention = mla.expanded,
    turn: mla.Turn = of_pairs,
    row: float = 1.0,
    **steps: Any,
) -> Example:
    """A model that writes the rows of a token, or of several, and attends to the pages; `steps` are those of layers."""
    rotate, layers = partial(mla.rope_last, turn=turn), replace(of, **steps)
    function = mla.model(mla.paged(write, encoding), attend, rotate, mla.Factors(row=row), layers, turn)
    return Example(name, function, given, refusal)


def of_int8(name: str, refusal: str = "", given: Inputs = INT8_ONE, of: Layers = TOKEN, **steps: Any) -> Example:
    """One of an int8 latent, of a token."""
    return tried(name, of, changed(given, seen=lambda lengths: lengths - 1), refusal, **INT8 | steps)


def static(name: str, refusal: str = "", given: Inputs = STATIC_ONE, **steps: Any) -> Example:
    """One of constants."""
    return tried(name, STATIC, given, refusal, **steps)


TOKENS = (
    tried("a token through a view"),
    tried("two tokens by index_copy, rotated by halves", TOKEN, TWO, write=caches.index_copied, turn=half),
    tried("pages of one head", TOKEN, setting(heads=(1,))),
    tried("a token by block", write=caches.by_block),
    tried("a latent times a number", row=1.5),
    tried("a token in lines", TOKEN, setting(1, 16), write=in_nz),
    tried("two tokens in lines of a head", TOKEN, setting(2, 16, heads=(1,)), write=in_nz, turn=half),
    tried("another epsilon", TOKEN, ONE, "a norm adds", eps=1e-5),
    tried("places of unknown range", TOKEN, ONE, "a place in a page is not proven to be below", write=caches.anywhere),
    tried("two tokens at a slot", TOKEN, setting(2, heads=(2,)), "several heads", write=caches.two_in_a_row),
    tried(
        "pages that lie otherwise", TOKEN, changed(ONE, caches.turned), "its pages are not contiguous",
        write=caches.by_block,
    ),
    tried("weights in short lines", TOKEN, setting(he=48), "their rows or columns are no multiple of 32"),
    tried("short lines", TOKEN, setting(1, 8), "read as lines of 8 lanes", write=in_nz),
    tried(
        "both caches in int8", TOKEN, setting(c=64, dr=32, int8_caches=(True, True)),
        "requires dtype(kv_cache) == dtype(input)", encoding=by_channel(),
    ),
)  # fmt: skip
NARROW = partial(times_heads, least=-127)
OTHER_SCALES = changed(
    INT8_ONE, of_queries=lambda x: x.to(torch.bfloat16 if x.dtype == torch.float16 else torch.float16)
)
INT8_LATENTS = (
    of_int8("a token"),
    of_int8("a token by halves", turn=half),
    of_int8("a token, constants", "", replace(INT8_ONE, static=True), STATIC),
    of_int8("whole rows", "its pages are rows", replace(INT8_ONE, shapes=shapes(64, 32)), write=viewed),
    of_int8("scales of another dtype", "or multiplied by a number", OTHER_SCALES),
    of_int8("short lines", "lines of 16 lanes", replace(INT8_ONE, shapes=shapes(64, 32, 16))),
    of_int8("other bounds of queries", "queries: they are clamped to -127", attend=partial(over_int8, query=NARROW)),
    of_int8(
        "queries divided", "they are divided by it",
        attend=partial(over_int8, query=lambda query, scales: int8(query.float() / scales.float()[:, None, None])),
    ),
    of_int8("a zero point", "stored with a zero point", encoding=SHIFTED),
)  # fmt: skip
WIDE_ZERO = changed(STATIC_ONE, zero=Tensor.float, zero_q=Tensor.float)
STATICS = (
    static("a token"),
    static(
        "two tokens in lines, no bias", "", setting(2, 16, static=True), write=in_nz, turn=half,
        multiply=bare, shift=TOKEN.shift,
        quantise=lambda x, scale, zero: torch.clamp(x / scale + zero, -128, 127).round().to(torch.int8),
    ),
    static("a token by block", write=caches.by_block),
    static("a token of one sequence", "", setting(batch=1, static=True)),
    static("numbers", quantise=rounded(lambda x, scale, zero: x / 2**-5 + 3)),
    static("no zero point", quantise=rounded(lambda x, scale, zero: x / scale)),
    static(
        "rounded before the zero point",
        quantise=lambda x, scale, zero: ((x.float() / scale.float()).round() + zero).clamp(-128, 127).to(torch.int8),
    ),
    static(
        "a zero point in floats behind the rounding", "added to rounded numbers", WIDE_ZERO,
        quantise=lambda x, scale, zero: ((x.float() / scale.float()).round() + zero).clamp(-128, 127).to(torch.int8),
    ),
    static(
        "bounded before the zero point", "before the zero point is added",
        quantise=rounded(lambda x, scale, zero: (x.float() / scale.float()).clamp(-9, 9) + zero),
    ),
    static(
        "cut off", "cut off toward zero",
        quantise=lambda x, scale, zero: (x.float() / scale.float() + zero).clamp(-128, 127).to(torch.int8),
    ),
    static(
        "a scale of each channel", "not divided by one scale",
        quantise=rounded(lambda x, scale, zero: x / (torch.linspace(1, 2, x.shape[-1]) * scale) + zero),
    ),
    static("other bounds", "clamped to -127", quantise=rounded(lambda x, scale, zero: x / scale + zero, -127)),
    static("a zero point in floats", "so not proven to be a whole number", WIDE_ZERO),
    static(
        "a scale that is rounded", "which the dtype of x rounds",
        quantise=rounded(lambda x, scale, zero: x / 0.0300001 + zero),
    ),
    static(
        "multiplied by the scale", "rows with a zero point are multiplied by it",
        quantise=rounded(lambda x, scale, zero: x * scale + zero),
    ),
    static("a bias behind the scales", "a layer adds one of", multiply=late),
    static("short lines", "read as lines of 8 lanes", setting(1, 8, static=True), write=in_nz),
    static(
        "both caches in int8", "requires dtype(kv_cache) == dtype(input)",
        setting(c=64, dr=32, int8_caches=(True, True), static=True), encoding=by_channel(),
    ),
)  # fmt: skip

TRIED = {"mla_preprocess": (*TOKENS, *under("int8 latent", INT8_LATENTS), *under("static", STATICS))}
