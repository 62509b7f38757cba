"""y = x / sqrt(mean(x²) + eps) · weight, or · (1 + weight), as people write it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.corpus.base import GEMMA_RMS_NORM, RMS_NORM, Form, Spelling, activations, build, weights, wide

from . import rms_norm_forms as forms
from . import rms_norm_means as means
from .rms_norm_forms import EPS


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float64 [..., D]: each row divided by its root mean square, through the Euclidean norm."""
    length = torch.linalg.vector_norm(
        torch.cat((x, x.new_full((*x.shape[:-1], 1), (x.shape[-1] * eps) ** 0.5)), -1), dim=-1
    )
    return x * (x.shape[-1] ** 0.5) / length[..., None] * weight


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
    times: float = 1.0,
    factor: float = 1.0,
) -> Spelling:
    """`form` takes x [B, S, D] (or [B, S, N, D] for given heads) and weight [D]; eps None is torch's default.

    The form takes the norm of x · `times`, with `factor` times the mean square.
    """

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
        small = torch.finfo(wide(dtype)).eps if eps is None else eps
        return (reference(x * times, gamma * factor**-0.5, small / factor),)

    expect = {GEMMA_RMS_NORM if one_plus else RMS_NORM: 1}
    return Spelling(f"rms_norm/{label}", "rms_norm", make, expect, expected, note)


