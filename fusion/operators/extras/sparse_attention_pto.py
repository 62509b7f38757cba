"""A layer of sparse attention in one kernel of another package: prolog, indexer, and attention over the listed keys.

    c = norm(x · W_dq), query = c · W_uq · W_uk, rows of both caches as in `npu_mla_prolog_v3`
    iq = rope(c · W_iq), ik = rope(LayerNorm(x · W_ik)), w = x · W_iw      index_k_cache[slot] = ik
    list = top 2048 of Σₘ w[m] · relu(iq[m] · ik)                          out = softmax(q kᵀ / √(C + Dr)) k

Sizes and epsilons are compiled in. The kernel exists for GE alone, and its schema does not declare that it writes three
caches: the pass emits an overload of ours that does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from fusion._torch.tensors import count, hint
from fusion.operators.cache.pages import Put, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, INT32, compute_dtype
from fusion.operators.flops import causal, products, scores
from fusion.operators.latent.mla_prolog import MLA_PROLOG_V3
from fusion.operators.latent.mla_prolog_numbers import computed
from fusion.operators.limits import Limit
from fusion.operators.operator import Operator, functional
from fusion.operators.rotary.rope import first_rotated
from fusion.operators.sparse.lightning_indexer import LIGHTNING_INDEXER
from fusion.operators.sparse.sparse_flash_attention import SPARSE_FLASH_ATTENTION

LISTED = 2048
"""Number of keys that the indexer lists for each query."""
EPSILON, EPSILON_OF_KEYS = 1e-5, 1e-6
"""Epsilons of both RMS norms, and of the layer norm of the indexer's keys."""
_PROLOG = {
    "token_x": "x", "weight_dq": "w_dq", "weight_uq_qr": "w_uq_qr", "weight_uk": "w_uk", "weight_dkv_kr": "w_dkv_kr",
    "rmsnorm_gamma_cq": "gamma_cq", "rmsnorm_gamma_ckv": "gamma_ckv", "rope_sin": "sin", "rope_cos": "cos",
    "kv_cache": "kv_cache", "kr_cache": "kr_cache", "cache_index": "cache_index",
}  # fmt: skip


