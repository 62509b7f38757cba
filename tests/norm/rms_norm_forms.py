"""RMSNorm in the words of many authors: f(x, weight), or a module made from its weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


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


class NormMethod(nn.Module):
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
