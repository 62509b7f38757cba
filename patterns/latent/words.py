"""What values mean in attention over a latent c [B, T, C] and a rotated key r [B, T, Dr] that all heads share.

k[b, n, t] = [W_UK[n] c[b, t], r[b, t]]      v[b, n, t] = c[b, t] W_UV[n]                (DeepSeek-V2, 2024, §2.1)
"""

from fusion import word
from patterns.attention.words import SOFTMAX_ATTENTION

_SEEN = {
    name: dims for name, dims in (SOFTMAX_ATTENTION.captures or {}).items() if name not in ("q", "k", "v", "scale")
}
_PLACE = {"width": "lanes of a head", "start": "the first of them"}
_LANES = {"weight": "[N · width, K]", **_PLACE}
_ROWS = "only so many of the first keys are read, None for all"
_LAYER = {"layer": "a value that reads as int8_matmul [.., N · width]", **_PLACE}

LATENT_QUERIES = word(
    "latent_queries",
    "queries of all heads [B, N, S, D + Dr], cut as some keys are",
    nope="[B, N, S, D], where the model does not absorb W_UK itself", rope="[B, N, S, Dr]",
    absorbed="nope W_UK [B, N, S, C]", keys="those keys: others may be cut or projected otherwise",
)  # fmt: skip
LATENT_KEYS = word(
    "latent_keys",
    "keys of all heads",
    latent="c", rope="r", up="W_UK [N, D, C]", rows=_ROWS,
)  # fmt: skip
UNROTATED_QUERIES = word(
    "unrotated_queries",
    "queries of all heads [B, N, S, D] over keys without rotated lanes",
    nope="themselves", absorbed="nope W_UK [B, N, S, C]", keys="those keys",
)  # fmt: skip
UNROTATED_KEYS = word(
    "unrotated_keys",
    "keys of all heads without rotated lanes",
    latent="c", up="W_UK [N, D, C]", rows=_ROWS,
)  # fmt: skip
LATENT_VALUES = word("latent_values", "values of all heads", latent="c", up="W_UV [N, C, E]")
_OF_ROWS = {
    "latent": "c", "rows": _ROWS, "dtype": "of the product",
    "output_view": "steps from the product to the value; sizes that are symbolic by name",
}  # fmt: skip
LATENT_SCORES = word(
    "latent_scores",
    "scale · q kᵀ of keys that are projected from a latent [B, N, S, T]",
    nope="[B, N, S, D]", absorbed="nope W_UK [B, N, S, C]", rope="[B, N, S, Dr], if any lanes are rotated", k_rope="r",
    up="W_UK [N, D, C]", scale="a number", **_OF_ROWS,
)  # fmt: skip
LATENT_CONTEXT = word(
    "latent_context",
    "weights of keys times values that are projected from a latent [B, N, S, E]",
    weights="[B, N, S, T]", up="W_UV [N, C, E]", **_OF_ROWS,
)  # fmt: skip
LATENT_SDPA = word(
    "latent_sdpa",
    "scaled_dot_product_attention over keys and values that are projected from latents, as the model calls it",
    nope="[B, N, S, D]", absorbed="nope W_UK [B, N, S, C]", rope="[B, N, S, Dr], if any lanes are rotated", k_rope="r",
    up="W_UK [N, D, C]", scale="a number", bias="attn_mask, whatever it is",
    values="c of the values, where it is another",
    up_value="W_UV [N, C, E]", value_rows="as rows, of the values", **_OF_ROWS,
)  # fmt: skip
ABSORBED_QUERY = word(
    "absorbed_query",
    "lanes of every head of x Wᵀ times W_UK [B, N, S, C]",
    x="[B, S, K]",
    **_LANES,
    up="W_UK [N, D, C]",
)
HEAD_LANES = word(
    "head_lanes",
    "lanes of every head of x Wᵀ",
    x="[B, S, K]", **_LANES, heads_first="whether heads stand before positions",
)  # fmt: skip
LAYER_QUERY = word(
    "layer_query",
    "lanes of every head of a layer times W_UK [B, N, S, C]",
    **_LAYER, up="W_UK [N, D, C]",
)  # fmt: skip
LAYER_LANES = word(
    "layer_lanes",
    "lanes of every head of a layer",
    **_LAYER, heads_first="whether heads stand before positions",
)  # fmt: skip
HEAD_PRODUCT = word(
    "head_product",
    "x times a matrix of each head",
    x="[B, N, S, K]", weight="[N, K, M]", output_view="steps from [B, N, S, M] to the value",
)  # fmt: skip
INT8_LATENT_ATTENTION = word(
    "int8_latent_attention",
    "scores = scale · ((query latentᵀ) · tokens · of_keys · keys_by + ..), out = P latent · of_values · values_by",
    query="[B, N, S, C] in int8", tokens="[B, N, S, 1], a scale of each token and head", latent="c in int8",
    rope="a folded_query [B, N, S, Dr]", k_rope="r", of_keys="[1]", of_values="[1]", keys_by="a number",
    values_by="a number", scale="a number", **_SEEN,
)  # fmt: skip
FOLDED_QUERY = word(
    "folded_query",
    "rope / (tokens · of_keys · by): what is added to the int8 products before they are scaled",
    rope="[B, N, S, Dr]", tokens="[B, N, S, 1]", of_keys="[1]", by="a number",
)  # fmt: skip
INT8_PROBABILITY_ATTENTION = word(
    "int8_probability_attention",
    "out = (round(127 p) latent) / 127 · of_values · values_by / Σ p, p = exp(s - max s), "
    "s = scale · (of_scores · (query latentᵀ) + rope k_ropeᵀ)",
    query="[B, N, S, C] in int8", rope="[B, N, S, Dr]", latent="c in int8", k_rope="r", of_scores="[N]",
    of_values="[N] or [1]", values_by="a number", scale="a number", **_SEEN,
)  # fmt: skip
