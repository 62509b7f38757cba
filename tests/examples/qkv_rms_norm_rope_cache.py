"""Heads as models norm, rotate and store them in pages of NZ, in floats and int8, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, fixed, in_dtype, normal, symbolic, tables, under
from tests.examples.quantisation import scales
from tests.examples.rope import half, interleaved

H, NQ, NK, D, BLOCKS, SIZE = 48, 4, 2, 64, 3, 4
WIDTHS = (NQ * D, NK * D, NK * D)
SLOTS = (3, 10, 0, 7, 5, 2)
Heads = tuple[Tensor, Tensor, Tensor]
Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
Write = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Setting:
    """Tokens [*lead], pages, and what the model holds: a bias, scales of this shape for both caches, zero points."""

    lead: tuple[int, ...] = (6,)
    pages: tuple[int, ...] = (BLOCKS, NK * D // 16, SIZE, 16)
    widths: tuple[int, ...] = WIDTHS
    bias: bool = False
    scale: tuple[int, ...] | None = None
    zero: bool = False
    wide_tables: bool = False
    held: bool = True
    row: tuple[int, ...] = (NK, D)

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """x, cos, sin, slots, both caches, both gains, weight, then bias, scales and zero points where there are."""
        weight = normal(3, sum(self.widths), H) / 8
        parts = [normal(1, *self.lead, H), *tables(2, *self.lead, D)]
        caches = [normal(seed, *self.pages) for seed in (4, 5)]
        if self.scale is not None:
            caches = [(each * 32).to(torch.int8) for each in caches]
        parts += [torch.tensor(SLOTS[: torch.Size(self.lead).numel()]), *caches]
        held = [normal(seed, D) / 4 + 1 for seed in (6, 7)]
        held += [fixed(weight) if self.held else weight]
        held += [fixed(normal(8, sum(self.widths)))] if self.bias else []
        if self.scale is not None:
            held += [fixed(scales(seed, *self.scale).double()) for seed in (9, 10)]
            held += [fixed((normal(seed, *self.scale) * 4).round()) for seed in (11, 12)] if self.zero else []
        made = [in_dtype(each, dtype) for each in (*parts, *held)]
        if self.wide_tables:
            made[1:3] = [each.to(torch.promote_types(dtype, torch.float32)) for each in made[1:3]]
        return tuple(made)


def norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """As Qwen3 writes it."""
    wide = x.float() if x.dtype != torch.float64 else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return gain * wide.to(x.dtype)


def split(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> Heads:
    """One projection, cut into lanes."""
    q, k, v = F.linear(x, weight, bias).split(tuple(widths), dim=-1)[:3]
    return q.unflatten(-1, (-1, D)), k.unflatten(-1, (-1, D)), v.unflatten(-1, (-1, D))


def cut(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> Heads:
    """One projection, cut into heads."""
    heads = F.linear(x, weight, bias).unflatten(-1, (-1, D))
    q, k, v = heads.split([each // D for each in widths], dim=-2)
    return q, k, v


def apart(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> Heads:
    """Three projections."""
    weights, biases = weight.split(tuple(widths)), [None] * 3 if bias is None else bias.split(tuple(widths))
    q, k, v = (F.linear(x, *each).unflatten(-1, (-1, D)) for each in zip(weights, biases, strict=True))
    return q, k, v


def biased_alone(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> Heads:
    """Three projections, of which the first alone has a bias."""
    weights, first = weight.split(tuple(widths)), None if bias is None else bias[: widths[0]]
    q, k, v = (F.linear(x, *each).unflatten(-1, (-1, D)) for each in zip(weights, (first, None, None), strict=True))
    return q, k, v


def changed(x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> Heads:
    """Queries, keys and values that something else has touched."""
    q, k, v = split(x, weight, bias, widths)
    return q.relu(), k.relu(), v.relu()


def lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows [T, M, D] into [Block, M · D / L, Size, L]."""
    pages[slots // SIZE, :, slots % SIZE] = rows.reshape(rows.shape[0], pages.shape[1], pages.shape[3])


def lines_of_heads(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows [T, M, D] into [Block, M, D / L, Size, L]."""
    pages[slots // SIZE, :, :, slots % SIZE] = rows.unflatten(-1, (pages.shape[2], -1))


def whole(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Whole rows [T, M, D] into [Block, Size, M, D]."""
    pages[slots // SIZE, slots % SIZE] = rows


def divided(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """int8(x / scale + zero)."""
    y = x / scale
    return (y if zero is None else y + zero).round().clamp(-128, 127).to(torch.int8)


def multiplied(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """int8(x · scale)."""
    return (x * scale).round().clamp(-128, 127).to(torch.int8)


def written(
    name: str,
    inputs: Setting,
    of: Callable[..., Heads] = split,
    write: Write = lines,
    refusal: str = "",
    heads_first: str = "",
    turn: Turn = half,
    quantise: Callable[..., Tensor] = divided,
    eps: float = 1e-6,
    given: Inputs | None = None,
) -> Example:
    """Gives queries and writes keys and values; keys are normalised with `eps`, and `given` are other inputs.

    Heads come first for the "norm" or for the "rotation", or never.
    """

    def forward(x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        keys, values, gain_q, gain_k, weight, *more = held
        bias = more.pop(0) if inputs.bias else None
        q, k, v = of(x, weight, bias, inputs.widths)
        axis = -3 if heads_first else -2
        cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        if heads_first == "norm":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = norm(q, gain_q), norm(k, gain_k, eps)
        if heads_first == "rotation":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = (turn(each, cos, sin).to(x.dtype) for each in (q, k))
        k = k.transpose(1, 2) if heads_first else k
        for number, (pages, rows) in enumerate(((keys, k), (values, v))):
            rows = rows.reshape(-1, *inputs.row)
            if more:
                rows = quantise(rows, more[number], more[number + 2] if inputs.zero else None)
            write(pages, rows, slots)
        return q * 2, *(each * 2 for each in (keys, values) if each.dtype != torch.int8)

    return Example(name, forward, inputs if given is None else given, refusal)


FLAT, BATCH = Setting(), Setting(lead=(2, 3))
OF_HEADS = (BLOCKS, NK, D // 16, SIZE, 16)
EXAMPLES = (
    written("one projection", FLAT),
    written("one projection, cut into heads", FLAT, cut),
    written("sequences", BATCH, cut),
    written("heads first", BATCH, heads_first="norm"),
    written("a token of each sequence, heads first", Setting(lead=(3, 1)), heads_first="norm"),
    written("heads first behind the norm", BATCH, apart, heads_first="rotation"),
    written("a token of each sequence, heads first behind the norm", Setting(lead=(3, 1)), heads_first="rotation"),
    written("three projections", FLAT, apart),
    written("three projections, heads first", BATCH, apart, heads_first="norm"),
    written("three projections with biases", replace(BATCH, bias=True), apart),
    written("three projections, one with a bias", replace(BATCH, bias=True), biased_alone),
    written("one projection with a bias", replace(FLAT, bias=True)),
    written("weights that are no Parameters", replace(FLAT, held=False), apart),
    written("behind something else", BATCH, changed),
    written("behind something else, heads first", BATCH, changed, heads_first="rotation"),
    written("beside a gate", replace(FLAT, widths=(*WIDTHS, 32))),
    written("lines of each head", replace(FLAT, pages=OF_HEADS), write=lines_of_heads),
    written("tables in float32", replace(BATCH, wide_tables=True), heads_first="norm"),
    written("pairs", FLAT, turn=interleaved, refusal="the lanes are rotated in interleaved order"),
    written("two epsilons", FLAT, eps=1e-5, refusal="queries are normalised with"),
    written(
        "whole rows",
        replace(FLAT, pages=(BLOCKS, SIZE, NK, D)),
        write=whole,
        refusal="pages are [Block, Size, N, D], whole rows",
    ),
    written("short lines", replace(FLAT, pages=(BLOCKS, NK * D // 8, SIZE, 8)), refusal="read as lines of 8 lanes"),
    written("any number of tokens", FLAT, given=symbolic(FLAT, range(4), (0,)), refusal="their number is symbolic"),
)
INT8 = replace(FLAT, pages=(BLOCKS, NK * D // 32, SIZE, 32), scale=(NK, D))
BY_HEAD, BY_LANE, BY_ONE = (replace(INT8, scale=each) for each in ((NK, 1), (D,), (1,)))
OF_INT8 = (
    written("by channel", INT8),
    written("by channel of heads first", replace(INT8, lead=(2, 3)), apart, heads_first="norm"),
    written("by head", BY_HEAD, cut),
    written("behind something else", replace(INT8, lead=(2, 3)), changed),
    written("by lane", BY_LANE),
    written("by one scale", BY_ONE),
    written("with zero points", replace(INT8, zero=True)),
    written("times a scale", INT8, quantise=multiplied),
    written(
        "scales of lines",
        replace(INT8, scale=(32,), row=(NK * D // 32, 32)),
        refusal="they differ among the lines of a page",
    ),
    written(
        "short lines",
        replace(INT8, pages=FLAT.pages),
        refusal="lines of 16 lanes; npu_qkv_rms_norm_rope_cache requires lines of 32",
    ),
)

TRIED = {"qkv_rms_norm_rope_cache": (*EXAMPLES, *under("int8", OF_INT8))}
