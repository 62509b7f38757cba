"""RMS norms that resemble the fused operators, and must be refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import GEMMA_RMS_NORM, RMS_NORM, Form, LookAlike, activations, look_alike, weights

from .rms_norm import reference as rms_norm_reference

EPS = 1e-6
D = 64


def eps_outside_root(x, weight):
    h = x.float()
    return (weight * h / (torch.sqrt(h.pow(2).mean(-1, keepdim=True)) + EPS)).to(x.dtype)


def norm_plus_eps(x, weight):
    h = x.float()
    rms = h.norm(2, dim=-1, keepdim=True) * h.shape[-1] ** -0.5
    return weight * (h / (rms + EPS)).to(x.dtype)


def eps_on_x(x, weight):
    h = x.float() + EPS
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) * weight).to(x.dtype)


def eps_under_the_sum(x, weight):
    h = x.float()
    return (h * torch.rsqrt((h.pow(2) + EPS).sum(-1, keepdim=True)) * weight).to(x.dtype)


def clamped(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True).clamp(min=EPS)) * weight).to(x.dtype)


def unit_length(x, weight):
    return F.normalize(x, dim=-1, eps=EPS) * x.shape[-1] ** 0.5 * weight


def scaled_but_not_its_squares(x, weight):
    h = x.float()
    return ((2 * h) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def squares_of_another_scale(x, weight):
    h = 2 * x.float()
    return (h * torch.rsqrt(2 * h.pow(2).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def unbiased_second_moment(x, weight):
    h = x.float()
    moment = h.var(-1, keepdim=True) + h.mean(-1, keepdim=True) ** 2
    return (h * torch.rsqrt(moment + EPS) * weight).to(x.dtype)


def third_power_of_magnitudes(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.abs().pow(3).mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def mean_over_tokens(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + EPS)).to(x.dtype) * weight


def mean_over_two_dimensions(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + EPS)).to(x.dtype) * weight


def sum_of_squares_of_another(x, other, weight):
    h = other.float()
    return (x * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def fourth_power(x, weight):
    h = x.float()
    return (h * (h.pow(4).mean(-1, keepdim=True) + EPS).pow(-0.25)).to(x.dtype) * weight


def fourth_power_square_root(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(4).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def mean_absolute(x, weight):
    h = x.float()
    return (h / (h.abs().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def root_times(x, weight):
    h = x.float()
    return (h * torch.sqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def variance_without_centring(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.var(-1, unbiased=False, keepdim=True) + EPS)).to(x.dtype) * weight


def statistics_of_another(x, other, weight):
    h = x.float()
    return (h * torch.rsqrt(other.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def product_of_two(x, other, weight):
    h = x.float()
    return (h * torch.rsqrt((h * other.float()).abs().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def two_plus_weight(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * (2.0 + weight.float())).to(x.dtype)


def weight_per_token(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return h.to(x.dtype) * weight.view(1, -1, 1)


def weight_per_element(x, weight):
    h = x.float()
    return (h * (torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS) * weight)).to(x.dtype)


def eps_tensor(x, weight, eps):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def negative_eps(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) - EPS)).to(x.dtype) * weight


def huge_eps(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 0.1)).to(x.dtype) * weight


def coarser_cast(x, weight):
    h = x.to(torch.float8_e5m2).float()
    return (x.float() * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def other_half_precision(x, weight):
    other = torch.float16 if x.dtype is torch.bfloat16 else torch.bfloat16
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(other)
    return h.to(x.dtype) * weight


def rounded_in_the_middle(x, weight):
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(torch.float8_e4m3fn)
    return h.to(x.dtype) * weight


Inputs = Callable[[int, int], tuple[Tensor, ...]]


def _rms(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm_reference(x, weight, EPS),)


def _rms_last_weight(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _rms(x, weight)


def _gemma(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _rms(x, weight + 1)


def _rms_wide_gamma(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return _rms(x, weight.flatten()[:D] if weight.numel() >= D else weight.flatten()[:1])


def _x_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), weights(42, D)


def _tiny_x_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D) / 1024, weights(42, D)


def _shifted_x_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D) + 1, weights(42, D)


def _x_other_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), activations(43, B, S, D), weights(42, D)


def _x_weight_per_token(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), weights(42, S)


def _x_weight_per_element(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), weights(42, S, D)


def _x_weight_eps(B: int, S: int) -> tuple[Tensor, ...]:
    return *_x_weight(B, S), torch.tensor(EPS, dtype=torch.float64)


def _not_rms(form: Form, reason: str, inputs: Inputs = _x_weight, meaning=_rms, note: str = "") -> LookAlike:
    return look_alike("rms_norm", form, reason, (RMS_NORM, GEMMA_RMS_NORM), inputs, meaning, note)


def _inner(form: Form, note: str) -> LookAlike:
    return look_alike("rms_norm", form, "", (GEMMA_RMS_NORM,), _x_weight, _rms, note)


LOOKALIKES = (
    _not_rms(eps_outside_root, "eps.*outside the root", _tiny_x_weight),
    _not_rms(norm_plus_eps, "eps.*outside the root", _tiny_x_weight),
    _not_rms(eps_on_x, "eps", _tiny_x_weight, note="eps is added to x itself; the root holds none"),
    _not_rms(eps_under_the_sum, "sum.*mean|mean"),
    _not_rms(clamped, "eps|clamp", _tiny_x_weight),
    _not_rms(unit_length, "eps|clamp", _tiny_x_weight, note="F.normalize clamps the length from below"),
    look_alike(
        "rms_norm",
        scaled_but_not_its_squares,
        "",
        (GEMMA_RMS_NORM,),
        _x_weight,
        _rms,
        "twice the norm of x, which may fuse; it is not the norm of 2 x",
    ),
    _not_rms(squares_of_another_scale, "a weight stands between"),
    _not_rms(unbiased_second_moment, "unbiased"),
    _not_rms(third_power_of_magnitudes, "power"),
    _not_rms(mean_over_tokens, "last dim|dim(ension)? -?\\d"),
    _not_rms(mean_over_two_dimensions, "last dim|dim(ension)?s?"),
    _not_rms(sum_of_squares_of_another, "under the root, as a sum of squares has", _x_other_weight, _rms_last_weight),
    _not_rms(fourth_power, "square|power"),
    _not_rms(fourth_power_square_root, "square|power"),
    _not_rms(mean_absolute, "square|root"),
    _not_rms(root_times, "rsqrt|divide|root|power"),
    _not_rms(variance_without_centring, "cent(re|er)|variance|mean", _shifted_x_weight),
    _not_rms(statistics_of_another, "another tensor|different|not the same", _x_other_weight, _rms_last_weight),
    _not_rms(product_of_two, "another tensor|square|not the same", _x_other_weight, _rms_last_weight),
    _not_rms(eps_tensor, "eps.*(tensor|number|constant)", _x_weight_eps, None, "eps is only known at run time"),
    _not_rms(negative_eps, "eps", meaning=None, note="the operator is defined for eps > 0 only"),
    _not_rms(huge_eps, "eps", meaning=None, note="0.1 is a damping term, not a guard against division by zero"),
    _not_rms(coarser_cast, "cast|dtype|float8"),
    _inner(other_half_precision, "the norm without weight fuses; the rounding that no operator does stays"),
    _inner(rounded_in_the_middle, "the norm without weight fuses; the rounding that no operator does stays"),
    look_alike(
        "rms_norm",
        two_plus_weight,
        "",
        (GEMMA_RMS_NORM,),
        lambda B, S: (activations(41, B, S, D), weights(42, D, center=0.0)),
        _gemma,
        "the plain norm with the computed weight 2 + w is right, the 1 + w operator on w is not",
    ),
    look_alike(
        "rms_norm",
        weight_per_token,
        "",
        (),
        _x_weight_per_token,
        _rms_wide_gamma,
        "an unweighted norm may fuse; the token scale may not become its gamma",
    ),
    _not_rms(
        weight_per_element,
        "weight|gamma",
        _x_weight_per_element,
        _rms_wide_gamma,
        "gamma [S, D] with a norm over D alone: the operator would normalise over both",
    ),
)
