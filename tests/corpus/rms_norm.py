"""y = x / sqrt(mean(x²) + eps) · weight, or · (1 + weight), as people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import GEMMA_RMS_NORM, RMS_NORM, Form, Spelling, activations, build, weights, wide

EPS = 1e-6


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float64 [..., D]: each row divided by its root mean square, through the Euclidean norm."""
    length = torch.linalg.vector_norm(torch.cat((x, x.new_full((*x.shape[:-1], 1), (x.shape[-1] * eps) ** 0.5)), -1), dim=-1)
    return x * (x.shape[-1] ** 0.5) / length[..., None] * weight


class CastNormCastScale(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.variance_epsilon = EPS

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class CastNormScaleCast(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + EPS)
        return (self.weight * hidden_states).to(input_dtype)


class HelperMethod(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def forward(self, x):
        return self._norm(x.float()).type_as(x) * self.weight


class AutocastOff(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        with torch.autocast(enabled=False, device_type=x.device.type):
            h = x.to(torch.float32)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
            h = h.to(x.dtype)
        return self.weight * h


class TorchModule(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.norm = nn.RMSNorm(weight.shape[-1], eps=1e-5, dtype=weight.dtype)
        self.norm.weight = nn.Parameter(weight)

    def forward(self, x):
        return self.norm(x)


def functional(x, weight):
    return F.rms_norm(x, (x.size(-1),), weight, 1e-5)


def functional_bare(x):
    return F.rms_norm(x, (x.size(-1),))


def multiplied_square(x, weight):
    h = x.float()
    return weight * (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def torch_square(x, weight):
    h = x.float()
    return (h * torch.rsqrt(torch.mean(torch.square(h), dim=-1, keepdim=True) + EPS)).to(x.dtype) * weight


def operator_square(x, weight):
    h = x.float()
    return (h * torch.rsqrt((h**2).mean(-1, True) + EPS)).to(x.dtype) * weight


def divide_by_root(x, weight):
    rms = torch.sqrt(x.float().pow(2).mean(dim=-1, keepdim=True) + EPS)
    return (x.float() / rms * weight).to(x.dtype)


def method_chain(x, weight):
    rms = x.pow(2).mean(dim=-1, keepdim=True).add(EPS).sqrt()
    return (x / rms) * weight


def negative_power(x, weight):
    h = x.float()
    return (h * (h.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5)).type_as(x) * weight


def negative_power_operator(x, weight):
    h = x.float()
    return ((h * (h.pow(2).mean(-1, keepdim=True) + EPS) ** -0.5) * weight).type_as(x)


def one_over_root(x, weight):
    h = x.float()
    scale = 1.0 / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * scale).to(x.dtype) * weight


def reciprocal_root(x, weight):
    h = x.float()
    return (h * h.pow(2).mean(-1, keepdim=True).add(EPS).sqrt().reciprocal()).to(x.dtype) * weight


def sum_over_size(x, weight):
    h = x.float()
    mean_square = (h * h).sum(dim=-1, keepdim=True) / h.shape[-1]
    return (h * torch.rsqrt(mean_square + EPS) * weight).to(x.dtype)


def sum_times_inverse(x, weight):
    h = x.float()
    mean_square = h.pow(2).sum(-1, keepdim=True) * (1.0 / h.size(-1))
    return (h * torch.rsqrt(mean_square + EPS)).to(x.dtype) * weight


def einsum_square(x, weight):
    h = x.float()
    mean_square = torch.einsum("...d,...d->...", h, h).unsqueeze(-1) / h.shape[-1]
    return (h * torch.rsqrt(mean_square + EPS)).to(x.dtype) * weight


def einsum_weight(x, weight):
    h = x.float()
    h = h / (h.pow(2).mean(dim=-1, keepdim=True) + EPS).sqrt()
    return torch.einsum("...d,d->...d", h, weight.float()).to(x.dtype)


def vector_norm(x, weight):
    h = x.float()
    mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True) ** 2 / h.shape[-1]
    return (h * torch.rsqrt(mean_square + EPS)).to(x.dtype) * weight


def tensor_norm(x, weight):
    h = x.float()
    mean_square = h.norm(2, dim=-1, keepdim=True).pow(2) / h.shape[-1]
    return (h / torch.sqrt(mean_square + EPS)).to(x.dtype) * weight


def unsqueezed(x, weight):
    h = x.float()
    inverse = torch.rsqrt(h.pow(2).mean(-1) + EPS)
    return (h * inverse.unsqueeze(-1)).to(x.dtype) * weight


def indexed_by_none(x, weight):
    h = x.float()
    mean_square = h.square().mean(dim=-1)
    return weight * (h * torch.rsqrt(mean_square[..., None] + EPS)).to(x.dtype)


def positive_dimension(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(dim=2, keepdim=True) + EPS)).to(x.dtype) * weight


def float_weight(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h * weight).to(x.dtype)


def weight_upcast(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.float() * h).type_as(x)


def float_statistics(x, weight):
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    return x * inverse.to(x.dtype) * weight


def promoted_product(x, weight):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    if weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(weight.dtype)
    return weight * x


def no_upcast(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def weight_first(x, weight):
    h = x.float()
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight
    return (h * scale).to(x.dtype)


def weight_times_x(x, weight):
    h = x.float()
    return (weight * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def weight_times_x_over_root(x, weight):
    h = x.float()
    return (weight * h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def reversed_operands(x, weight):
    h = x.float()
    return weight * (torch.rsqrt(EPS + h.pow(2).mean(-1, keepdim=True)) * h).to(x.dtype)


def function_calls(x, weight):
    h = x.to(dtype=torch.float)
    variance = torch.mean(torch.mul(h, h), -1, True)
    h = torch.div(h, torch.sqrt(torch.add(variance, EPS)))
    return torch.mul(h.to(dtype=x.dtype), weight)


def mean_in_float(x, weight):
    variance = x.pow(2).mean(-1, keepdim=True, dtype=torch.float32)
    return (x * torch.rsqrt(variance + 1e-5)).to(x.dtype) * weight


def weight_viewed(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h.to(x.dtype) * weight.view(1, 1, -1)


def unweighted(x):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def flattened_tokens(x, weight):
    h = x.reshape(-1, x.shape[-1]).float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h.to(x.dtype) * weight).view(x.shape)


def in_place(x, weight):
    h = x.to(torch.float32, copy=True)
    variance = h.pow(2).mean(dim=-1, keepdim=True)
    h.mul_(torch.rsqrt(variance + EPS))
    return h.to(x.dtype).mul_(weight)


class OnePlusWeight(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)

    def forward(self, x):
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


def one_plus_weight_after_cast(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h.to(x.dtype) * (1 + weight)


def weight_plus_one_over_root(x, weight):
    h = x.float()
    return (h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * (weight.float() + 1)).to(x.dtype)


def plus_weighted_self(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (h + h * weight.float()).to(x.dtype)


def functional_one_plus(x, weight):
    return F.rms_norm(x.float(), (x.size(-1),), 1.0 + weight.float(), EPS).to(x.dtype)


def _spelling(
    label: str,
    form: Form,
    note: str = "",
    *,
    D: int = 64,
    heads: int | None = None,
    eps: float | None = EPS,
    weighted: bool = True,
    one_plus: bool = False,
    weight_in_float: bool = False,
) -> Spelling:
    """`form` takes x [B, S, D] (or [B, S, N, D] for given heads) and weight [D]; eps None is torch's default."""

    def inputs(B: int, S: int) -> tuple[Tensor, Tensor]:
        shape = (B, S, D) if heads is None else (B, S, heads, D)
        return activations(D, *shape), weights(D + 1, D, center=0.0 if one_plus else 1.0)

    def make(dtype: torch.dtype, B: int, S: int):
        x, weight = inputs(B, S)
        parameters = (weight.to(wide(dtype) if weight_in_float else dtype),) if weighted else ()
        return build(form, (x.to(dtype),), parameters)

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        x, weight = inputs(B, S)
        gamma = weight + 1 if one_plus else weight if weighted else torch.ones_like(weight)
        return (reference(x, gamma, torch.finfo(wide(dtype)).eps if eps is None else eps),)

    expect = {GEMMA_RMS_NORM if one_plus else RMS_NORM: 1}
    return Spelling(f"rms_norm/{label}", "rms_norm", make, expect, expected, note)


SPELLINGS = (
    _spelling("hf_llama", CastNormCastScale, "transformers: Llama, Mistral, Qwen, DeepSeek, GLM", D=128),
    _spelling("hf_llama_per_head", CastNormCastScale, "transformers: Qwen3 normalises q and k per head", heads=4),
    _spelling("cast_after_weight", CastNormScaleCast, "transformers: gpt_oss"),
    _spelling("helper_method", HelperMethod, "the original Llama code and its many descendants", D=256),
    _spelling("autocast_off", AutocastOff, "OLMo keeps autocast out of the norm"),
    _spelling("nn_module", TorchModule, "torch.nn.RMSNorm", eps=1e-5),
    _spelling("functional", functional, "torch.nn.functional.rms_norm", eps=1e-5),
    _spelling("functional_bare", functional_bare, "nanoGPT speed runs: no weight, default eps", eps=None, weighted=False),
    _spelling("multiplied_square", multiplied_square, "x * x for the square"),
    _spelling("torch_square", torch_square, "torch.square and torch.mean"),
    _spelling("operator_square", operator_square, "x ** 2, keepdim given by position"),
    _spelling("divide_by_root", divide_by_root, "tutorials: divide by the RMS"),
    _spelling("method_chain", method_chain, "course homework: pow, mean, add, sqrt as methods, no upcast"),
    _spelling("negative_power", negative_power, "pow(-0.5)"),
    _spelling("negative_power_operator", negative_power_operator, "** -0.5, ported from JAX"),
    _spelling("one_over_root", one_over_root, "1 / sqrt"),
    _spelling("reciprocal_root", reciprocal_root, "sqrt().reciprocal()"),
    _spelling("sum_over_size", sum_over_size, "kernel references: sum / D"),
    _spelling("sum_times_inverse", sum_times_inverse, "kernel references: sum * (1 / D)"),
    _spelling("einsum_square", einsum_square, "einsum as a dot product of each row with itself"),
    _spelling("einsum_weight", einsum_weight, "course homework in einsum style"),
    _spelling("vector_norm", vector_norm, "Euclidean norm squared over D", D=128),
    _spelling("tensor_norm", tensor_norm, "Tensor.norm squared over D"),
    _spelling("unsqueezed", unsqueezed, "keepdim left out, unsqueeze later"),
    _spelling("indexed_by_none", indexed_by_none, "keepdim left out, [..., None] later"),
    _spelling("positive_dimension", positive_dimension, "mean(dim=2) in a model of fixed rank"),
    _spelling("float_weight", float_weight, "DeepSeek-V3.2 reference: float32 weight", weight_in_float=True),
    _spelling("weight_upcast", weight_upcast, "OLMo2, Nemotron: weight.float()"),
    _spelling("float_statistics", float_statistics, "statistics in float32, product in the dtype of x"),
    _spelling("promoted_product", promoted_product, "transformers: T5, product promoted to float32"),
    _spelling("no_upcast", no_upcast, "minimal repositories", eps=1e-5),
    _spelling("weight_first", weight_first, "weight folded into the scale"),
    _spelling("weight_times_x", weight_times_x, "weight * x * rsqrt, left to right"),
    _spelling("weight_times_x_over_root", weight_times_x_over_root, "the formula of the paper, left to right"),
    _spelling("reversed_operands", reversed_operands, "every operand the other way round"),
    _spelling("function_calls", function_calls, "torch.mul, torch.div, torch.add"),
    _spelling("mean_in_float", mean_in_float, "mean(dtype=float32) instead of a cast", eps=1e-5),
    _spelling("weight_viewed", weight_viewed, "weight broadcast by hand to [1, 1, D]"),
    _spelling("unweighted", unweighted, "DeepSeek-V4 and others: no weight", weighted=False),
    _spelling("flattened_tokens", flattened_tokens, "serving code: tokens flattened to two dimensions"),
    _spelling("in_place", in_place, "nano-vLLM: mul_ on locals"),
    _spelling("one_plus_weight", OnePlusWeight, "transformers: Gemma, Qwen3-Next", one_plus=True, D=128),
    _spelling("one_plus_weight_after_cast", one_plus_weight_after_cast, "1 + weight after the cast", one_plus=True),
    _spelling("weight_plus_one_over_root", weight_plus_one_over_root, "weight + 1 in float32", one_plus=True),
    _spelling("plus_weighted_self", plus_weighted_self, "x + x * weight", one_plus=True),
    _spelling("functional_one_plus", functional_one_plus, "rms_norm called with 1 + weight", one_plus=True),
)
