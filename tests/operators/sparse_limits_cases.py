"""Both sides of the limits of the latent prolog, products per head, the indexer and attention over listed keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
EVERY = (HOST, *CHIPS)
F16, F32, INT, LONG = torch.float16, torch.float32, torch.int32, torch.int64


def t(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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


def quantised() -> list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]]:
    one, two, full, bytes_, channels = (
        whole(choice) for choice in ((1, 0, 0), (2, 0, 0), (2, 1, 1), (1, 3, 0), (1, 2, 0))
    )
    line = t(1, dtype=F32)
    missing = [
        *((two, name) for name in ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")),
        (one, "dequant_scale_w_uq_qr"), (full, "quant_scale_ckv"), (channels, "quant_scale_ckr"),
        (bytes_, "k_nope_clip_alpha"),
    ]  # fmt: skip
    shapes = {"dequant_scale_w_dq": two, "dequant_scale_w_uq_qr": two, "dequant_scale_w_dkv_kr": two,
              "quant_scale_ckr": channels, "smooth_scales_cq": one, "k_nope_clip_alpha": bytes_}  # fmt: skip
    wanted = {"dequant_scale_w_dq": "(1, Hcq)", "dequant_scale_w_uq_qr": "(1, Huq)", "k_nope_clip_alpha": "(1,)",
              "dequant_scale_w_dkv_kr": "(1, Hkv)", "quant_scale_ckr": "(1, Dr)",
              "smooth_scales_cq": "(1, Hcq)"}  # fmt: skip
    eight, floats = torch.int8, torch.bfloat16
    return [
        (EVERY, full, whole((2, 1, 0)), "query_quant_mode) in ((0, 0, 0)"),
        (EVERY, bytes_, whole((0, 3, 0)), "query_quant_mode) in ((0, 0, 0)"),
        *((EVERY, call, call | {name: None}, f"requires given({name})") for call, name in missing),
        *((EVERY, prolog(), prolog(**{name: line}), f"not given({name})") for _, name in missing),
        (EVERY, prolog(), prolog(smooth_scales_cq=t(1, 1536, dtype=F32)), "not given(smooth_scales_cq)"),
        *(
            (EVERY, call, call | {name: t(2, 2, dtype=F32)}, f"shape({name}) == {wanted[name]}")
            for name, call in shapes.items()
        ),
        (EVERY, two, two | {"dequant_scale_x": t(5, dtype=F32)}, "shape(dequant_scale_x) == (T, 1)"),
        (
            EVERY,
            whole((2, 0, 0), 2, 3),
            whole((2, 0, 0), 2, 3, dequant_scale_x=t(2, 3, dtype=F32)),
            "shape(dequant_scale_x) == (B * S, 1)",
        ),
        (EVERY, full, full | {"quant_scale_ckv": t(1, 512, dtype=F32)}, "shape(quant_scale_ckv) == (1,)"),
        (EVERY, channels, channels | {"quant_scale_ckv": line}, "shape(quant_scale_ckv) == (1, Hckv)"),
        (EVERY, bytes_, bytes_ | {"ckvkr_repo_mode": 0}, "ckvkr_repo_mode == 1 and quant_scale_repo_mode == 1"),
        (EVERY, full, full | {"quant_scale_repo_mode": 1}, "ckvkr_repo_mode == 0 and quant_scale_repo_mode == 0"),
        (EVERY, bytes_, bytes_ | {"tile_size": 64}, "tile_size == 128"),
        (EVERY, one, one | {"kv_cache": t(9, 128, 1, 656)}, "Line == Hckv and Kr == Dr"),
        (EVERY, bytes_, bytes_ | {"kv_cache": t(9, 128, 1, 512, dtype=eight)}, "Line == Hckv + 2 * Dr"),
        ((HOST,), bytes_, whole((1, 3, 0), hckv=520), "Hckv % 128 == 0"),
        (CHIPS, bytes_, whole((1, 3, 0), hckv=520), "Hckv % 128 == 0"),
        (EVERY, bytes_, whole((1, 3, 0), mode="PA_NZ"), "cache_mode != 'PA_NZ'"),
        (EVERY, two, two | {"token_x": t(5, 7168)}, "dtype(token_x) == 'int8'"),
        (EVERY, two, two | {"weight_dq": t(7168, 1536)}, "dtype(weight_dq) == dtype(token_x)"),
        (EVERY, one, one | {"weight_uq_qr": t(1536, 8 * 192)}, "dtype(weight_uq_qr) == 'int8'"),
        (EVERY, full, full | {"kv_cache": t(9, 128, 1, 512)}, "dtype(kv_cache) == 'int8'"),
        (EVERY, channels, channels | {"kr_cache": t(9, 128, 1, 64)}, "dtype(kr_cache) == 'int8'"),
        ((HOST,), whole((2, 1, 1), mode="PA_NZ", dr=16), whole((2, 1, 1), mode="PA_NZ", dr=24), "Dr % 16 == 0"),
        (EVERY, whole((2, 1, 1), mode="PA_NZ"), whole((2, 1, 1), mode="PA_NZ", hckv=528), "Hckv % 32 == 0"),
        ((HOST,), whole((1, 2, 0), mode="PA_NZ", dr=32), whole((1, 2, 0), mode="PA_NZ", dr=16), "Dr % 32 == 0"),
        (CHIPS, one, one | {n: t(*one[n].shape, dtype=eight) for n in ("token_x", "weight_dq", "weight_dkv_kr")},
         "dtype(token_x) == 'bfloat16'"),
        (CHIPS, prolog(), prolog(weight_uq_qr=t(1536, 8 * 192, dtype=eight)), "dtype(weight_uq_qr) == 'bfloat16'"),
        (CHIPS, one, one | {"kv_cache": t(9, 128, 1, 512, dtype=eight)}, "dtype(kv_cache) == 'bfloat16'"),
        (CHIPS, full, full | {"kr_cache": t(9, 128, 1, 64, dtype=eight)}, "dtype(kr_cache) == 'bfloat16'"),
        (CHIPS, one, one | {"dequant_scale_w_uq_qr": t(1, 8 * 192, dtype=floats)}, "requires dequant_scale_w_uq_qr in"),
    ]  # fmt: skip


_PROLOG: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *quantised(),
    (EVERY, prolog(), prolog(mode="PA_BLK_BSND"), "cache_mode in"),
    (EVERY, prolog(2, 3), prolog(2, 3, mode="PA_BLK_NZ"), "indices of whole blocks are not decomposed"),
    (EVERY, prolog(), prolog(mode="Norm"), "requires cache_mode='BSND' or"),
    (EVERY, prolog(), prolog(actual_seq_len=t(1, dtype=INT)), "not given(actual_seq_len)"),
    (EVERY, prolog(), prolog(cache_index=None), "given(cache_index)"),
    (EVERY, prolog(2, 3), prolog(2, 3, cache_index=t(2, 4, dtype=LONG)), "requires cache_index as [B S]"),
    (EVERY, prolog(mode="TND"), prolog(mode="TND", cache_index=t(5, dtype=LONG)), "not given(cache_index)"),
    (
        EVERY,
        prolog(2, 3, mode="BSND"),
        prolog(2, 3, mode="BSND", kv_cache=t(2, 4, 1, 512)),
        "requires kv_cache as [B S",
    ),
    (EVERY, prolog(mode="PA_NZ"), prolog(kv_cache=t(9, 128, 2, 512)), "requires kv_cache as [Blocks Size 1 Line]"),
    (EVERY, prolog(), prolog(rope_sin=t(4, 64)), "requires rope_sin as [T Dr]"),
    (EVERY, prolog(), prolog(weight_uq_qr=t(1536, 8 * 128)), "Huq == N * (D + Dr)"),
    (EVERY, prolog(), prolog(weight_dkv_kr=t(7168, 512)), "Hkv == Hckv + Dr"),
    ((HOST,), prolog(dr=2), prolog(dr=3), "Dr % 2 == 0"),
    (CHIPS, prolog(), prolog(dr=63), "Dr % 2 == 0"),
    ((HOST,), prolog(mode="PA_NZ", dr=32), prolog(mode="PA_NZ", dr=40), "Hckv % 16 == 0 and Dr % 16 == 0"),
    (CHIPS, prolog(mode="PA_NZ"), prolog(mode="PA_NZ", hckv=520), "Hckv % 16 == 0 and Dr % 16 == 0"),
    (CHIPS, prolog(he=5120), prolog(he=5248), "He in"),
    (CHIPS, prolog(hcq=2048), prolog(hcq=1024), "Hcq in"),
    (CHIPS, prolog(n=128), prolog(n=96), "N in"),
    (CHIPS, prolog(), prolog(hckv=256), "Hckv == 512"),
    (CHIPS, prolog(d=192), prolog(d=64), "D in (128, 192)"),
    (CHIPS, prolog(), prolog(dr=32), "Dr == 64"),
    (CHIPS, prolog(size=1024), prolog(size=1040), "Size % 16 == 0 and Size <= 1024"),
    (CHIPS, prolog(size=16, mode="PA_NZ"), prolog(size=24, mode="PA_NZ"), "Size % 16 == 0 and Size <= 1024"),
    (CHIPS, prolog(65536, 1), prolog(65537, 1), "B <= 65536"),
    (CHIPS, prolog(), prolog(dtype=F16), "requires token_x in bfloat16"),
    (CHIPS, prolog(), prolog(cache_index=t(5, dtype=INT)), "requires cache_index in int64"),
]


def older(*tokens: int, **more: Any) -> dict[str, Any]:
    return prolog(*tokens, **{"n": 32, **more})


_ON_OLDER = (HOST, A2, A3)
_OLDER: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *(
        (_ON_OLDER, older(), older(**{name: t(1, dtype=F32)}), f"not given({name})")
        for name in ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr",
                     "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")
    ),
    (_ON_OLDER, older(), older() | {"cache_mode": "BSND"}, "cache_mode in ('PA_BSND', 'PA_NZ')"),
    (_ON_OLDER, older(), older(weight_uq_qr=t(1536, 32 * 128)), "Huq == N * (D + Dr)"),
    (_ON_OLDER, older(), older(weight_dkv_kr=t(7168, 512)), "Hkv == Hckv + Dr"),
    ((HOST,), older(dr=2), older(dr=3), "Dr % 2 == 0"),
    ((A2, A3), older(), older(dr=63), "Dr % 2 == 0"),
    ((HOST,), older(mode="PA_NZ", dr=32), older(mode="PA_NZ", dr=40), "Hckv % 16 == 0 and Dr % 16 == 0"),
    ((A2, A3), older(mode="PA_NZ"), older(mode="PA_NZ", hckv=520), "Hckv % 16 == 0 and Dr % 16 == 0"),
    ((A2, A3), older(), older(he=6144), "He == 7168"),
    ((A2, A3), older(), older(hcq=2048), "Hcq == 1536"),
    ((A2, A3), older(), older(hckv=256), "Hckv == 512"),
    ((A2, A3), older(), older(d=192), "D == 128"),
    ((A2, A3), older(), older(dr=32), "Dr == 64"),
    ((A2, A3), older(size=16), older(size=64), "Size in (16, 128)"),
    ((A2, A3), older(65536, 1), older(65537, 1), "B <= 65536"),
    ((A2, A3), older(), older(dtype=F16), "requires token_x in bfloat16"),
]  # fmt: skip
_OLDEST = [
    *_OLDER,
    ((A2, A3), older(n=128), older(n=16), "N in (32, 64, 128)"),
    ((A2, A3), older(4, 1), older(4, 2), "S <= 1"),
]
_SECOND = [
    *_OLDER,
    ((A2, A3), older(n=16), older(n=96), "N in (1, 2, 4, 8, 16, 32, 64, 128)"),
    ((A2, A3), older(4, 16), older(4, 17), "S <= 16"),
]


# products per head -------------------------------------------------------------------------------------------------


def product(x1: tuple[int, ...] = (4, 5, 32), weight: tuple[int, ...] = (4, 32, 16), **more: Any) -> dict[str, Any]:
    return {"input": t(*x1), "weight": t(*weight)} | more


_ON_ALL = (HOST, A2, A3)
_FIRST, _TURNED = [1, 0, 2], [0, 2, 1]
_PRODUCT: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    (_ON_ALL, product(), product(perm_x1=[2, 1, 0]), "perm_x1 in"),
    (_ON_ALL, product(), product(perm_x2=[1, 0, 2]), "perm_x2 in"),
    (_ON_ALL, product(perm_y=[1, 0, 2]), product(perm_y=[0, 1, 2]), "perm_y == (1, 0, 2)"),
    (_ON_ALL, product(), product(bias=t(16)), "not given(bias)"),
    (_ON_ALL, product(), product(scale=t(64)), "not given(scale)"),
    (_ON_ALL, product(), product(batch_split_factor=0), "given(batch_split_factor) and batch_split_factor > 0"),
    ((HOST,), product(batch_split_factor=2), product(batch_split_factor=3), "I % batch_split_factor == 0"),
    (
        (HOST,),
        product((5, 4, 32), perm_x1=_FIRST, batch_split_factor=4),
        product((5, 4, 32), perm_x1=_FIRST, batch_split_factor=5),
        "J % batch_split_factor == 0",
    ),
    ((A2, A3), product(), product(batch_split_factor=2), "batch_split_factor == 1"),
    (_ON_ALL, product(), product((5, 4, 32)), "I == W"),
    (_ON_ALL, product((5, 4, 32), perm_x1=_FIRST), product(perm_x1=_FIRST), "J == W"),
    (_ON_ALL, product(), product(weight=(4, 16, 32)), "K == U"),
    (_ON_ALL, product(weight=(4, 16, 32), perm_x2=_TURNED), product(perm_x2=_TURNED), "K == V"),
    ((A2, A3), product(), product((4, 5, 24), (4, 24, 16)), "K % 16 == 0"),
    ((A2, A3), product(weight=(4, 32, 65520)), product(weight=(4, 32, 65536)), "V % 16 == 0 and V < 65536"),
    (
        (A2, A3),
        product(weight=(4, 16, 32), perm_x2=_TURNED),
        product(weight=(4, 24, 32), perm_x2=_TURNED),
        "U % 16 == 0 and U < 65536",
    ),
    (
        (A2, A3),
        product((5, 127, 512), (127, 512, 16), perm_x1=_FIRST),
        product((5, 128, 512), (128, 512, 16), perm_x1=_FIRST),
        "K * W < 65536",
    ),
    ((A2, A3), product(), product() | {"weight": t(4, 32, 16, dtype=F16)}, "dtype(weight) == dtype(input)"),
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
    (CHIPS, indexer(), indexer(key=indexer()["key"].half()), "dtype(key) == dtype(query)"),
    (EVERY, indexer(sparse_count=1), indexer(sparse_count=0), "sparse_count > 0"),
    (CHIPS, indexer(), indexer(d=64), "D == 128"),
    (CHIPS, indexer(sparse_count=2048), indexer(sparse_count=2049), "sparse_count <= 2048 or sparse_count in"),
    (CHIPS, indexer(sparse_count=8192), indexer(sparse_count=9216), "sparse_count <= 2048 or sparse_count in"),
    ((A2, A3), indexer(n=64), indexer(n=65), "N <= 64"),
    ((A5,), indexer(n=24), indexer(n=40), "N in (8, 16, 24, 32, 64)"),
    ((A2, A3), indexer(weights=t(9, 8, dtype=F32)), indexer(weights=t(9, 8, dtype=F16)), "dtype(weights) in"),
    ((A5,), indexer(), indexer(weights=t(9, 8, dtype=F32)), "dtype(weights) == dtype(query)"),
]
_BARE = {"query_rope": None, "key_rope": None}
_ATTENTION: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(attention, "kv"),
    (CHIPS, attention(), attention(key=attention()["key"].half()), "dtype(key) == dtype(query)"),
    (EVERY, attention(), attention(attention_mode=0), "attention_mode == 2"),
    (EVERY, attention(), attention(sinks=t(8, dtype=F32)), "not given(sinks)"),
    (EVERY, attention(), attention(sparse_block_size=0), "sparse_block_size >= 1"),
    (EVERY, attention(), attention(key_rope=None), "given(query_rope) and given(key_rope) or not"),
    (
        EVERY,
        attention("TND", "TND", return_softmax_lse=True),
        attention(return_softmax_lse=True),
        "return_softmax_lse == False",
    ),
    (EVERY, attention(), attention(sparse_indices=t(9, 2, 16, dtype=INT)), "requires sparse_indices as [T 1 K]"),
    (CHIPS, attention(), attention(value=None), "given(value)"),
    (CHIPS, attention(), attention(value=attention()["value"].half()), "dtype(value) == dtype(query)"),
    (CHIPS, attention(), attention(**_BARE), "given(query_rope) and given(key_rope)"),
    (
        CHIPS,
        attention(),
        attention(query_rope=t(9, 8, 64, dtype=F16)),
        "dtype(query_rope) == dtype(query) and dtype(key_rope) == dtype(query)",
    ),
    (CHIPS, attention(), attention(d=256), "D == 512"),
    (CHIPS, attention(), attention(dr=32), "Dr == 64"),
    ((A2, A3), attention(n=64), attention(n=48), "N in (1, 2, 4, 8, 16, 32, 64, 128)"),
    ((A5,), attention(n=48), attention(n=129), "N <= 128"),
    ((A2, A3), attention(sparse_block_size=16), attention(sparse_block_size=6), "sparse_block_size in"),
    (
        (A2, A3),
        attention(sparse_block_size=16, size=48),
        attention(sparse_block_size=32, size=48),
        "Size % sparse_block_size == 0",
    ),
    ((A5,), attention(), attention(sparse_block_size=2), "sparse_block_size == 1"),
]
_QUANT_INDEXER: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(quant_indexer, "key", (A2, A3)),
    (EVERY[:3], quant_indexer(sparse_count=1), quant_indexer(sparse_count=0), "sparse_count > 0"),
    ((A2, A3), quant_indexer(), quant_indexer(d=64), "D == 128"),
    ((A2, A3), quant_indexer(n=64), quant_indexer(n=65), "N <= 64"),
    ((A2, A3), quant_indexer(sparse_count=2048), quant_indexer(sparse_count=3072), "sparse_count <= 2048"),
    *(
        (EVERY[:3], quant_indexer(), quant_indexer(**{name: 1}), "query_quant_mode == 0 and key_quant_mode == 0")
        for name in ("query_quant_mode", "key_quant_mode")
    ),
    (EVERY[:3], quant_indexer(), quant_indexer(key_dequant_scale=t(9, 128, 1, 1, dtype=F16)), "[Blocks Size 1]"),
    *(
        (
            (A2, A3),
            quant_indexer(),
            quant_indexer(**{name: quant_indexer()[name].float()}),
            f"requires {name} in float16",
        )
        for name in ("weights", "query_dequant_scale", "key_dequant_scale")
    ),
    *(
        (EVERY[:3], quant_indexer(), quant_indexer() | {name: quant_indexer()[name].half()}, f"{name}")
        for name in ("query", "key")
    ),
]
_QUANT_ATTENTION: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *both(quant_attention, "kv", (A2, A3)),
    (EVERY[:3], quant_attention(), quant_attention(attention_mode=0), "attention_mode == 2"),
    *(
        (EVERY[:3], quant_attention(), quant_attention(**{name: 0}), "key_quant_mode == 2 and value_quant_mode == 2")
        for name in ("key_quant_mode", "value_quant_mode")
    ),
    (EVERY[:3], quant_attention(), quant_attention(quant_scale_repo_mode=0), "quant_scale_repo_mode == 1"),
    *(
        (EVERY[:3], quant_attention(), quant_attention(**{name: t(4, dtype=F32)}), f"not given({name})")
        for name in ("key_dequant_scale", "value_dequant_scale")
    ),
    (EVERY[:3], quant_attention(), quant_attention(sparse_indices=t(9, 2, 16, dtype=INT)), "sparse_indices as [T 1 K]"),
    ((A2, A3), quant_attention(), quant_attention(d=704, row=788), "D == 576"),
    ((A2, A3), quant_attention(), quant_attention(row=676, rope_head_dim=32, tile_size=32), "rope_head_dim == 64"),
    ((A2, A3), quant_attention(), quant_attention(row=672, tile_size=64), "tile_size == 128"),
    (EVERY[:3], quant_attention(), quant_attention(tile_size=0), "tile_size >= 1"),
    (EVERY[:3], quant_attention(), quant_attention(row=640), "Row == D + rope_head_dim + 4 *"),
    (EVERY[:3], quant_attention(), quant_attention(rope_head_dim=576), "0 < rope_head_dim and rope_head_dim < D"),
    (EVERY[:3], quant_attention(), quant_attention(value=cache("PA_BSND", 640).to(torch.int8)), "W == Row"),
    ((A2, A3), quant_attention(n=128), quant_attention(n=48), "N in (1, 2, 4, 8, 16, 32, 64, 128)"),
    ((A2, A3), quant_attention(sparse_block_size=16), quant_attention(sparse_block_size=32), "sparse_block_size in"),
    (EVERY[:3], quant_attention(), quant_attention(sparse_block_size=0), "sparse_block_size >= 1"),
    (
        (A2, A3),
        quant_attention(),
        quant_attention() | {"query": t(9, 8, 576, dtype=F32)},
        "requires query in bfloat16, float16",
    ),
    (
        (A2, A3),
        quant_attention(),
        quant_attention(sparse_indices=t(9, 1, 16, dtype=LONG)),
        "requires sparse_indices in int32",
    ),
    *(
        (EVERY[:3], quant_attention(), quant_attention(**{name: cache("PA_BSND", 656)}), f"{name}")
        for name in ("key", "value")
    ),
]
EDGES: list[Edge] = [
    *((name, *edge) for name in ("npu_mla_prolog_v3", "npu_mla_prolog_v3_functional") for edge in _PROLOG),
    *((f"npu_mla_prolog.{form}", *edge) for form in ("in_place", "functional") for edge in _OLDEST),
    *((f"npu_mla_prolog_v2.{form}", *edge) for form in ("in_place", "functional") for edge in _SECOND),
    *(("npu_transpose_batchmatmul", *edge) for edge in _PRODUCT),
    *(("npu_lightning_indexer", *edge) for edge in _INDEXER),
    *(("npu_sparse_flash_attention", *edge) for edge in _ATTENTION),
    *(("npu_quant_lightning_indexer", *edge) for edge in _QUANT_INDEXER),
    *(("npu_kv_quant_sparse_flash_attention", *edge) for edge in _QUANT_ATTENTION),
]
