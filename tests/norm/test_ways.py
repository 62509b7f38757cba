"""A way to lower a norm stands back where its operator computes something else."""

from __future__ import annotations

import pytest
import torch

import fusion
from fusion.language import Refused
from patterns.norm.add_norm import AddNorm, LayerNorm, RmsNorm
from patterns.norm.rms_norm import RMSNorm
from tests.norm.layer_norm import no_parameters

X, GAIN = torch.randn(3, 64), torch.randn(64)


@pytest.mark.parametrize("way", ["gemma", "shifted"])
def test_a_gain_of_its_own_is_not_one_plus_a_weight(way: str):
    with pytest.raises(Refused, match="npu_gemma_rms_norm requires that"):
        getattr(RMSNorm(), way)(X, None, 1e-6)


def test_one_plus_a_weight_is_no_gain_of_its_own():
    with pytest.raises(Refused, match="this call requires a tensor"):
        RMSNorm().npu(X, None, GAIN, 1e-6, None)


def test_a_sum_of_squares_is_no_mean_of_them():
    with pytest.raises(Refused, match="they are summed"):
        RMSNorm().npu(X, None, None, 1e-6, 64.0)
    with pytest.raises(Refused, match="they are averaged"):
        RMSNorm().scaled(X, 1e-6, None)


def test_a_layer_norm_is_told_of_no_sum():
    """It is an RMS norm of x - mean(x), which is a sum of two tensors only so."""
    report = fusion.explain(no_parameters, X, options={"target": "host", "lower": "eager"})
    assert {each.rule for each in report.matches} == {"layer_norm"}
    assert not report.refusals


def test_addends_of_two_dtypes_are_added_by_the_model():
    with pytest.raises(Refused, match="their dtypes differ"):
        AddNorm().rms(X, X.bfloat16(), RmsNorm(GAIN, None), 1e-6, X.dtype)
    with pytest.raises(Refused, match="their dtypes differ"):
        AddNorm().layer(X, X.bfloat16(), LayerNorm(GAIN, GAIN), 1e-6)
