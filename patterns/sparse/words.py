"""What values mean where an indexer chooses the keys of each query (DeepSeek-V3.2, 2025)."""

from fusion import word

_SEEN = {
    "mask_kind": "of the keys that may be chosen, as of attention",
    "window": "None",
    "kv_len": "how many keys there are for every sequence",
    "kv_lens": "[B], for each of them",
    "every_row_nonempty": "whether every query is known to see a key",
}

TOPK_MASK = word(
    "topk_mask",
    "a mask of attention that shows the keys in a list",
    places="[B, S, K]", distinct="whether no row names a key twice", **_SEEN,
)  # fmt: skip
LIGHTNING_INDEXER = word(
    "lightning_indexer",
    "places of the K largest of Σ_n weights[i, n] · relu(query[i, n] · key[j]) [B, S, K]",
    query="[B, S, N, D]", key="[B, T, D]", weights="[B, S, N]", places="the list itself", count="K", **_SEEN,
)  # fmt: skip
