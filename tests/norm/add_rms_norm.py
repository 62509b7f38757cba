"""h = x + residual; y = rms_norm(h) · weight, as decoder layers write it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import ADD_RMS_NORM, RMS_NORM, Form, Spelling, activations, build, weights, wide

from .rms_norm import reference as rms_norm_reference

EPS = 1e-6


def rms_norm(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


def decoder_layer(x, residual, weight):
    hidden_states = residual + x
    residual = hidden_states
    return rms_norm(hidden_states, weight), residual


def branch_first(x, residual, weight):
    x = x + residual
    return rms_norm(x, weight), x


def torch_add(x, residual, weight):
    residual = torch.add(residual, x)
    return F.rms_norm(residual, (residual.shape[-1],), weight, EPS), residual


def without_gain(x, residual, weight):
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), None, EPS), h


def without_gain_in_float(x, residual, weight):
    h = x.float() + residual.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)).to(x.dtype), h.to(x.dtype)


def dropout_in_eval(x, residual, weight):
    h = F.dropout(x, p=0.1, training=False) + residual
    return rms_norm(h, weight), h


def added_in_place(x, residual, weight):
    stream = residual.clone()
    stream.add_(x)
    return rms_norm(stream, weight), stream


def augmented_assignment(x, residual, weight):
    h = x * 0.5
    h += residual
    return rms_norm(h, weight), h


class OptionalResidual(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, residual=None):
        dtype = x.dtype
        if residual is None:
            x = x.float()
            var = x.pow(2).mean(-1, keepdim=True)
            return (self.weight * (x * torch.rsqrt(var + EPS))).to(dtype)
        x = residual = x.float() + residual.float()
        var = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(var + EPS)
        return (self.weight * x).to(dtype), residual.to(dtype)


class ServingModule(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x, residual=None):
        orig_dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x.to(orig_dtype)
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPS)
        x = x.to(orig_dtype) * self.weight
        return x if residual is None else (x, residual)


def all_in_place(x, residual, weight):
    h = x.to(torch.float32, copy=True).add_(residual.float())
    residual = h.to(x.dtype, copy=True)
    h.mul_(torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + EPS))
    return h.to(x.dtype).mul_(weight), residual


def sum_spelled_twice(x, residual, weight):
    norm = F.rms_norm(x + residual, weight.shape, weight=weight, eps=EPS)
    return norm, x + residual


def used_by_the_next_add(x, residual, weight):
    h = residual + x
    return h + F.silu(rms_norm(h, weight))


def only_the_norm(x, residual, weight):
    return rms_norm(x + residual, weight)


def three_terms(x, residual, weight):
    shared = F.relu(x)
    h = x + shared
    h = residual + h
    return rms_norm(h, weight), h


def scaled_branch(x, residual, weight):
    h = residual + x * 0.22
    return rms_norm(h, weight), h


def two_norms_in_a_row(x, residual, weight):
    h = residual + x
    h = h + rms_norm(h, weight)
    return rms_norm(h, weight), h


def norm_around_the_branch(x, residual, weight):
    h = residual + rms_norm(x, weight)
    return rms_norm(h, weight), h


def mean_square_by_hand(x, residual, weight):
    h = (residual + x).float()
    y = h / torch.sqrt((h * h).sum(-1, keepdim=True) / h.shape[-1] + EPS)
    return (y * weight).to(x.dtype), h.to(x.dtype)


def reshaped_tokens(x, residual, weight):
    h = residual.view(-1, residual.shape[-1]) + x.view(-1, x.shape[-1])
    return rms_norm(h, weight).view(x.shape), h.view(x.shape)


def one_plus_weight(x, residual, weight):
    h = residual + x
    y = h.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return (y * (1.0 + weight.float())).to(x.dtype), h


def _norm(h: Tensor, gamma: Tensor) -> Tensor:
    return rms_norm_reference(h, gamma, EPS)


def _both(h: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    return _norm(h, gamma), h


def _twice(h: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    return _both(h + _norm(h, gamma), gamma)


Meaning = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _spelling(
    label: str,
    form: Form,
    note: str,
    *,
    meaning: Meaning = lambda x, residual, gamma: _both(x + residual, gamma),
    D: int = 64,
    one_plus: bool = False,
    weight_in_float: bool = False,
    expect: dict[str, int] | None = None,
    as_good: dict[str, int] | None = None,
) -> Spelling:
    """`form` takes x [B, S, D], residual [B, S, D], weight [D]; `meaning` the same and gamma = weight or 1 + weight."""

    def inputs(B: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        weight = weights(D + 7, D, center=0.0 if one_plus else 1.0)
        return activations(D + 5, B, S, D), activations(D + 6, B, S, D), weight

    def make(dtype: torch.dtype, B: int, S: int):
        x, residual, weight = inputs(B, S)
        return build(form, (x.to(dtype), residual.to(dtype)), (weight.to(wide(dtype) if weight_in_float else dtype),))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        x, residual, weight = inputs(B, S)
        return meaning(x, residual, weight + 1 if one_plus else weight)

    emitted = {ADD_RMS_NORM: 1} if expect is None else expect
    return Spelling(f"add_rms_norm/{label}", "add_rms_norm", make, emitted, expected, note, as_good=as_good)


SPELLINGS = (
    _spelling("decoder_layer", decoder_layer, "transformers: residual + hidden_states, then the next norm", D=128),
    _spelling("branch_first", branch_first, "original Llama code: x + attention, then the norm"),
    _spelling("torch_add", torch_add, "torch.add and F.rms_norm"),
    *(
        _spelling(
            form.__name__,
            form,
            "nanochat, DeepSeek-V4: no gain; the ones are made once",
            meaning=lambda x, residual, gamma: _both(x + residual, torch.ones_like(gamma)),
        )
        for form in (without_gain, without_gain_in_float)
    ),
    _spelling("dropout_in_eval", dropout_in_eval, "dropout that is off at inference"),
    _spelling("added_in_place", added_in_place, "residual.add_(x) on a local copy"),
    _spelling(
        "augmented_assignment",
        augmented_assignment,
        "h += residual on a local",
        meaning=lambda x, residual, gamma: _both(0.5 * x + residual, gamma),
    ),
    _spelling(
        "optional_residual",
        OptionalResidual,
        "DeepSeek-V3.2 reference: float32 sum, norm of the unrounded sum, float32 weight",
        weight_in_float=True,
    ),
    _spelling("serving_module", ServingModule, "native path of vLLM and SGLang: returns (y, residual)"),
    _spelling("all_in_place", all_in_place, "nano-vLLM: add_ and mul_ on locals"),
    _spelling("sum_spelled_twice", sum_spelled_twice, "x + residual written out again for the second output"),
    _spelling(
        "used_by_the_next_add",
        used_by_the_next_add,
        "the sum feeds the next residual add inside the graph",
        meaning=lambda x, residual, gamma: (x + residual + F.silu(_norm(x + residual, gamma)),),
    ),
    _spelling(
        "only_the_norm",
        only_the_norm,
        "post-norm models: the sum is not used again",
        meaning=lambda x, residual, gamma: (_norm(x + residual, gamma),),
    ),
    _spelling(
        "three_terms",
        three_terms,
        "MoE with shared experts: two branches, then the residual",
        meaning=lambda x, residual, gamma: _both(residual + x + x.relu(), gamma),
    ),
    _spelling(
        "scaled_branch",
        scaled_branch,
        "transformers: Granite, MiniCPM scale the branch",
        meaning=lambda x, residual, gamma: _both(residual + 0.22 * x, gamma),
    ),
    _spelling(
        "two_norms_in_a_row",
        two_norms_in_a_row,
        "a layer boundary on both sides",
        meaning=lambda x, residual, gamma: _twice(x + residual, gamma),
        expect={ADD_RMS_NORM: 2},
    ),
    _spelling(
        "norm_around_the_branch",
        norm_around_the_branch,
        "transformers: GLM-4 normalises the branch before the add, too",
        meaning=lambda x, residual, gamma: _both(residual + _norm(x, gamma), gamma),
        expect={RMS_NORM: 1, ADD_RMS_NORM: 1},
    ),
    _spelling("mean_square_by_hand", mean_square_by_hand, "sum / D and sqrt on the rounded sum"),
    _spelling("reshaped_tokens", reshaped_tokens, "serving code: tokens flattened to two dimensions"),
    _spelling(
        "one_plus_weight",
        one_plus_weight,
        "transformers: Gemma; the gain in float32, which the operator takes rounded once",
        one_plus=True,
        as_good={"npu::npu_gemma_rms_norm": 1},
    ),
)
