"""y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, as people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import LAYER_NORM, Form, Spelling, activations, build, weights

EPS = 1e-5


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = EPS) -> Tensor:
    """float64 [..., D]: centred by the projection I - 1/D, scaled by the centred row's own length."""
    D = x.shape[-1]
    centred = x @ (torch.eye(D, dtype=x.dtype) - 1 / D)
    return (
        centred * (D / (torch.linalg.vector_norm(centred, dim=-1, keepdim=True) ** 2 + D * eps)) ** 0.5 * weight + bias
    )


class BiasedVariance(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.gamma = nn.Parameter(weight)
        self.beta = nn.Parameter(bias)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, unbiased=False, keepdim=True)
        out = (x - mean) / torch.sqrt(var + EPS)
        return self.gamma * out + self.beta


class TorchModule(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.norm = nn.LayerNorm(weight.shape[-1], eps=EPS)
        self.norm.weight = nn.Parameter(weight)
        self.norm.bias = nn.Parameter(bias)

    def forward(self, x):
        return self.norm(x)


def functional(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def functional_in_float(x, weight, bias):
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), EPS).type_as(x)


def correction_zero(x, weight, bias):
    h = x.float()
    h = (h - h.mean(dim=-1, keepdim=True)) * torch.rsqrt(h.var(dim=-1, correction=0, keepdim=True) + EPS)
    return h.to(x.dtype) * weight + bias


def mean_of_squared_difference(x, weight, bias):
    u = x.mean(-1, keepdim=True)
    s = (x - u).pow(2).mean(-1, keepdim=True)
    x = (x - u) / torch.sqrt(s + EPS)
    return weight * x + bias


def centred_in_float(x, weight, bias):
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    variance = (h * h).mean(-1, keepdim=True)
    return (h * torch.rsqrt(variance + EPS) * weight + bias).to(x.dtype)


def variance_and_mean(x, weight, bias):
    var, mean = torch.var_mean(x, dim=-1, unbiased=False, keepdim=True)
    return (x - mean) * torch.rsqrt(var + EPS) * weight + bias


def reversed_operands(x, weight, bias):
    h = x.float()
    mean = torch.mean(h, -1, True)
    var = torch.var(h, -1, unbiased=False, keepdim=True)
    return (bias + weight * (torch.rsqrt(EPS + var) * (h - mean))).to(x.dtype)


def fast_variance(x, weight, bias):
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = h.square().mean(-1, keepdim=True) - mean.square()
    return ((h - mean) * (torch.rsqrt(variance + EPS) * weight) + bias).to(x.dtype)


def sums_over_size(x, weight, bias):
    h = x.float()
    D = h.shape[-1]
    h = h - h.sum(-1, keepdim=True) / D
    return (h / torch.sqrt((h**2).sum(-1, keepdim=True) / D + EPS)).to(x.dtype) * weight + bias


def half_power(x, weight, bias):
    h = x.float()
    centred = h - h.mean(-1, keepdim=True)
    return (centred / (centred.pow(2).mean(-1, keepdim=True) + EPS) ** 0.5).to(x.dtype) * weight + bias


def unsqueezed(x, weight, bias):
    h = x.float()
    mean, var = h.mean(-1), h.var(-1, unbiased=False)
    h = (h - mean.unsqueeze(-1)) / (var.unsqueeze(-1) + EPS).sqrt()
    return weight * h.to(x.dtype) + bias


def fused_multiply_add(x, weight, bias):
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return torch.addcmul(bias, (x - mean) * torch.rsqrt(var + EPS), weight)


def weight_only(x, weight):
    h = x.float()
    h = (h - h.mean(-1, keepdim=True)) * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + EPS)
    return h.to(x.dtype) * weight


def no_parameters(x):
    mean = x.mean(dim=-1, keepdim=True)
    var = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + EPS)


def _spelling(
    label: str, form: Form, note: str, *, D: int = 64, parameters: int = 2, fuses: bool = True, casts: bool = False
) -> Spelling:
    """`form` takes x [B, S, D] and the first `parameters` of (weight [D], bias [D]).

    Where nothing `fuses` the operator is there already, unless it `casts` 16-bit tensors.
    """

    def inputs(B: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        return activations(D + 2, B, S, D) + 0.5, weights(D + 3, D), weights(D + 4, D, center=0.0)

    def make(dtype: torch.dtype, B: int, S: int):
        x, *affine = inputs(B, S)
        return build(form, (x.to(dtype),), tuple(p.to(dtype) for p in affine[:parameters]))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        x, weight, bias = inputs(B, S)
        return (reference(x, weight if parameters else weight * 0 + 1, bias if parameters == 2 else bias * 0),)

    emitted = {LAYER_NORM: 1} if fuses else {}
    return Spelling(
        f"layer_norm/{label}", "layer_norm", make, emitted, expected, note, {LAYER_NORM: 1} if casts else None
    )


SPELLINGS = (
    _spelling("biased_variance", BiasedVariance, "tutorials: var(unbiased=False), gamma and beta"),
    _spelling("correction_zero", correction_zero, "the newer correction=0"),
    _spelling("mean_of_squared_difference", mean_of_squared_difference, "ConvNeXt, original BERT code", D=128),
    _spelling("centred_in_float", centred_in_float, "reference of Triton kernels: centre once, in float32"),
    _spelling("variance_and_mean", variance_and_mean, "torch.var_mean"),
    _spelling("reversed_operands", reversed_operands, "every operand the other way round"),
    _spelling("fast_variance", fast_variance, "ported from Flax: E[x²] - E[x]²"),
    _spelling("sums_over_size", sums_over_size, "kernel references: sum / D"),
    _spelling("half_power", half_power, "** 0.5 for the root"),
    _spelling("unsqueezed", unsqueezed, "keepdim left out, unsqueeze later"),
    _spelling("fused_multiply_add", fused_multiply_add, "torch.addcmul for scale and shift"),
    _spelling("weight_only", weight_only, "transformers: Cohere, no bias", parameters=1),
    _spelling("no_parameters", no_parameters, "OLMo: neither weight nor bias", parameters=0),
    _spelling("functional", functional, "already one operator: stays", fuses=False),
    _spelling("nn_module", TorchModule, "already one operator: stays", fuses=False),
    _spelling(
        "functional_in_float", functional_in_float, "DeepSeek-V3.2 indexer: one operator", fuses=False, casts=True
    ),
)
