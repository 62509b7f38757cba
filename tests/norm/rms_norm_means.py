"""RMSNorm by other ways to the mean square, and of tensors that are scaled before: f(x, weight) or f(x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .rms_norm_forms import EPS


def sum_of_scaled_squares(x, weight):
    n = x.shape[-1]
    return x * torch.rsqrt((x * x * (1 / n)).sum(-1, keepdim=True) + EPS) * weight


def length_of_scaled(x, weight):
    h = x.float()
    length = (h / h.shape[-1] ** 0.5).norm(dim=-1, keepdim=True)
    return (h * torch.rsqrt(length**2 + EPS)).to(x.dtype) * weight


def length_times_root_of_size(x, weight):
    h = x.float()
    rms = torch.linalg.vector_norm(h, dim=-1, keepdim=True) * h.shape[-1] ** -0.5
    return (h / torch.sqrt(rms * rms + EPS) * weight).to(x.dtype)


def second_moment(x, weight):
    h = x.float()
    mean, var = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
    return (h * torch.rsqrt(var + mean**2 + EPS)).to(x.dtype) * weight


def magnitudes(x, weight):
    h = x.float()
    return weight * (h / torch.sqrt(h.abs().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def matmul_of_rows(x, weight):
    h = x.float()
    squares = (h.unsqueeze(-2) @ h.unsqueeze(-1)).squeeze(-1)
    return (h * torch.rsqrt(squares / h.shape[-1] + EPS)).to(x.dtype) * weight


def size_under_the_root(x):
    h, n = x.float(), x.shape[-1]
    return (h * n**0.5 * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + n * EPS)).to(x.dtype)


def scaled_embedding(x, weight):
    h = (x * 4).float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def functional_of_scaled(x, weight):
    return F.rms_norm(x / 4, (x.shape[-1],), weight, EPS)


def functional_of_scaled_bare(x):
    return F.rms_norm(0.5 * x, (x.shape[-1],), None, EPS)


def l2norm(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + EPS)


def unit_length_in_float(x):
    h = x.float()
    return (h / torch.sqrt(h.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype)


def sum_of_squares(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def divided_by_root_of_size(x, weight):
    h = x.float()
    mean_square = h.pow(2).sum(-1, keepdim=True) / h.shape[-1] ** 0.5
    return (h * torch.rsqrt(mean_square + EPS)).to(x.dtype) * weight
