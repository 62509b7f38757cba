"""h = x + residual; y = layer_norm(h) · weight + bias, as encoders and decoders write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import ADD_LAYER_NORM, Form, LookAlike, Spelling, activations, build, look_alike, weights, wide

from .layer_norm import EPS
from .layer_norm import reference as layer_norm_reference

D = 64


class Norm(nn.LayerNorm):
    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__(weight.shape[-1], eps=EPS, bias=bias is not None)
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class PostNorm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.LayerNorm, self.dropout = Norm(weight, bias), nn.Dropout(0.1)

    def forward(self, x, residual):
        hidden_states = self.dropout(x)
        return self.LayerNorm(hidden_states + residual)


class PreNorm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.ln = Norm(weight, bias)

    def forward(self, x, residual):
        hidden_states = residual + x
        residual = hidden_states
        hidden_states = self.ln(hidden_states)
        return hidden_states, residual


class NoBias(PreNorm):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__(weight, bias)
        self.ln = Norm(weight)


class NormInFloat(PreNorm):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__(weight, bias)
        self.ln = InFloat(weight, bias)


class InFloat(Norm):
    def forward(self, x):
        return super().forward(x.type(torch.promote_types(x.dtype, torch.float32))).type(x.dtype)


def in_place(x, residual, weight, bias):
    x = x * 0.5
    x += residual
    return F.layer_norm(x, (D,), weight, bias, EPS), x


def scaled_branch(x, residual, weight, bias):
    h = residual + weight * x
    return F.layer_norm(h, (D,), weight, bias, eps=EPS), h


def parallel_branches(x, residual, weight, bias):
    h = torch.tanh(x) + x + residual
    return torch.layer_norm(h, (D,), weight, bias, EPS), h


def by_hand(x, residual, weight, bias):
    h = x + residual
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return weight * ((h - mean) / torch.sqrt(variance + EPS)) + bias, h


def unrounded_sum(x, residual, weight, bias):
    h = x.float() + residual.float()
    y = F.layer_norm(h, (D,), weight.float(), bias.float(), EPS)
    return y.to(x.dtype), h.to(x.dtype)


def _norm(h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm_reference(h, weight, bias)


def _both(h: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _norm(h, weight, bias), h


def _inputs(B: int, S: int) -> tuple[Tensor, ...]:
    """x and residual [B, S, D], weight and bias [D]."""
    lines = weights(93, D), weights(94, D, center=0.0)
    return activations(91, B, S, D), activations(92, B, S, D), *lines


Meaning = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _spelling(label: str, form: Form, note: str, meaning: Meaning = lambda x, r, w, b: _both(x + r, w, b),
              in_float: bool = False) -> Spelling:  # fmt: skip
    def make(dtype: torch.dtype, B: int, S: int):
        x, residual, *lines = _inputs(B, S)
        kept = tuple(each.to(wide(dtype) if in_float else dtype) for each in lines)
        return build(form, (x.to(dtype), residual.to(dtype)), kept)

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return meaning(*_inputs(B, S))

    return Spelling(f"add_layer_norm/{label}", "add_layer_norm", make, {ADD_LAYER_NORM: 1}, expected, note)


SPELLINGS = (
    _spelling("post_norm", PostNorm, "BERT and its kin: the sum is not read again",
              lambda x, r, w, b: (_norm(x + r, w, b),)),
    _spelling("pre_norm", PreNorm, "GPT-2, OPT, Whisper, ViT: the next norm, and the residual"),
    _spelling("no_bias", NoBias, "nanoGPT, ModernBERT", lambda x, r, w, b: _both(x + r, w, torch.zeros_like(b))),
    _spelling("norm_in_float", NormInFloat, "OpenAI's CLIP: the norm in float32, with its weight", in_float=True),
    _spelling("in_place", in_place, "x += branch on a local", lambda x, r, w, b: _both(x / 2 + r, w, b)),
    _spelling("scaled_branch", scaled_branch, "timm's layer scale", lambda x, r, w, b: _both(r + w * x, w, b)),
    _spelling("parallel_branches", parallel_branches, "GPT-NeoX, Falcon: attention and feed-forward side by side",
              lambda x, r, w, b: _both(x.tanh() + x + r, w, b)),
    _spelling("by_hand", by_hand, "original transformer code"),
    _spelling("unrounded_sum", unrounded_sum, "the residual stream of this layer in float32"),
)  # fmt: skip


# what resembles them -----------------------------------------------------------------------------------------------


def embeddings(x, residual, weight, bias):
    h = x + bias
    return F.layer_norm(h, (D,), weight, bias, EPS), h


def branch_alone(x, residual, weight, bias):
    return residual + F.layer_norm(x, (D,), weight, bias, EPS), x + residual


def unbiased(x, residual, weight, bias):
    h = x + residual
    return weight * (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, keepdim=True) + EPS) + bias, h


def centred_by_residual(x, residual, weight, bias):
    h = x + residual
    d = h - residual.mean(-1, keepdim=True)
    return weight * d * torch.rsqrt(h.var(-1, correction=0, keepdim=True) + EPS) + bias, h


_look = partial(look_alike, "add_layer_norm", forbid=(ADD_LAYER_NORM,), inputs=_inputs)
LOOKALIKES: tuple[LookAlike, ...] = (
    _look(
        embeddings,
        "one of them is broadcast or multiplied",
        meaning=None,
        note="embeddings of BERT: a row for all tokens",
    ),
    _look(branch_alone, "", meaning=lambda x, r, w, b: _both(x + r, w, b), note="the norm of one addend"),
    _look(unbiased, "unbiased", meaning=lambda x, r, w, b: _both(x + r, w, b)),
    _look(
        centred_by_residual,
        "what is divided by the root of the variance",
        meaning=lambda x, r, w, b: _both(x + r, w, b),
    ),
)
