"""Both sides of the limits of the latent prolog, products per head, the indexer and attention over listed keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.limit_cases import starts, t

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
EVERY = (HOST, *CHIPS)
F16, F32, INT, LONG = torch.float16, torch.float32, torch.int32, torch.int64


# the latent prolog -------------------------------------------------------------------------------------------------


def prolog(
    *tokens: int, he: int = 7168, hcq: int = 1536, n: int = 8, d: int = 128, dr: int = 64, hckv: int = 512,
    size: int = 128, mode: str = "PA_BSND", dtype: torch.dtype = torch.bfloat16, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    tokens = tokens or (5,)
    caches = tokens if mode in ("BSND", "TND") else (9, size)
    shapes = {
        "token_x": (*tokens, he), "weight_dq": (he, hcq), "weight_uq_qr": (hcq, n * (d + dr)),
        "weight_uk": (n, d, hckv), "weight_dkv_kr": (he, hckv + dr), "rmsnorm_gamma_cq": (hcq,),
        "rmsnorm_gamma_ckv": (hckv,), "rope_sin": (*tokens, dr), "rope_cos": (*tokens, dr),
        "kv_cache": (*caches, 1, hckv), "kr_cache": (*caches, 1, dr),
    }  # fmt: skip
    call: dict[str, Any] = {name: t(*shape, dtype=dtype) for name, shape in shapes.items()} | {"cache_mode": mode}
    index = {"cache_index": t(*tokens, dtype=LONG)} if caches == (9, size) else {}
    return call | index | more


def whole(choice: tuple[int, int, int], *tokens: int, **more: Any) -> dict[str, Any]:
    """A call in whole numbers, of these modes."""
    call = prolog(*tokens, **{name: more.pop(name) for name in ("mode", "hckv", "dr") if name in more})
    x, names = call["token_x"], ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode")
    weight_mode, cache_mode, _ = choice
    eight = {name: t(*call[name].shape, dtype=torch.int8) for name in call if isinstance(call[name], Tensor)}
    changed = ["weight_uq_qr"] if weight_mode else []
    scales = {"dequant_scale_w_uq_qr": t(1, call["weight_uq_qr"].shape[1], dtype=F32)} if weight_mode else {}
    if weight_mode == 2:
        changed += ["token_x", "weight_dq", "weight_dkv_kr"]
        scales |= {"dequant_scale_x": t(x.shape[:-1].numel(), 1, dtype=F32)}
        scales |= {f"dequant_scale_w_{n}": t(1, call[f"weight_{n}"].shape[1], dtype=F32) for n in ("dq", "dkv_kr")}
    width, rope = call["kv_cache"].shape[-1], call["kr_cache"].shape[-1]
    if cache_mode:
        changed += ["kv_cache", *(["kr_cache"] if cache_mode == 2 else [])]
    if cache_mode in (1, 2):
        scales |= {"quant_scale_ckv": t(*((1,) if cache_mode == 1 else (1, width)), dtype=F32)}
    if cache_mode == 2:
        scales |= {"quant_scale_ckr": t(1, rope, dtype=F32)}
    if cache_mode == 3:
        line = width + 2 * rope + width // 128 * 4
        eight["kv_cache"] = t(*call["kv_cache"].shape[:-1], line, dtype=torch.int8)
        scales |= {"k_nope_clip_alpha": t(1, dtype=F32), "ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1}
    modes = dict(zip(names, choice, strict=True))
    return call | {name: eight[name] for name in changed} | scales | modes | more


_PROLOG: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(prolog(), prolog(mode="TND"), whole((2, 0, 0), 2, 3)),
    *starts(*map(whole, ((1, 0, 0), (2, 0, 0), (2, 1, 1), (1, 3, 0), (1, 2, 0)))),
    *starts(whole((2, 1, 1), mode="PA_NZ", dr=16)),
    ((HOST,), whole((1, 2, 0), mode="PA_NZ", dr=32), whole((1, 2, 0), mode="PA_NZ", dr=16), "Dr % 32 == 0"),
    *starts(whole((1, 0, 0), smooth_scales_cq=t(1, 1536, dtype=F32))),
    (EVERY, prolog(), prolog(mode="PA_BLK_BSND"), "cache_mode in"),
    (EVERY, prolog(2, 3), prolog(2, 3, mode="PA_BLK_NZ"), "indices of whole blocks are not decomposed"),
    (EVERY, prolog(), prolog(mode="Norm"), "requires cache_mode='BSND' or"),
    (EVERY, prolog(2, 3), prolog(2, 3, cache_index=t(2, 4, dtype=LONG)), "requires cache_index as [B S]"),
    (EVERY, prolog(2, 3, mode="BSND"), prolog(2, 3, mode="BSND", kv_cache=t(2, 4, 1, 512)), "kv_cache as [B S"),
    (EVERY, prolog(mode="PA_NZ"), prolog(kv_cache=t(9, 128, 2, 512)), "requires kv_cache as [Blocks Size 1 Line]"),
    (EVERY, prolog(), prolog(rope_sin=t(4, 64)), "requires rope_sin as [T Dr]"),
]


def older(*tokens: int, **more: Any) -> dict[str, Any]:
    return prolog(*tokens, **{"n": 32, **more})


_ON_OLDER = (HOST, A2, A3)
_OLDER: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(older(), older(mode="PA_NZ"), older(mode="PA_NZ", dr=32), older(65536, 1)),
    *(
        (_ON_OLDER, older(), older(**{name: t(1, dtype=F32)}), f"not given({name})")
        for name in ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr",
                     "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")
    ),
]  # fmt: skip


# products per head -------------------------------------------------------------------------------------------------


def product(x1: tuple[int, ...] = (4, 5, 32), weight: tuple[int, ...] = (4, 32, 16), **more: Any) -> dict[str, Any]:
    return {"input": t(*x1), "weight": t(*weight)} | more


_ON_ALL = (HOST, A2, A3)
_FIRST, _TURNED = [1, 0, 2], [0, 2, 1]
_PRODUCT: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(
        product(),
        product(perm_y=[1, 0, 2]),
        product((5, 4, 32), perm_x1=_FIRST),
        product(weight=(4, 16, 32), perm_x2=_TURNED),
    ),
]


# sequences ---------------------------------------------------------------------------------------------------------


def lead(layout: str) -> tuple[int, ...]:
    return (9,) if layout == "TND" else (2, 5)


def about(query: str, keys: str, name: str) -> dict[str, Any]:
    lengths = t(2, dtype=INT)
    call: dict[str, Any] = {"layout_query": query, f"layout_{name}": keys}
    table = {"block_table": t(2, 3, dtype=INT)} if keys == "PA_BSND" else {}
    return call | table | {"actual_seq_lengths_query": lengths, f"actual_seq_lengths_{name}": lengths}


def cache(keys: str, width: int, size: int = 128) -> Tensor:
    return t(*{"TND": (11,), "BSND": (2, 7), "PA_BSND": (9, size)}[keys], 1, width)


def indexer(
    query: str = "TND", keys: str = "PA_BSND", n: int = 8, d: int = 128, size: int = 128, **more: Any
) -> dict[str, Any]:
    tensors = {"query": t(*lead(query), n, d), "key": cache(keys, d, size), "weights": t(*lead(query), n)}
    return tensors | about(query, keys, "key") | more


def attention(
    query: str = "TND", keys: str = "PA_BSND", n: int = 8, d: int = 512, dr: int = 64, size: int = 128, **more: Any
) -> dict[str, Any]:
    tensors = {"query": t(*lead(query), n, d), "key": cache(keys, d, size), "value": cache(keys, d, size)}
    ropes = {"query_rope": t(*lead(query), n, dr), "key_rope": cache(keys, dr, size)}
    lists = {"sparse_indices": t(*lead(query), 1, 16, dtype=INT), "scale_value": 0.1, "attention_mode": 2}
    return tensors | ropes | lists | about(query, keys, "kv") | more


def quant_indexer(
    query: str = "TND", keys: str = "PA_BSND", n: int = 8, d: int = 128, size: int = 128, **more: Any
) -> dict[str, Any]:
    heads = {name: t(*lead(query), n, dtype=F16) for name in ("weights", "query_dequant_scale")}
    whole = {"query": t(*lead(query), n, d, dtype=torch.int8), "key": cache(keys, d, size).to(torch.int8)}
    scale = {"key_dequant_scale": cache(keys, 1, size).to(F16)[..., 0], "query_quant_mode": 0, "key_quant_mode": 0}
    return whole | heads | scale | about(query, keys, "key") | more


def quant_attention(
    query: str = "TND", keys: str = "PA_BSND", n: int = 8, d: int = 576, row: int = 656, size: int = 128, **more: Any
) -> dict[str, Any]:
    rows = cache(keys, row, size).to(torch.int8)
    call = {"query": t(*lead(query), n, d), "key": rows, "value": rows, "scale_value": 0.1, "attention_mode": 2}
    lists = {"sparse_indices": t(*lead(query), 1, 16, dtype=INT), "key_quant_mode": 2, "value_quant_mode": 2}
    return call | lists | about(query, keys, "kv") | more


def both(
    make: Any, name: str, chips: tuple[str, ...] = CHIPS
) -> list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]]:
    """Edges that the indexer and attention have in common."""
    told = f"actual_seq_lengths_{name}"
    plain, every = make("BSND", "BSND"), (HOST, *chips)
    return [
        (every, make(sparse_mode=0), make(sparse_mode=2), "sparse_mode in (0, 3)"),
        (every, make(), make(pre_tokens=8), "pre_tokens == 9223372036854775807"),
        (every, make(), make(next_tokens=0), "next_tokens == 9223372036854775807"),
        (every, make(), make(block_table=None), "given(block_table)"),
        (every, plain, plain | {"block_table": t(2, 3, dtype=INT)}, "not given(block_table)"),
        (
            every,
            plain | {"actual_seq_lengths_query": None},
            make(actual_seq_lengths_query=None),
            "given(actual_seq_lengths_query)",
        ),
        (every, plain | {told: None}, make(**{told: None}), f"given({told})"),
        (every, make("TND", "TND"), make("TND", "TND", **{told: None}), f"given({told})"),
        (every, make("BSND"), make("BSND") | {f"layout_{name}": "TND"}, "requires layout_query='BSND' or"),
        (every, make(), make() | {"layout_query": "BNSD"}, "requires layout_query='BSND' or"),
        (every, make(), make(key=t(9, 128, 2, make()["key"].shape[-1])), "requires key as [Blocks Size 1 "),
        (every, make(), make(**{told: t(3, dtype=INT)}), f"requires {told} as [B]"),
        (chips, make(size=1024), make(size=1040), "Size % 16 == 0 and Size <= 1024"),
        (chips, make(), make(block_table=t(2, 3, dtype=LONG)), "requires block_table in int32"),
        (chips, make(), make(**{told: t(2, dtype=LONG)}), f"requires {told} in int32"),
    ]


_INDEXER: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(indexer, "key"),
]
_BARE = {"query_rope": None, "key_rope": None}
_ATTENTION: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(attention(sparse_block_size=16, size=48)),
    *both(attention, "kv"),
    (EVERY, attention(), attention(sparse_indices=t(9, 2, 16, dtype=INT)), "requires sparse_indices as [T 1 K]"),
]
_QUANT_INDEXER: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(quant_indexer, "key", (A2, A3)),
    (EVERY[:3], quant_indexer(), quant_indexer(key_dequant_scale=t(9, 128, 1, 1, dtype=F16)), "[Blocks Size 1]"),
    *(
        (EVERY[:3], quant_indexer(), quant_indexer() | {name: quant_indexer()[name].half()}, f"{name}")
        for name in ("query", "key")
    ),
]
_QUANT_ATTENTION: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(quant_attention, "kv", (A2, A3)),
    (EVERY[:3], quant_attention(), quant_attention(sparse_indices=t(9, 2, 16, dtype=INT)), "sparse_indices as [T 1 K]"),
    ((A2, A3), quant_attention(), quant_attention(d=704, row=788), "D == 576"),
    ((A2, A3), quant_attention(), quant_attention(row=676, rope_head_dim=32, tile_size=32), "rope_head_dim == 64"),
    *(
        (EVERY[:3], quant_attention(), quant_attention(**{name: cache("PA_BSND", 656)}), f"{name}")
        for name in ("key", "value")
    ),
]
EDGES: list[Edge] = [
    *((name, *edge) for name in ("npu_mla_prolog_v3", "npu_mla_prolog_v3_functional") for edge in _PROLOG),
    *(
        (f"{name}.{form}", *edge)
        for name in ("npu_mla_prolog", "npu_mla_prolog_v2")
        for form in ("in_place", "functional")
        for edge in _OLDER
    ),
    *(("npu_transpose_batchmatmul", *edge) for edge in _PRODUCT),
    *(("npu_lightning_indexer", *edge) for edge in _INDEXER),
    *(("npu_sparse_flash_attention", *edge) for edge in _ATTENTION),
    *(("npu_quant_lightning_indexer", *edge) for edge in _QUANT_INDEXER),
    *(("npu_kv_quant_sparse_flash_attention", *edge) for edge in _QUANT_ATTENTION),
]