def scale_of(latent: int, rope: int) -> float:
    """Return the scale of scores for keys of `latent` plus `rope` lanes, (latent + rope)^-0.5; the kernel does not use
    the head dim before absorption."""
    return (latent + rope) ** -0.5


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Compute the output, and write the three caches. Intermediate values are rounded only where they are products in
    16 bits."""
    named = {name: given[mine] for name, mine in _PROLOG.items()}
    how = {"rmsnorm_epsilon_cq": EPSILON, "rmsnorm_epsilon_ckv": EPSILON, "query_norm_flag": True}
    query, rope, _, latent, _, kv, kr = computed(put, MLA_PROLOG_V3.bind((), named | how))
    keys = _index_keys(put, given)
    listed = _listed(given, latent, keys)
    wide = compute_dtype(query)
    out = SPARSE_FLASH_ATTENTION.fallback(
        query.to(wide), kv, kv, listed, scale_of(kv.shape[-1], kr.shape[-1]), query_rope=rope.to(wide), key_rope=kr,
        block_table=given["block_table"], actual_seq_lengths_kv=given["act_seqs"], layout_kv="PA_BSND",
        attention_mode=2,
    )[0]  # fmt: skip
    return out.to(query.dtype), kv, kr, keys


def _index_keys(put: Put, given: Given) -> Tensor:
    """Compute the indexer's keys and write them by `put` to their cache; the product with `w_idx_k` is not rounded
    before the norm."""
    x, cache = given["x"], given["index_k_cache"]
    wide = compute_dtype(x)
    gamma, beta = (given[name].to(wide) for name in ("in_gamma_k", "in_beta_k"))
    key = layer_norm(x.to(wide) @ given["w_idx_k"].to(wide), gamma.shape, gamma, beta, EPSILON_OF_KEYS).to(x.dtype)
    rows = first_rotated(key.unsqueeze(-2), given["cos"], given["sin"]).flatten(0, 1)
    return put(cache, *stored(cache, rows, given["cache_index"].flatten()))


def _listed(given: Given, latent: Tensor, keys: Tensor) -> Tensor:
    """Compute the positions that the indexer lists, [B, S, 1, K], from the query `latent` and its cache `keys`."""
    query = (latent @ given["w_idx_qb"]).unflatten(-1, (-1, keys.shape[-1]))
    query = first_rotated(query, given["cos"], given["sin"])
    room: Any = given["block_table"].shape[1] * keys.shape[1]
    return LIGHTNING_INDEXER.fallback(
        query, keys, given["x"] @ given["w_idx_proj"], actual_seq_lengths_key=given["act_seqs"],
        block_table=given["block_table"], layout_key="PA_BSND", sparse_count=torch.sym_min(LISTED, room),
    )[0]  # fmt: skip


def _flops(given: Given) -> float:
    """Estimate the operations: the products of each token, the indexer over all positions of its block table under a
    causal mask, and attention over the listed keys."""
    x, up, keys = given["x"], given["w_uk"], given["index_k_cache"]
    names = ("w_dq", "w_uq_qr", "w_uk", "w_dkv_kr", "w_idx_qb", "w_idx_k", "w_idx_proj")
    tokens = count(x) / hint(x.shape[-1])
    room = causal(x.shape[1], given["block_table"].shape[1] * keys.shape[1])
    listed = tokens * hint(up.shape[0]) * min(room, LISTED)
    indexed = 2.0 * tokens * hint(given["w_idx_qb"].shape[1]) * room
    return products(tokens, *(given[name] for name in names)) + indexed + scores(listed, 2 * hint(up.shape[-1]))


_HOST = (
    "Huq == N * (D + Dr)",
    "Hkv == Hckv + Dr",
    "Hiq == M * Di",
    Limit("Dr % 2 == 0 and Dr <= Di", because="the first lanes of the indexer are rotated by the same tables"),
)
_KERNEL = (
    Limit("B == 4", because="its tiling takes no other batch"),
    Limit("S in (1, 2)", because="its tiling takes no more tokens"),
    "Blocks <= 1024 * B",
    "Pages <= 1024",
    "He == 7168",
    "Hcq == 1536",
    "N == 128",
    "D == 128",
    "Hckv == 512",
    "Dr == 64",
    "M == 64",
    "Di == 128",
    "Size == 128",
)
_DIMS = {
    "x": "B S He", "w_dq": "He Hcq", "w_uq_qr": "Hcq Huq", "w_uk": "N D Hckv", "w_dkv_kr": "He Hkv",
    "gamma_cq": "Hcq", "gamma_ckv": "Hckv", "sin cos": "B S Dr", "cache_index": "B S",
    "kv_cache": "Blocks Size 1 Hckv", "kr_cache": "Blocks Size 1 Dr", "block_table": "B Pages", "act_seqs": "B",
    "w_idx_qb": "Hcq Hiq", "w_idx_k": "He Di", "w_idx_proj": "He M", "in_gamma_k in_beta_k": "Di",
    "index_k_cache": "IndexBlocks Size 1 Di",
}  # fmt: skip
_INDICES = ("cache_index", "block_table", "act_seqs")
_SUMMARY = (
    "out = softmax(q kᵀ / √(Hckv + Dr)) k over the top 2048 of Σₘ w[m] relu(iq[m] · ik) of each query; q, q_rope and "
    "rows of both caches as npu_mla_prolog_v3 gives them with epsilons of 1e-5, iq = rope(c w_idx_qb), "
    "ik = rope(LayerNorm(x w_idx_k)) with 1e-6, w = x w_idx_proj; the first Dr lanes are rotated by pairs, even "
    "components first; act_seqs counts the new tokens; {what}, because the vendor's schema hides the writes"
)

SPARSE_ATTENTION_PTO = Operator(
    schema=(
        "custom_pypto::npu_sparse_attention_pto.in_place(Tensor x, Tensor w_dq, Tensor w_uq_qr, Tensor w_uk, "
        "Tensor w_dkv_kr, Tensor gamma_cq, Tensor gamma_ckv, Tensor sin, Tensor cos, Tensor cache_index, "
        "Tensor(a!) kv_cache, Tensor(b!) kr_cache, Tensor block_table, Tensor act_seqs, Tensor w_idx_qb, "
        "Tensor w_idx_k, Tensor w_idx_proj, Tensor in_gamma_k, Tensor in_beta_k, Tensor(c!) index_k_cache) -> Tensor"
    ),
    compute=_computed,
    outputs=lambda x, w_uk: x.new_empty([*x.shape[:2], w_uk.shape[0], w_uk.shape[2]]),
    dims=_DIMS,
    dtypes=dict.fromkeys(_DIMS, BFLOAT16) | dict.fromkeys(_INDICES, INT32),
    limits={"host": _HOST, "ascend910_93": _KERNEL},
    rounds="what each layer gives, and queries times w_uk",
    lowerings=frozenset({"torchair"}),  # there is no kernel to launch by itself
    flops=_flops,
    source=(
        "cann-recipes-infer ops/pypto: docs, goldens, tiling and kernel of deepseek_indexer_attention (int32 indices, "
        "whatever the page says; the first lanes are rotated; probabilities are not rounded in the golden); weights "
        "but w_uk in FRACTAL_NZ"
    ),
    summary=_SUMMARY.format(what="an overload of ours"),
    runs_default=True,
)
SPARSE_ATTENTION_PTO_FUNCTIONAL = functional(
    SPARSE_ATTENTION_PTO,
    "custom_pypto::npu_sparse_attention_pto.functional",
    _SUMMARY.format(what="copies of the caches are the last three results; an overload of ours"),
)
