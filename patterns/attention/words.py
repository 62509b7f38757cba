"""Words of softmax attention: queries [B, N, S, D], keys [B, M, T, D], values [B, M, T, E], where M divides N."""

from fusion import word

PARTS = 8
"""The most parts of the keys that one reading of `lse_merge` merges."""

_VISIBLE = {
    "mask": "the dense mask [B or 1, 1, S, T], True for a hidden key; absent where there is none",
    "count": "the number of first keys, possibly 0, that every query of a sequence sees [B], if a dense mask says no "
    "more; absent else",
    "mask_kind": '"none", "causal_upper_left" (key j ≤ query i), "causal_lower_right" (the last query sees the last '
    'key) or "dense" (see mask)',
    "window": "the number of keys before its own that a query sees; None for all",
    "kv_len": "the number of keys of every sequence, or a tuple of one for each; None for all T",
    "kv_lens": "the number of keys of each sequence [B]",
    "levels": "the numbers, at most 0, that masks add to the scores [B or 1, 1, S, T], if a query without a visible "
    "key attends to the keys with the greatest of them; absent else",
    "fully_masked_row": 'the output for a query without a visible key: "zero", "nan", "mean" (of all values) or, by '
    'levels, "lowest", "lowest_or_nan" or "lowest_or_zero" (NaN or 0 if all levels are -inf)',
}
"""Captures of each word of attention for the keys that a query sees."""

_BIAS = {
    "bias": "the addend of the scaled scores [B or 1, N, S, T], in the dtype of the queries; absent for none",
    "empty_bias": 'the output for a query without a visible key, "zero" or "nan", if the bias may be -inf; absent else',
}
_VIEW = 'the reshapes, permutes and casts from [B, N, S, E] to the value; symbolic sizes are "B", "S" or -1'
_SINK = "[N], a score with a share of the softmax, but without a value"
_MIXED = "True if k and v are dequantised to another dtype than that of q; absent else"

SOFTMAX_ATTENTION = word(
    "softmax_attention",
    "softmax(scale · q kᵀ + bias) v over the visible keys",
    q="[B, N, S, D]", k="[B, M, T, D]", v="[B, M, T, E]", scale="a number", **_VISIBLE, output_view=_VIEW,
    sink=_SINK, mixed=_MIXED, **_BIAS,
)  # fmt: skip
ATTENTION_MASK = word(
    "attention_mask",
    "the dense mask of an attention [B or 1, 1, S, T], True for a hidden key",
    frame="the `Frame` of the rows of the scores", terms="the `Term`s that the mask joins, outermost first", keys="T",
    sink="the sink of the attention [N]; None without one",
)  # fmt: skip
SEGMENTED_ATTENTION = word(
    "segmented_attention",
    "softmax_attention of packed segments, each over its own keys alone",
    q="[1, N, S, D]", k="[1, M, T, D]", v="[1, M, T, E]", scale="a number", **_VISIBLE, output_view=_VIEW, sink=_SINK,
    ends="the end of each segment in the queries", key_ends="the end of each segment in the keys", **_BIAS,
)  # fmt: skip
NUMBERED_ATTENTION = word(
    "numbered_attention",
    "softmax_attention of packed tokens, each over the keys with its own segment id",
    q="[1, N, T, D]", k="[1, M, T, D]", v="[1, M, T, E]", scale="a number", **_VISIBLE, output_view=_VIEW, sink=_SINK,
    segment="the segment id of each token, T elements that never decrease",
    segments="the number of segments; ids are less", **_BIAS,
)  # fmt: skip
PAGED_SEGMENTS = word(
    "paged_segments",
    "keys or values of packed segments [1, M, T, D], each segment gathered from pages by a row of a block table",
    rows="the gathered value", pages="[Block, ..]", block_table="[Segment, P]", size="rows of a page",
    layout='the layout of a page: "BSND", "BNSD" or "NZ"',
)  # fmt: skip
SOFTMAX_LSE = word(
    "softmax_lse",
    "log Σ exp of the scores of softmax_attention over the visible keys [B, N, S]",
    q="[B, N, S, D]", k="[B, M, T, D]", scale="a number", sink=_SINK, mixed=_MIXED, **_VISIBLE, **_BIAS,
    lse_view="a reshape of [B, N, S] to dims of other sizes, as heads in groups; () without one",
)  # fmt: skip
LSE_MERGE = word(
    "lse_merge",
    "Σᵢ exp(lseᵢ - lse) outᵢ with lse = log Σᵢ exp(lseᵢ): outputs of attention over parts of the keys",
    **{f"{name}{number}": dims for number in range(PARTS) for name, dims in (("out", "[*B, D]"), ("lse", "[*B]"))},
)
