"""Queries, keys and head weights of an int8 lightning indexer, in one kernel of another package.

    q = int8(rope(c · W_q) · H_q)    k = int8(rope(LayerNorm(x · W_k)) · H_k)    w = x · W_w / √(N · D)

Queries and keys have a scale per token and head. Sizes and the epsilon of the norm are compiled in. The kernel exists
for GE alone, and its schema does not declare that it writes two caches: the pass emits an overload of ours that does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fusion._torch.tensors import hint
from fusion.operators import encodings
from fusion.operators.cache.pages import Put, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT16, FLOAT32, INT8, INT64, compute_dtype
from fusion.operators.flops import products
from fusion.operators.limits import Limit
from fusion.operators.operator import Operator, functional
from fusion.operators.quant.quantisation import int8_product
from fusion.operators.rotary.rope import first_rotated

EPSILON = 1e-6
"""Epsilon of the norm: compiled into the kernel, which ignores the argument."""


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Compute int8 queries, their scales and head weights; then write int8 keys and their scales to both caches."""
    x, keys, scales = given["token_x"], given["idx_k_cache"], given["idx_k_scale_cache"]
    wide, heads = compute_dtype(x), given["weights_proj"].shape[1]
    query, query_scale = _quantised(_queries(given, heads) @ given["hadamard_q"])
    key, key_scale = _quantised(_keys(given) @ given["hadamard_k"])
    rows, slots = key.unsqueeze(-2), given["idx_k_cache_index"]
    filled = put(keys, *stored(keys, rows, slots))
    scaled = put(scales, *stored(scales, key_scale.unsqueeze(-2).to(scales.dtype), slots))
    weights = (x @ given["weights_proj"]).to(wide) * (heads * keys.shape[-1]) ** -0.5
    dtype = _scale_dtype(x)
    return query, query_scale.to(dtype), weights.to(dtype), filled, scaled


def _scale_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scales and head weights: float16, or the dtype of `x` in a wider graph."""
    return torch.float16 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _queries(given: Given, heads: int) -> Tensor:
    """Compute the rotated queries [T, N, D], before the product with `hadamard_q`."""
    x, tokens = given["token_x"], given["q_norm_scale"]
    product = int8_product(given["q_norm"], given["wq_b"]).to(tokens.dtype) * tokens
    scaled = product * given["wq_b_scale"].to(tokens.dtype).reshape(1, -1)
    return first_rotated(scaled.to(x.dtype).unflatten(-1, (heads, -1)), given["cos_idx_rope"], given["sin_idx_rope"])


def _keys(given: Given) -> Tensor:
    """Compute the normalised and rotated keys [T, D], before the product with `hadamard_k`; the product with `wk` stays
    unrounded before the norm."""
    x = given["token_x"]
    wide = compute_dtype(x)
    gamma, beta = (given[name].to(wide) for name in ("ln_gamma_k", "ln_beta_k"))
    key = layer_norm(x.to(wide) @ given["wk"].to(wide), gamma.shape, gamma, beta, given["layernorm_epsilon_k"])
    return first_rotated(key.to(x.dtype).unsqueeze(-2), given["cos_idx_rope"], given["sin_idx_rope"]).squeeze(-2)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `x` [.., D] row by row to int8; return the scales [.., 1] as well, 0 for a row of zeros."""
    wide = x.to(compute_dtype(x))
    largest = wide.abs().amax(-1, keepdim=True)
    factor = encodings.INT8.bound / largest.masked_fill(largest == 0, 1)
    return encodings.INT8.stored(wide * factor), (1 / factor).masked_fill(largest == 0, 0)


def _outputs(given: Given) -> tuple[Tensor, ...]:
    x, heads, lanes = given["token_x"], given["weights_proj"].shape[1], given["wk"].shape[1]
    tokens, dtype = x.shape[0], _scale_dtype(x)
    return (
        x.new_empty([tokens, heads, lanes], dtype=torch.int8),
        x.new_empty([tokens, heads, 1], dtype=dtype),
        x.new_empty([tokens, heads], dtype=dtype),
    )


