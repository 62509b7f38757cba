"""Words for the values of attention over a latent c [B, T, C] and a rotated key r [B, T, Dr], shared by all heads.

k[b, n, t] = [W_UK[n] c[b, t], r[b, t]]      v[b, n, t] = c[b, t] W_UV[n]                (DeepSeek-V2, 2024, §2.1)
"""

from fusion import word
from patterns.attention.words import SOFTMAX_ATTENTION

_SEEN = {
    name: dims for name, dims in (SOFTMAX_ATTENTION.captures or {}).items() if name not in ("q", "k", "v", "scale")
}
_PLACE = {"width": "number of lanes of each head in the layer", "start": "the first lane of a head that is taken"}
_LANES = {"weight": "W [N · width, K]", **_PLACE}
_ROWS = "number of leading keys that the model reads; None for all"
_LAYER = {"layer": "result of an int8_matmul [.., N · width], or a multiple of one", **_PLACE}

LATENT_QUERIES = word(
    "latent_queries",
    "queries of all heads: [nope, rope] [B, N, S, D + Dr], or [absorbed, rope] where the model absorbs W_UK itself",
    nope="unrotated lanes [B, N, S, D], where the model does not absorb W_UK itself", rope="[B, N, S, Dr]",
    absorbed="nope W_UK [B, N, S, C]", keys="the latent_keys whose split into lanes and W_UK these queries follow",
)  # fmt: skip
LATENT_KEYS = word(
    "latent_keys",
    "keys of all heads: [c W_UK, r] [B, N, T, D + Dr], or [c, r] [B, 1, T, C + Dr] where the model absorbs W_UK itself",
    latent="c", rope="r", up="W_UK [N, D, C], where the model does not absorb it itself", rows=_ROWS,
)  # fmt: skip
UNROTATED_QUERIES = word(
    "unrotated_queries",
    "queries of all heads [B, N, S, D] over keys without rotated lanes",
    nope="the queries", absorbed="nope W_UK [B, N, S, C]", keys="the unrotated_keys that W_UK projects",
)  # fmt: skip
UNROTATED_KEYS = word(
    "unrotated_keys",
    "keys of all heads without rotated lanes: c W_UK [B, N, T, D]",
    latent="c", up="W_UK [N, D, C]", rows=_ROWS,
)  # fmt: skip
LATENT_VALUES = word(
    "latent_values",
    "values of all heads: c W_UV [B, N, T, E], or c where the model multiplies the result by W_UV itself",
    latent="c", up="W_UV [N, C, E], where the model does not multiply the result by it itself",
)  # fmt: skip
_PRODUCT = {
    "latent": "c", "rows": _ROWS, "dtype": "dtype of the product",
    "output_view": "reshapes, permutes and casts from the product to the value, with symbolic sizes by name",
}  # fmt: skip
LATENT_SCORES = word(
    "latent_scores",
    "scale · q kᵀ [B, N, S, T] of keys that are projected from a latent",
    nope="[B, N, S, D]", absorbed="nope W_UK [B, N, S, C]", rope="[B, N, S, Dr], if any lanes are rotated", k_rope="r",
    up="W_UK [N, D, C]", scale="a number", **_PRODUCT,
)  # fmt: skip
LATENT_CONTEXT = word(
    "latent_context",
    "P v [B, N, S, E]: finite weights of the keys times values that are projected from a latent",
    weights="P [B, N, S, T]", up="W_UV [N, C, E]", **_PRODUCT,
)  # fmt: skip
LATENT_SDPA = word(
    "latent_sdpa",
    "a call of scaled_dot_product_attention on keys and values that are projected from latents",
    nope="[B, N, S, D]", absorbed="nope W_UK [B, N, S, C]", rope="[B, N, S, Dr], if any lanes are rotated", k_rope="r",
    up="W_UK [N, D, C]", scale="a number", bias="attn_mask, boolean or additive",
    values="latent of the values, where they have another latent or other rows than the keys",
    up_value="W_UV [N, C, E]", value_rows="number of leading values that the model reads; None for all", **_PRODUCT,
)  # fmt: skip
ABSORBED_QUERY = word(
    "absorbed_query",
    "absorbed queries [B, N, S, C]: lanes of each head of x Wᵀ, times W_UK",
    x="[B, S, K]",
    **_LANES,
    up="W_UK [N, D, C]",
)
HEAD_LANES = word(
    "head_lanes",
    "lanes of each head of x Wᵀ",
    x="[B, S, K]", **_LANES, heads_first="True for [B, N, S, ..], False for [B, S, N, ..]",
)  # fmt: skip
LAYER_QUERY = word(
    "layer_query",
    "absorbed queries [B, N, S, C]: lanes of each head of a W8A8 layer, times W_UK",
    **_LAYER, up="W_UK [N, D, C]",
)  # fmt: skip
LAYER_LANES = word(
    "layer_lanes",
    "lanes of each head of a W8A8 layer",
    **_LAYER, heads_first="True for [B, N, S, ..], False for [B, S, N, ..]",
)  # fmt: skip
HEAD_PRODUCT = word(
    "head_product",
    "x · weight, a matrix product for each head",
    x="[B, N, S, K]", weight="[N, K, M]",
    output_view="reshapes and permutes from [B, N, S, M] to the value, with symbolic sizes by name",
)  # fmt: skip
INT8_LATENT_ATTENTION = word(
    "int8_latent_attention",
    "out = softmax(s) latent · of_values · values_by, "
    "s = scale · tokens · of_keys · keys_by · (query latentᵀ + rope k_ropeᵀ)",
    query="int8 [B, N, S, C]", tokens="scale of each token and head [B, N, S, 1]", latent="c in int8",
    rope="a folded_query [B, N, S, Dr]", k_rope="r", of_keys="[1]", of_values="[1]", keys_by="a number",
    values_by="a number", scale="a number", **_SEEN,
)  # fmt: skip
FOLDED_QUERY = word(
    "folded_query",
    "rope / (tokens · of_keys · by): rotated queries, divided by the scales that the sum with the int8 scores is "
    "multiplied by",
    rope="rotated queries [B, N, S, Dr]", tokens="[B, N, S, 1]", of_keys="[1]", by="a number",
)  # fmt: skip
INT8_PROBABILITY_ATTENTION = word(
    "int8_probability_attention",
    "out = (round(127 p) latent) / 127 · of_values · values_by / Σ p, p = exp(s - max s), "
    "s = scale · (of_scores · (query latentᵀ) + rope k_ropeᵀ)",
    query="int8 [B, N, S, C]", rope="[B, N, S, Dr]", latent="c in int8", k_rope="r", of_scores="[N]",
    of_values="[N] or [1]", values_by="a number", scale="a number", **_SEEN,
)  # fmt: skip
