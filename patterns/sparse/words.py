"""What values mean where an indexer chooses the keys of each query (DeepSeek-V3.2, 2025)."""

from fusion import word

_SEEN = {
    "mask_kind": "of the keys that may be chosen, as of attention",
    "window": "None",
    "kv_len": "how many keys there are for every sequence",
    "kv_lens": "[B], for each of them",
    "row_lens": "[B, S], for each query where that is no causal order, beside no other; [B, 1] for the first ones, "
    "and one more for each that follows",
    "segment": "the number of each packed token's segment, of T elements, which never falls: each query sees the keys "
    "of its own segment up to itself, and nothing else is said",
    "segments": "a bound above these numbers",
    "every_row_nonempty": "whether every query is known to see a key",
}

_SCORED = {
    "query": "[B, S, N, D]",
    "key": "[B, T, D]",
    "weights": "[B, S, N], without which all heads count alike",
    "count": "K",
}

_INT8 = {
    "query_scale": "[B, S, N], of int8 queries, that weights are multiplied by",
    "key_scale": "[B, T], of int8 keys, that scores are multiplied by",
}

TOPK_MASK = word(
    "topk_mask",
    "a mask of attention that shows the keys in a list",
    places="[B, S, K]", distinct="whether no row names a key twice", **_SEEN,
    hidden="[B, S, T], True where a key is hidden besides, listed or not",
    ends="whether an entry that it hides is followed by hidden ones alone",
    room="which entry names the first key, and how many keys there are, where an entry may name none of them",
    first="how many of the first keys it shows besides", last="how many of the last ones that a query sees",
    high="[B], the last key that the first query sees", offset="a number that is added to it",
    moving="whether each query sees one key more than the one before",
)  # fmt: skip
LIGHTNING_INDEXER = word(
    "lightning_indexer",
    "places of the K largest of Σ_n weights[i, n] · relu(query[i, n] · key[j]) [B, S, K]",
    **_SCORED, places="the list itself", **_SEEN, **_INT8,
)  # fmt: skip
LISTED_ATTENTION = word(
    "listed_attention",
    "softmax(scale · q kᵀ) v over the keys in a list, each as often as it is named, arranged as output_view says",
    q="[B, N, S, D]", k="[B, 1, T, D]", v="[B, 1, T, E]", scale="a number",
    places="[B, S, K]; one that is negative hides its entry",
    hidden="[B, S, K], True for an entry that is hidden besides",
    distinct="whether no row of them names a key twice",
    ends="whether an entry that is hidden is followed by hidden ones alone",
    fully_masked_row='"zero", "nan" or "mean" (of the rows at all places): what a query gives of which all is hidden',
    output_view="steps from [B, N, S, E] to the value; sizes that are symbolic by name",
)  # fmt: skip
INDEXER_LIST = word(
    "indexer_list",
    "what a lightning indexer lists for each query, best first, and -1 behind it where a query sees fewer keys [.., K]",
    **_SCORED, **_SEEN, **_INT8, dtype="of the list",
    entries="how many keys are listed, as many as there are where these are fewer than K",
    offset="a number that is added to the keys, absent for 0",
)  # fmt: skip

_LISTED = {
    "ids": "the list [.., K], which names no key twice",
    "status": "what the slots of the buffer hold before [.., K + 1], a number of tokens last",
}
KEPT_ROWS = word(
    "kept_rows",
    "a buffer with the rows of listed keys: those that it held stay, the others go to its free slots in their order",
    cache="the buffer before [Block, Size, ..]", table="of each list [.., P]", full="the cache [Block, Size, ..]",
    full_table="of each list [.., P]", packed="whether rows are in int8, which hold all lanes", **_LISTED,
)  # fmt: skip
KEPT_STATUS = word("kept_status", "which key each of these slots holds then, and K last", **_LISTED)
UNKEPT_ROWS = word("unkept_rows", "rows of listed keys that no such buffer keeps", reason="why it does not")