_HOST = (
    "Hq == N * D",
    Limit("Dr % 2 == 0 and Dr <= D", because="the first lanes are rotated"),
    "layout_query == 'TND' and layout_key == 'PA_BSND'",
    Limit(f"layernorm_epsilon_k == {EPSILON}", because="the kernel has it compiled in and reads none"),
)
_KERNEL = ("He == 7168", "Hcq == 1536", "N == 64", "D == 128", "Dr == 64", "Size == 128")
_DIMS = {
    "token_x": "T He", "q_norm": "T Hcq", "q_norm_scale": "T 1", "wq_b": "Hcq Hq", "wq_b_scale": "Hq 1",
    "wk": "He D", "weights_proj": "He N", "ln_gamma_k ln_beta_k": "D", "cos_idx_rope sin_idx_rope": "T Dr",
    "hadamard_q hadamard_k": "D D", "idx_k_cache": "Blocks Size 1 D", "idx_k_scale_cache": "Blocks Size 1 1",
    "idx_k_cache_index": "T",
}  # fmt: skip
_OTHERS = {
    "q_norm wq_b idx_k_cache": INT8, "q_norm_scale wq_b_scale": FLOAT32, "idx_k_scale_cache": FLOAT16,
    "idx_k_cache_index": INT64,
}  # fmt: skip
_SUMMARY = (
    "query = int8(round(rope(round(q_norm wq_b · scales)) hadamard_q)) with scales of each token and head, weights = "
    "round(token_x weights_proj) / √(N · D); idx_k_cache[slot] = int8(round(rope(LayerNorm(token_x wk)) hadamard_k)), "
    "idx_k_scale_cache[slot] = its scale; the first Dr lanes are rotated by pairs, even components first; scales and "
    "weights in float16; {what}, because the vendor's schema hides the writes"
)

LIGHTNING_INDEXER_PROLOG_PTO = Operator(
    schema=(
        "custom_pypto::npu_lightning_indexer_prolog_pto.in_place(Tensor token_x, Tensor q_norm, Tensor q_norm_scale, "
        "Tensor wq_b, Tensor wq_b_scale, Tensor wk, Tensor weights_proj, Tensor ln_gamma_k, Tensor ln_beta_k, "
        "Tensor cos_idx_rope, Tensor sin_idx_rope, Tensor hadamard_q, Tensor hadamard_k, Tensor(a!) idx_k_cache, "
        "Tensor(b!) idx_k_scale_cache, Tensor idx_k_cache_index, float layernorm_epsilon_k, *, "
        'str? layout_query="TND", str? layout_key="PA_BSND") -> (Tensor, Tensor, Tensor)'
    ),
    compute=_computed,
    without_effect=frozenset({"layout_query", "layout_key"}),
    outputs=_outputs,
    dims=_DIMS,
    dtypes={name: BFLOAT16 for names in _DIMS for name in names.split()}
    | {name: dtypes for names, dtypes in _OTHERS.items() for name in names.split()},
    limits={"host": _HOST, "ascend910_93": _KERNEL},
    lowerings=frozenset({"torchair"}),  # there is no kernel to launch by itself
    flops=lambda token_x, wq_b, wk, weights_proj, hadamard_q: products(
        hint(token_x.shape[0]), wq_b, wk, weights_proj, *(hadamard_q,) * (hint(weights_proj.shape[1]) + 1)
    ),
    source=(
        "cann-recipes-infer ops/pypto: page, golden, tiling and kernel of lightning_indexer_prolog; wq_b, wk and "
        "weights_proj in FRACTAL_NZ"
    ),
    summary=_SUMMARY.format(what="an overload of ours"),
    runs_default=True,
)
LIGHTNING_INDEXER_PROLOG_PTO_FUNCTIONAL = functional(
    LIGHTNING_INDEXER_PROLOG_PTO,
    "custom_pypto::npu_lightning_indexer_prolog_pto.functional",
    _SUMMARY.format(what="copies of the caches are results 3 and 4; an overload of ours"),
)
