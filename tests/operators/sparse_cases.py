"""Small calls of the latent prolog, the indexer, and attention over listed keys, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.dtype], dict[str, Any]]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


# the latent prolog -------------------------------------------------------------------------------------------------

HE, HCQ, N, D, DR, HCKV = 48, 40, 4, 24, 16, 32


def prolog(*tokens: int, slots: Any = None, mode: str = "PA_BSND", **more: Any) -> Make:
    """`tokens` are the leading dims of token_x; pages are 3 of 4 tokens."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        caches = {"TND": tokens, "BSND": tokens}.get(mode, (3, 4))
        angle = torch.rand(*tokens, DR, dtype=torch.float64) * 6
        call = {
            "token_x": random(*tokens, HE, dtype=dtype),
            "weight_dq": random(HE, HCQ, dtype=dtype, scale=HE**-0.5),
            "weight_uq_qr": random(HCQ, N * (D + DR), dtype=dtype, scale=HCQ**-0.5),
            "weight_uk": random(N, D, HCKV, dtype=dtype, scale=D**-0.5),
            "weight_dkv_kr": random(HE, HCKV + DR, dtype=dtype, scale=HE**-0.5),
            "rmsnorm_gamma_cq": random(HCQ, dtype=dtype),
            "rmsnorm_gamma_ckv": random(HCKV, dtype=dtype),
            "rope_sin": angle.sin().to(dtype),
            "rope_cos": angle.cos().to(dtype),  # of both halves apart, as the kernel reads them
            "kv_cache": random(*caches, 1, HCKV, dtype=dtype),
            "kr_cache": random(*caches, 1, DR, dtype=dtype),
            "cache_mode": mode,
        }
        index = {} if slots is None else {"cache_index": torch.tensor(slots, dtype=torch.int64)}
        return call | index | more

    return make


PROLOG: tuple[tuple[str, Make], ...] = (
    ("tokens", prolog(5, slots=(3, 7, 0, 11, 6), query_norm_flag=True)),
    ("one token", prolog(1, slots=(9,))),
    ("batch", prolog(2, 3, slots=((3, 7, 0), (11, 6, 2)), query_norm_flag=True)),
    ("skipped", prolog(5, slots=(-1, 7, -1, 0, 11))),
    ("skipped in a batch", prolog(2, 2, slots=((5, -1), (-3, 6)))),
    ("all skipped", prolog(2, slots=(-1, -1))),
    ("no token", prolog(0, slots=())),
    ("scales", prolog(3, slots=(3, 7, 0), qc_qr_scale=0.5, kc_scale=2.0, rmsnorm_epsilon_cq=0.5)),
    ("another epsilon of queries", prolog(3, slots=(3, 7, 0), rmsnorm_epsilon_cq=0.5)),
    ("NZ", prolog(5, slots=(3, 7, 0, 11, 6), mode="PA_NZ", rmsnorm_epsilon_ckv=0.5)),
    ("NZ, skipped, batch", prolog(2, 2, slots=((-1, 5), (10, -1)), mode="PA_NZ")),
    ("BSND", prolog(2, 3, mode="BSND")),
    ("TND", prolog(5, mode="TND", query_norm_flag=True)),
)


def older(make: Make) -> Make:
    """A call of the third version as one of its older versions."""
    return lambda dtype: {name: value for name, value in make(dtype).items() if name != "query_norm_flag"}


OLDER = tuple((label, older(make)) for label, make in PROLOG if label not in ("scales", "BSND", "TND"))


# products per head -------------------------------------------------------------------------------------------------


def product(x1: tuple[int, ...], weight: tuple[int, ...], **more: Any) -> Make:
    return lambda dtype: {"input": random(*x1, dtype=dtype), "weight": random(*weight, dtype=dtype), **more}


PRODUCTS: tuple[tuple[str, Make], ...] = (
    ("defaults", product((4, 5, 32), (4, 32, 16))),
    ("turned input", product((5, 4, 32), (4, 32, 16), perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])),
    ("one token", product((1, 4, 32), (4, 32, 16), perm_x1=[1, 0, 2])),
    ("in two parts", product((4, 5, 32), (4, 32, 16), perm_x1=[0, 1, 2], batch_split_factor=2)),
    ("as many parts as products", product((5, 4, 32), (4, 32, 16), perm_x1=[1, 0, 2], batch_split_factor=4)),
)
TURNED_WEIGHT = ("turned weight", product((5, 4, 32), (4, 16, 32), perm_x1=[1, 0, 2], perm_x2=[0, 2, 1]))


# sequences of queries and keys -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse:
    """Rows and keys of every sequence; `told`: whether batched lengths are given; `padding`: rows of no sequence."""

    layouts: tuple[str, str] = ("BSND", "BSND")
    rows: tuple[int, ...] = (3, 3)
    keys: tuple[int, ...] = (7, 7)
    told: bool = True
    padding: int = 0
    page: int = 4
    n: int = 8
    d: int = 16
    more: dict[str, Any] = field(default_factory=dict)


