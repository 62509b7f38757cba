"""Norms and gates of whole numbers, which the model casts to floats and back: the operator takes the floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusion

HOST = {"target": "host", "lower": "eager"}


def rms_normed(x, gain):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def weighted(x, gain):
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * gain).to(x.dtype)


def layer_normed(x, gain):
    h = x.float()
    c = h - h.mean(-1, keepdim=True)
    return (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5) * gain + gain).to(x.dtype)


def gated(x, gain):
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", [rms_normed, weighted, layer_normed, gated])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.int64], ids=str)
def test_floats_are_what_the_operator_takes(form, dtype):
    x, gain = torch.arange(-96, 96).view(3, 64).to(dtype), torch.full((64,), 0.7)
    expected = form(x, gain)
    assert fusion.explain(form, x, gain, options=HOST).matches
    actual = torch.compile(form, backend="cann_fusion", options=HOST, fullgraph=True)(x, gain)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)
