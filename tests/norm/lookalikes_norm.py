"""Layer norms and residual adds that resemble the fused operators, and must be refused."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.corpus.base import ADD_RMS_NORM, LAYER_NORM, RMS_NORM, Form, LookAlike, activations, look_alike, weights

from .layer_norm import reference as layer_norm_reference
from .rms_norm import reference as rms_norm_reference

EPS = 1e-6
D = 64


def unbiased_variance(x, weight, bias):
    return weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + EPS) + bias


def deviation_plus_eps(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + EPS) * weight + bias


def annotated_transformer(x, weight, bias):
    mean = x.mean(-1, keepdim=True)
    std = x.std(-1, keepdim=True)
    return weight * (x - mean) / (std + EPS) + bias


def not_centred(x, weight, bias):
    return x * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS) * weight + bias


def centred_by_tokens(x, weight, bias):
    centred = x - x.mean(-2, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-2, keepdim=True) + EPS) * weight + bias


def second_moment(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight + bias


def plain_norm(h, weight):
    f = h.float()
    return weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)).to(h.dtype)


def subtracted(x, residual, weight):
    h = residual - x
    return plain_norm(h, weight), h


def added_twice(x, residual, weight):
    h = torch.add(residual, x, alpha=2)
    return plain_norm(h, weight), h


def broadcast_bias(x, bias, weight):
    h = x + bias
    return plain_norm(h, weight), h


def added_after_the_norm(x, residual, weight):
    return residual + plain_norm(x, weight), x + residual


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (layer_norm_reference(x, weight, bias, EPS),)


def _add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (rms_norm_reference(x + residual, weight, EPS), x + residual)


def _x_residual_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), activations(43, B, S, D), weights(42, D)


def _x_bias_weight(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D), activations(43, D), weights(42, D)


def _x_weight_bias(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D) + 1, weights(42, D), weights(44, D, center=0.0)


def _tiny_x_weight_bias(B: int, S: int) -> tuple[Tensor, ...]:
    return activations(41, B, S, D) / 1024, weights(42, D), weights(44, D, center=0.0)


def _not_layer(form: Form, reason: str, inputs=_x_weight_bias, note: str = "") -> LookAlike:
    return look_alike("layer_norm", form, reason, (LAYER_NORM, RMS_NORM), inputs, _layer, note)


def _not_add(form: Form, reason: str, inputs=_x_residual_weight, meaning=_add, note: str = "") -> LookAlike:
    note = note or "the norm inside may fuse on its own"
    return look_alike("add_rms_norm", form, reason, (ADD_RMS_NORM,), inputs, meaning, note)


def _right(form: Form, note: str) -> LookAlike:
    return look_alike("add_rms_norm", form, "", (), _x_residual_weight, _add, note)


LOOKALIKES = (
    _not_layer(unbiased_variance, "unbiased|correction"),
    _not_layer(deviation_plus_eps, "eps.*outside the root", _tiny_x_weight_bias),
    _not_layer(annotated_transformer, "eps.*outside the root|unbiased|correction", note="the Annotated Transformer"),
    _not_layer(not_centred, "cent(re|er)"),
    _not_layer(centred_by_tokens, "last dim|dim(ension)? -?\\d"),
    _not_layer(second_moment, "cent(re|er)|variance"),
    _right(subtracted, "the operator adds the negated tensor, which is built first"),
    _right(added_twice, "the operator adds the doubled tensor, which is built first"),
    _not_add(broadcast_bias, "broadcast|shape", _x_bias_weight, None, "the operator takes two equal shapes only"),
    _not_add(added_after_the_norm, "", note="the norm of one addend fuses on its own"),
)