SPELLINGS = (
    _spelling("hf_llama", forms.CastNormCastScale, "transformers: Llama, Mistral, Qwen, DeepSeek, GLM", D=128),
    _spelling("hf_llama_per_head", forms.CastNormCastScale, "transformers: Qwen3 normalises q and k per head", heads=4),
    _spelling("cast_after_weight", forms.CastNormScaleCast, "transformers: gpt_oss"),
    _spelling("norm_method", forms.NormMethod, "the original Llama code and its many descendants", D=256),
    _spelling("autocast_off", forms.AutocastOff, "OLMo keeps autocast out of the norm"),
    _spelling("nn_module", forms.TorchModule, "torch.nn.RMSNorm", eps=1e-5),
    _spelling("functional", forms.functional, "torch.nn.functional.rms_norm", eps=1e-5),
    _spelling(
        "functional_bare", forms.functional_bare, "nanoGPT speed runs: no weight, default eps", eps=None, weighted=False
    ),
    _spelling("multiplied_square", forms.multiplied_square, "x * x for the square"),
    _spelling("torch_square", forms.torch_square, "torch.square and torch.mean"),
    _spelling("operator_square", forms.operator_square, "x ** 2, keepdim given by position"),
    _spelling("divide_by_root", forms.divide_by_root, "tutorials: divide by the RMS"),
    _spelling("method_chain", forms.method_chain, "course homework: pow, mean, add, sqrt as methods, no upcast"),
    _spelling("negative_power", forms.negative_power, "pow(-0.5)"),
    _spelling("negative_power_operator", forms.negative_power_operator, "** -0.5, ported from JAX"),
    _spelling("one_over_root", forms.one_over_root, "1 / sqrt"),
    _spelling("reciprocal_root", forms.reciprocal_root, "sqrt().reciprocal()"),
    _spelling("sum_over_size", forms.sum_over_size, "kernel references: sum / D"),
    _spelling("sum_times_inverse", forms.sum_times_inverse, "kernel references: sum * (1 / D)"),
    _spelling("einsum_square", forms.einsum_square, "einsum as a dot product of each row with itself"),
    _spelling("einsum_weight", forms.einsum_weight, "course homework in einsum style"),
    _spelling("vector_norm", forms.vector_norm, "Euclidean norm squared over D", D=128),
    _spelling("tensor_norm", forms.tensor_norm, "Tensor.norm squared over D"),
    _spelling("unsqueezed", forms.unsqueezed, "keepdim left out, unsqueeze later"),
    _spelling("indexed_by_none", forms.indexed_by_none, "keepdim left out, [..., None] later"),
    _spelling("positive_dimension", forms.positive_dimension, "mean(dim=2) in a model of fixed rank"),
    _spelling("float_weight", forms.float_weight, "DeepSeek-V3.2 reference: float32 weight", weight_in_float=True),
    _spelling("weight_upcast", forms.weight_upcast, "OLMo2, Nemotron: weight.float()"),
    _spelling("float_statistics", forms.float_statistics, "statistics in float32, product in the dtype of x"),
    _spelling("promoted_product", forms.promoted_product, "transformers: T5, product promoted to float32"),
    _spelling("no_upcast", forms.no_upcast, "minimal repositories", eps=1e-5),
    _spelling("weight_first", forms.weight_first, "weight folded into the scale"),
    _spelling("weight_times_x", forms.weight_times_x, "weight * x * rsqrt, left to right"),
    _spelling("weight_times_x_over_root", forms.weight_times_x_over_root, "the formula of the paper, left to right"),
    _spelling("reversed_operands", forms.reversed_operands, "every operand the other way round"),
    _spelling("function_calls", forms.function_calls, "torch.mul, torch.div, torch.add"),
    _spelling("mean_in_float", forms.mean_in_float, "mean(dtype=float32) instead of a cast", eps=1e-5),
    _spelling("weight_viewed", forms.weight_viewed, "weight broadcast by hand to [1, 1, D]"),
    _spelling("unweighted", forms.unweighted, "DeepSeek-V4 and others: no weight", weighted=False),
    _spelling("flattened_tokens", forms.flattened_tokens, "serving code: tokens flattened to two dimensions"),
    _spelling("in_place", forms.in_place, "nano-vLLM: mul_ on locals"),
    _spelling("one_plus_weight", forms.OnePlusWeight, "transformers: Gemma, Qwen3-Next", one_plus=True, D=128),
    _spelling("one_plus_weight_after_cast", forms.one_plus_weight_after_cast, "1 + weight, cast first", one_plus=True),
    _spelling("weight_plus_one_over_root", forms.weight_plus_one_over_root, "weight + 1 in float32", one_plus=True),
    _spelling("plus_weighted_self", forms.plus_weighted_self, "x + x * weight", one_plus=True),
    _spelling("functional_one_plus", forms.functional_one_plus, "rms_norm called with 1 + weight", one_plus=True),
    _spelling("sum_of_scaled_squares", means.sum_of_scaled_squares, "the factor 1 / D on each square"),
    _spelling("length_of_scaled", means.length_of_scaled, "the length of x / sqrt(D)", D=128),
    _spelling("length_times_root_of_size", means.length_times_root_of_size, "norm · D^-0.5, squared again"),
    _spelling("second_moment", means.second_moment, "variance plus the square of the mean"),
    _spelling("magnitudes", means.magnitudes, "abs before the square"),
    _spelling("matmul_of_rows", means.matmul_of_rows, "each row times itself by matmul"),
    _spelling("size_under_the_root", means.size_under_the_root, "sqrt(D) outside, D · eps inside", weighted=False),
    _spelling("scaled_embedding", means.scaled_embedding, "Gemma: embeddings times sqrt(D)", times=4),
    _spelling("functional_of_scaled", means.functional_of_scaled, "a divided input", times=0.25),
    _spelling("l2norm", means.l2norm, "transformers: Qwen3-Next", D=128, factor=128, weighted=False),
    _spelling("unit_length_in_float", means.unit_length_in_float, "divided by the length", factor=64, weighted=False),
    _spelling("sum_of_squares", means.sum_of_squares, "the same with a gain", factor=64),
    _spelling("divided_by_root_of_size", means.divided_by_root_of_size, "divided by sqrt(D)", factor=8),
    _spelling("functional_of_scaled_bare", means.functional_of_scaled_bare, "no weight", times=0.5, weighted=False),
)
