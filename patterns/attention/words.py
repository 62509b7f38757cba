"""What values mean in softmax attention; queries [B, N, S, D], keys [B, M, T, D], values [B, M, T, E], M divides N."""

from fusion import word

PARTS = 8
"""So many parts of the keys can be merged at once."""

_SEEN = {
    "mask": "a dense mask [B, N, S, T] where one is kept, True for a key that is hidden",
    "count": "how many first keys, perhaps none, every query of a sequence sees [B], where a dense mask says no more",
    "mask_kind": '"none", "causal_upper_left" (j ≤ i), "causal_lower_right" (the last query sees the last key '
    'there is) or "dense"',
    "window": "how many keys before its own a query sees, None for all",
    "kv_len": "how many keys there are for every sequence, None for all T",
    "kv_lens": "how many keys there are for each sequence [B]",
    "levels": "by how much keys are lowered [B, N, S, T], where a query without keys sees those that are lowered least",
    "fully_masked_row": '"zero", "nan", "mean", "lowest", "lowest_or_nan" or "lowest_or_zero": what a query without '
    "keys gives",
}
"""What every reading of attention says of the keys that are seen."""

_BIAS = {
    "bias": "what is added to the scaled scores [B or 1, N, S, T], in the dtype of the queries; absent without one",
    "empty_bias": '"zero" or "nan": what a query gives that sees no key, if the bias may hold -inf; absent if not',
}

SOFTMAX_ATTENTION = word(
    "softmax_attention",
    "softmax(scale · q kᵀ + bias) v over the keys that are seen, arranged as output_view says",
    q="[B, N, S, D]", k="[B, M, T, D]", v="[B, M, T, E]", scale="a number", **_SEEN,
    output_view="steps from [B, N, S, E] to the value; sizes that are symbolic by name",
    sink="[N], a score that takes its share and has no value",
    mixed="True where k and v are read from int8 in another dtype than that of q; absent if not",
    **_BIAS,
)  # fmt: skip
SEGMENTED_ATTENTION = word(
    "segmented_attention",
    "such attention of segments of packed tokens, each to its own keys alone",
    q="[1, N, S, D]", k="[1, M, T, D]", v="[1, M, T, E]", scale="a number", **_SEEN,
    output_view="as of softmax_attention", sink="[N]",
    ends="where each segment of the queries ends", key_ends="the same of the keys", **_BIAS,
)  # fmt: skip
NUMBERED_ATTENTION = word(
    "numbered_attention",
    "the same of packed tokens of which data says the segment",
    q="[1, N, T, D]", k="[1, M, T, D]", v="[1, M, T, E]", scale="a number", **_SEEN,
    output_view="as of softmax_attention", sink="[N]",
    segment="the number of each token's segment, of T elements, which never falls from one token to the next",
    segments="below which number these are", **_BIAS,
)  # fmt: skip
PAGED_SEGMENTS = word(
    "paged_segments",
    "rows of segments, one after the other, each gathered from pages by a row of a block table [1, M, T, D]",
    rows="the value", pages="[Block, ..]", block_table="[Segment, P]", size="rows of a page",
    layout='"BSND", "BNSD" or "NZ": how a page lies',
)  # fmt: skip
SOFTMAX_LSE = word(
    "softmax_lse",
    "log Σ exp of the scores of such an attention [B, N, S]",
    q="[B, N, S, D]", k="[B, M, T, D]", scale="a number", sink="[N]", mixed="as of softmax_attention", **_SEEN, **_BIAS,
)  # fmt: skip
LSE_MERGE = word(
    "lse_merge",
    "Σᵢ exp(lseᵢ - lse) outᵢ with lse = log Σᵢ exp(lseᵢ): outputs of attention over parts of the keys",
    **{f"{name}{number}": dims for number in range(PARTS) for name, dims in (("out", "[*B, D]"), ("lse", "[*B]"))},
)
