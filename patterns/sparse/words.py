"""Words of sparse attention, in which an indexer lists the keys that each query attends to (DeepSeek-V3.2, 2025)."""

from fusion import word

SUNK = (
    "sink: it stands beside scores of listed rows; npu_sparse_flash_attention requires scores without one, "
    "as its argument sinks is not computed by this package"
)
"""Reason for attention over listed keys with a sink."""

_SEEN = {
    "mask_kind": '"none", "causal_upper_left" or "causal_lower_right": keys that a query may see, listed or not',
    "window": "number of keys before its own that a query sees, None for all of them",
    "kv_len": "number of keys of every sequence, None for all keys",
    "kv_lens": "[B], number of keys of each sequence",
    "row_lens": "[B, S], number of keys that each query sees; or [B, 1], that of the first query, where each later "
    "query sees one key more; no other bound is given beside row_lens",
    "segment": "non-decreasing segment id of each packed token, of T elements: a query sees the keys of its own "
    "segment up to itself; no other bound is given beside segment",
    "segments": "exclusive upper bound of the segment ids",
    "every_row_nonempty": "True if every query is proven to see a key",
}

_SCORED = {
    "query": "[B, S, N, D]",
    "key": "[B, T, D]",
    "weights": "[B, S, N], absent where all heads count alike",
    "count": "K",
}

_INT8 = {
    "query_scale": "[B, S, N], scales of int8 queries, which multiply the weights",
    "key_scale": "[B, T], scales of int8 keys, which multiply the scores",
}

TOPK_MASK = word(
    "topk_mask",
    "mask of attention that shows each query the keys in its list",
    places="[B, S, K], positions of the listed keys", distinct="True if no list names a key twice", **_SEEN,
    hidden="[B, S, T], True for a key that the mask hides even if it is listed",
    ends="True if in each list only entries that `hidden` hides follow such an entry",
    room="value of the entry that names key 0, and number of keys, where an entry may name no key",
    first="number of first keys that every query sees in addition to its list",
    last="number of last keys, up to high + offset, that every query sees in addition to its list",
    high="[B], bound of `last` for the first query, absent for 0", offset="integer that is added to `high`",
    moving="True if the bound of `last` is one key further for each later query",
)  # fmt: skip
LIGHTNING_INDEXER = word(
    "lightning_indexer",
    "positions of the K largest of Σ_n weights[i, n] · relu(query[i, n] · key[j]), of visible keys j [B, S, K]",
    **_SCORED, places="[B, S, K], the list as the model computes it", **_SEEN, **_INT8,
)  # fmt: skip
LISTED_ATTENTION = word(
    "listed_attention",
    "softmax(scale · q kᵀ) v over the keys in a list, each as often as it is listed, in the layout of output_view",
    q="[B, N, S, D]", k="[B, 1, T, D]", v="[B, 1, T, E]", scale="factor of the scores",
    places="[B, S, K], positions of keys; a negative one is a hidden entry",
    hidden="[B, S, K], True for a further hidden entry",
    distinct="True if no list names a key twice",
    ends='True if in each list only hidden entries follow a hidden one; "indexer" for the list of an indexer',
    fully_masked_row='"zero", "nan" or "mean" (of the listed rows): result of a query whose entries are all hidden',
    output_view="reshapes and permutes from [B, N, S, E] to the value, with symbolic sizes by name",
)  # fmt: skip
INDEXER_LIST = word(
    "indexer_list",
    "list of a lightning indexer, best key first, with -1 after the last key where a query sees fewer keys [.., K]",
    **_SCORED, **_SEEN, **_INT8, dtype="dtype of the list",
    entries="length of the list: K, or the number of keys where this is less",
    offset="integer that is added to each position, absent for 0",
)  # fmt: skip

_LISTED = {
    "ids": "[.., K], positions of the listed keys, of which no list names one twice",
    "status": "[.., K + 1], position of the key in each slot of the buffer before the step, then the number of keys",
}
KEPT_ROWS = word(
    "kept_rows",
    "buffer of the rows of listed keys after a step: rows that are in it stay, new ones go to its free slots in order",
    cache="the buffer before the step [Block, Size, ..]", table="block table of the buffer for each list [.., P]",
    full="cache of all keys [Block, Size, ..]", full_table="block table of that cache for each list [.., P]",
    packed="True if rows are packed in int8, with the rotated lanes", **_LISTED,
)  # fmt: skip
KEPT_STATUS = word(
    "kept_status",
    "position of the key in each slot of a buffer of listed rows after a step, then K [.., K + 1]",
    **_LISTED,
)