def leading(a: Sparse) -> tuple[int, ...]:
    """Leading dims of the query."""
    if a.layouts[0] == "TND":
        return (sum(a.rows) + a.padding,)
    return len(a.rows), max(a.rows) + a.padding


def of_keys(a: Sparse, width: int, dtype: torch.dtype) -> Tensor:
    lead = {"TND": (sum(a.keys),), "BSND": (len(a.keys), max(a.keys)), "PA_BSND": (2 * pages(a) * len(a.keys), a.page)}
    return random(*lead[a.layouts[1]], 1, width, dtype=dtype)


def pages(a: Sparse) -> int:
    return max(1, -(-max(a.keys) // a.page))


def about_sequences(a: Sparse, name: str) -> dict[str, Any]:
    """Layouts, lengths and the table, under the names of one operator (`key` or `kv`)."""
    rows, keys = (
        list(accumulate(sizes) if layout == "TND" else sizes)
        for sizes, layout in zip((a.rows, a.keys), a.layouts, strict=True)
    )
    call: dict[str, Any] = {"layout_query": a.layouts[0], f"layout_{name}": a.layouts[1]}
    if a.told:
        call["actual_seq_lengths_query"] = torch.tensor(rows, dtype=torch.int32)
        call[f"actual_seq_lengths_{name}"] = torch.tensor(keys, dtype=torch.int32)
    if a.layouts[1] == "PA_BSND":
        table = torch.randperm(2 * pages(a) * len(a.keys))[: pages(a) * len(a.keys)].reshape(len(a.keys), pages(a))
        first = torch.arange(pages(a)) * a.page
        unused = first[None] >= torch.tensor(a.keys)[:, None]
        call["block_table"] = table.masked_fill(unused, 1000).to(torch.int32)  # what is there must not matter
    return call


SEQUENCES: tuple[tuple[str, Sparse], ...] = (
    ("BSND", Sparse(told=False)),
    ("BSND with lengths", Sparse(rows=(1, 3), keys=(7, 5), padding=1)),
    ("BSND, all keys", Sparse(rows=(2, 3), keys=(4, 7), more={"sparse_mode": 0})),
    ("BSND, more rows than keys", Sparse(rows=(4, 4), keys=(3, 0))),
    ("TND", Sparse(("TND", "TND"), rows=(2, 1, 3), keys=(5, 1, 4))),
    ("TND with padding", Sparse(("TND", "TND"), rows=(2, 0, 3), keys=(5, 2, 7), padding=2)),
    ("TND, all keys", Sparse(("TND", "TND"), rows=(2, 1), keys=(5, 3), more={"sparse_mode": 0})),
    ("pages, BSND", Sparse(("BSND", "PA_BSND"), rows=(2, 3), keys=(11, 6))),
    ("pages, decode", Sparse(("TND", "PA_BSND"), rows=(1, 1, 1), keys=(11, 6, 1))),
    ("pages, ragged", Sparse(("TND", "PA_BSND"), rows=(2, 0, 3), keys=(9, 6, 12), padding=1)),
    ("pages, prefill", Sparse(("TND", "PA_BSND"), rows=(1, 19), keys=(2, 21))),
    ("pages, one sequence", Sparse(("TND", "PA_BSND"), rows=(6,), keys=(10,))),
    ("pages, all keys", Sparse(("TND", "PA_BSND"), rows=(2, 2), keys=(3, 10), more={"sparse_mode": 0})),
)


def indexer(a: Sparse, count: int = 5, **more: Any) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        query, weights = random(*leading(a), a.n, a.d, dtype=dtype), random(*leading(a), a.n, dtype=dtype)
        call = {"query": query, "key": of_keys(a, a.d, dtype), "weights": weights, "sparse_count": count}
        return call | about_sequences(a, "key") | a.more | more

    return make


INDEXER: tuple[tuple[str, Make], ...] = (
    *((label, indexer(a)) for label, a in SEQUENCES),
    ("more than there are", indexer(Sparse(("TND", "PA_BSND"), rows=(1, 1), keys=(11, 6)), count=20)),
    ("values", indexer(Sparse(rows=(2, 2), keys=(9, 9)), return_value=True)),
    ("values, pages", indexer(Sparse(("TND", "PA_BSND"), rows=(1, 1), keys=(9, 6)), return_value=True)),
)


def lists(a: Sparse, count: int, block: int) -> Tensor:
    """Lists that repeat themselves, name tokens that cannot be seen, end early, and go on after their end."""
    last = max(1, -(-(max(a.keys) + 2) // block))
    indices = torch.randint(0, last, (*leading(a), 1, count))
    end = torch.randint(0, count + 3, (*leading(a), 1))
    return indices.scatter(-1, end.clamp(max=count - 1)[..., None], -1).where(end[..., None] < count, indices).int()


def attention(a: Sparse, count: int = 6, block: int = 1, rope: int = 8, apart: bool = False, **more: Any) -> Make:
    """`apart`: values that are equal to the keys but not the same tensor."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        key = of_keys(a, a.d, dtype)
        call: dict[str, Any] = {
            "query": random(*leading(a), a.n, a.d, dtype=dtype),
            "key": key,
            "value": key.clone() if apart else key,
            "sparse_indices": lists(a, count, block),
            "scale_value": 0.3,
            "attention_mode": 2,
            "sparse_block_size": block,
        }
        if rope:
            call["query_rope"] = random(*leading(a), a.n, rope, dtype=dtype)
            call["key_rope"] = of_keys(a, rope, dtype)
        return call | about_sequences(a, "kv") | a.more | more

    return make


ATTENTION: tuple[tuple[str, Make], ...] = (
    *((label, attention(a)) for label, a in SEQUENCES),
    ("without rope", attention(Sparse(), rope=0)),
    ("value of its own", attention(Sparse(("TND", "PA_BSND"), rows=(2, 1), keys=(9, 6)), apart=True)),
    ("blocks of 2", attention(Sparse(("TND", "PA_BSND"), rows=(2, 3), keys=(9, 6)), block=2, count=4)),
    ("blocks of 4", attention(Sparse(rows=(3, 2), keys=(9, 6)), block=4, count=3)),
    ("statistics, BSND", attention(Sparse(rows=(4, 2), keys=(3, 7)), return_softmax_lse=True)),
    ("statistics, TND", attention(Sparse(("TND", "TND"), rows=(2, 3), keys=(1, 7)), return_softmax_lse=True)),
)


# int8 queries, keys and rows ---------------------------------------------------------------------------------------


def quant_indexer(a: Sparse, count: int = 5, **more: Any) -> Make:
    """Numbers of few bits, so that what a kernel rounds loses nothing in any dtype."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        def of_queries(*width: int) -> Tensor:
            return torch.randint(1, 5, (*leading(a), *width)).to(dtype) / 4

        keys = of_keys(a, a.d, torch.float32)
        scales = 1 + torch.randperm(128)[: keys[..., 0].numel()].reshape(keys.shape[:-1]) / 128
        call = {
            "query": torch.randint(-5, 6, (*leading(a), a.n, a.d), dtype=torch.int8),
            "key": keys.mul(2).round().clamp(-5, 5).to(torch.int8),
            "weights": of_queries(a.n),
            "query_dequant_scale": of_queries(a.n),
            "key_dequant_scale": scales.to(dtype),
            "query_quant_mode": 0,
            "key_quant_mode": 0,
            "sparse_count": count,
        }
        return call | about_sequences(a, "key") | a.more | more

    return make


QUANT_INDEXER: tuple[tuple[str, Make], ...] = tuple((label, quant_indexer(a)) for label, a in SEQUENCES)


def packed_rows(latent: Tensor, rope: Tensor, tile: int) -> Tensor:
    """[int8(latent / scale) | bits(rope) | bits(scale)], a scale in float32 of each tile."""
    runs = latent.float().unflatten(-1, (-1, tile))
    scale = runs.abs().amax(-1, keepdim=True) / 127
    parts = ((runs / scale).round().to(torch.int8).flatten(-2), rope.view(torch.int8), scale[..., 0].view(torch.int8))
    return torch.cat(parts, dim=-1)


def quant_attention(a: Sparse, block: int = 1, tile: int = 4, rope: int = 8, **more: Any) -> Make:
    """Rotated keys whose bits are those of bfloat16 for every query but one in float16."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        stored = dtype if dtype == torch.float16 else torch.bfloat16
        rows = packed_rows(of_keys(a, a.d, dtype), of_keys(a, rope, stored), tile)
        call: dict[str, Any] = {
            "query": random(*leading(a), a.n, a.d + rope, dtype=dtype),
            "key": rows,
            "value": rows,
            "sparse_indices": lists(a, 6, block),
            "scale_value": 0.3,
            "key_quant_mode": 2,
            "value_quant_mode": 2,
            "attention_mode": 2,
            "sparse_block_size": block,
            "tile_size": tile,
            "rope_head_dim": rope,
        }
        return call | about_sequences(a, "kv") | a.more | more

    return make


def in_bfloat16(make: Make) -> Make:
    """A call in bfloat16 where it is asked for in float16: what the bits of a row are, a wide query does not say."""
    return lambda dtype: make(torch.bfloat16 if dtype == torch.float16 else dtype)


QUANT_ATTENTION: tuple[tuple[str, Make], ...] = (
    *((label, in_bfloat16(quant_attention(a))) for label, a in SEQUENCES),
    ("blocks of 2", in_bfloat16(quant_attention(Sparse(("TND", "PA_BSND"), rows=(2, 3), keys=(9, 6)), block=2))),
    ("one tile", in_bfloat16(quant_attention(Sparse(), tile=16))),
)
