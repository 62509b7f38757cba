"""Small calls of the operators of custom_pypto, both sides of their limits, and what they mean, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import HOST
from tests.operators import sparse_references as sparse
from tests.operators.quant_references import rows as quantised
from tests.operators.sparse_cases import Make, random

LAYER, BEFORE = (
    tuple(f"custom_pypto::npu_{name}_pto.{form}" for form in ("in_place", "functional"))
    for name in ("sparse_attention", "lightning_indexer_prolog")
)

# a whole layer -----------------------------------------------------------------------------------------------------


def layer(
    lengths: tuple[int, ...], rows: int = 1, slots: Any = None, pages: int = 3, size: int = 4, he: int = 48,
    hcq: int = 40, n: int = 4, d: int = 24, dr: int = 16, hckv: int = 32, m: int = 8, di: int = 24, blocks: int = 0,
    made: Any = random, index: torch.dtype = torch.int32,
) -> Make:  # fmt: skip
    """`lengths` count the `rows` new tokens of each sequence; pages that a sequence does not reach name any block."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        batch, count = len(lengths), blocks or 2 * pages * len(lengths)
        used = torch.arange(pages)[None] * size < torch.tensor(lengths)[:, None]
        table = torch.randperm(max(count, pages * batch))[: pages * batch].reshape(batch, pages)
        at = (torch.tensor(lengths)[:, None] - rows + torch.arange(rows)).clamp(min=0)
        places = table.gather(1, at // size) * size + at % size if slots is None else torch.tensor(slots)
        angle = torch.rand(batch, rows, dr, dtype=torch.float64) * 6
        shapes = {
            "x": (batch, rows, he), "w_dq": (he, hcq), "w_uq_qr": (hcq, n * (d + dr)), "w_uk": (n, d, hckv),
            "w_dkv_kr": (he, hckv + dr), "gamma_cq": (hcq,), "gamma_ckv": (hckv,),
            "kv_cache": (count, size, 1, hckv), "kr_cache": (count, size, 1, dr),
            "w_idx_qb": (hcq, m * di), "w_idx_k": (he, di), "w_idx_proj": (he, m), "in_gamma_k": (di,),
            "in_beta_k": (di,), "index_k_cache": (count, size, 1, di),
        }  # fmt: skip
        scaled = {name: shape[-2] ** -0.5 for name, shape in shapes.items() if name.startswith("w_")}
        drawn = {name: made(*shape, dtype=dtype, scale=scaled.get(name, 1.0)) for name, shape in shapes.items()}
        told = {
            "sin": angle.sin().to(dtype),
            "cos": angle.cos().to(dtype),  # of both halves apart, as the kernel reads them
            "cache_index": places.to(index),
            "block_table": table.masked_fill(~used, 1000).to(index),
            "act_seqs": torch.tensor(lengths).to(index),
        }
        return drawn | {name: each.to(drawn["x"].device) for name, each in told.items()}

    return make


LAYERS: tuple[tuple[str, Make], ...] = (
    ("one token", layer((11, 6, 1))),
    ("two tokens", layer((9, 12, 2), rows=2)),
    ("one sequence", layer((5,))),
    ("skipped", layer((7, 3), slots=((-1,), (13,)))),
)


def reference_layer(
    x: Tensor, w_dq: Tensor, w_uq_qr: Tensor, w_uk: Tensor, w_dkv_kr: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor,
    sin: Tensor, cos: Tensor, cache_index: Tensor, kv_cache: Tensor, kr_cache: Tensor, block_table: Tensor,
    act_seqs: Tensor, w_idx_qb: Tensor, w_idx_k: Tensor, w_idx_proj: Tensor, in_gamma_k: Tensor, in_beta_k: Tensor,
    index_k_cache: Tensor, listed: int = 2048,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The output, and the three caches."""
    query, q_rope, _, latent, _, kv, kr = sparse.prolog(
        x, w_dq, w_uq_qr, w_uk, w_dkv_kr, gamma_cq, gamma_ckv, sin, cos, kv_cache, kr_cache, "PA_BSND", cache_index,
        query_norm_flag=True,
    )  # fmt: skip
    keys, dr, lanes = index_k_cache.clone(), sin.shape[-1], index_k_cache.shape[-1]
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            row = turned(normed(x[b, s] @ w_idx_k, in_gamma_k, in_beta_k), sin[b, s], cos[b, s])
            sparse.store(keys, row, int(cache_index[b, s]), "PA_BSND")
    out = torch.zeros_like(query)
    for b, length in enumerate(act_seqs.tolist()):
        places = [(int(block_table[b, j // kv.shape[1]]), j % kv.shape[1]) for j in range(length)]
        for s in range(x.shape[1]):
            seen = places[: length - x.shape[1] + s + 1]
            heads = [turned(each, sin[b, s], cos[b, s]) for each in (latent[b, s] @ w_idx_qb).split(lanes)]
            weights = x[b, s] @ w_idx_proj
            of_seen = torch.stack([keys[at][0] for at in seen])
            scores = sum(w * (of_seen @ head).clamp(min=0) for w, head in zip(weights, heads, strict=True)).tolist()
            best = [seen[j] for _, j in sorted(zip(scores, range(len(seen)), strict=True), reverse=True)[:listed]]
            rows, ropes = (torch.stack([cache[at][0] for at in best]) for cache in (kv, kr))
            for n in range(query.shape[2]):
                logits = (rows @ query[b, s, n] + ropes @ q_rope[b, s, n]) / (rows.shape[1] + dr) ** 0.5
                out[b, s, n] = logits.softmax(0) @ rows
    return out, kv, kr, keys


def normed(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-6) -> Tensor:
    """The layer norm of one row."""
    centred = x - x.mean()
    return centred / (centred @ centred / len(x) + epsilon).sqrt() * gamma + beta


def turned(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """One row of which the first lanes are rotated."""
    width = len(sin)
    return torch.cat((sparse.rope(x[:width], sin, cos), x[width:]))


# what stands before an indexer in int8 -----------------------------------------------------------------------------


def before(
    slots: tuple[int, ...], he: int = 48, hcq: int = 40, n: int = 4, d: int = 24, dr: int = 16, size: int = 4,
    made: Any = random, **more: Any,
) -> Make:  # fmt: skip
    """Scales that weights of a model would have."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        count, wide = len(slots), torch.promote_types(dtype, torch.float32)
        kept = torch.float16 if dtype.itemsize == 2 else dtype
        angle = torch.rand(count, dr, dtype=torch.float64) * 6
        shapes = {
            "token_x": (count, he), "wk": (he, d), "weights_proj": (he, n), "ln_gamma_k": (d,), "ln_beta_k": (d,),
            "hadamard_q": (d, d), "hadamard_k": (d, d),
        }  # fmt: skip
        scaled = {name: shape[-2] ** -0.5 for name, shape in shapes.items() if len(shape) == 2 and shape[0] != count}
        drawn = {name: made(*shape, dtype=dtype, scale=scaled.get(name, 1.0)) for name, shape in shapes.items()}
        like = drawn["token_x"]
        told = {
            "q_norm": torch.randint(-100, 101, (count, hcq), dtype=torch.int8),
            "q_norm_scale": (torch.rand(count, 1) + 0.5).to(wide) / 100,
            "wq_b": torch.randint(-100, 101, (hcq, n * d), dtype=torch.int8),
            "wq_b_scale": (torch.rand(n * d, 1) + 0.5).to(wide) / 1000,
            "cos_idx_rope": angle.cos().to(dtype),
            "sin_idx_rope": angle.sin().to(dtype),
            "idx_k_cache": torch.randint(-9, 9, (5, size, 1, d), dtype=torch.int8),
            "idx_k_scale_cache": torch.rand(5, size, 1, 1).to(kept),
            "idx_k_cache_index": torch.tensor(slots),
            "layernorm_epsilon_k": 1e-6,
        }
        moved = {name: each.to(like.device) if isinstance(each, Tensor) else each for name, each in told.items()}
        return drawn | moved | more

    return make


BEFORES: tuple[tuple[str, Make], ...] = (
    ("tokens", before((3, 7, 19, 0))),
    ("one token", before((9,))),
    ("skipped", before((-1, 5, -1))),
)


def reference_before(
    token_x: Tensor, q_norm: Tensor, q_norm_scale: Tensor, wq_b: Tensor, wq_b_scale: Tensor, wk: Tensor,
    weights_proj: Tensor, ln_gamma_k: Tensor, ln_beta_k: Tensor, cos_idx_rope: Tensor, sin_idx_rope: Tensor,
    hadamard_q: Tensor, hadamard_k: Tensor, idx_k_cache: Tensor, idx_k_scale_cache: Tensor, idx_k_cache_index: Tensor,
    layernorm_epsilon_k: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Queries, scales and weights, and both caches."""
    heads, lanes = weights_proj.shape[1], wk.shape[1]
    keys, scales = idx_k_cache.double(), idx_k_scale_cache.clone()
    queries, of_queries = torch.zeros(len(token_x), heads, lanes).double(), torch.zeros(len(token_x), heads, 1).double()
    for t, (x, slot) in enumerate(zip(token_x, idx_k_cache_index.tolist(), strict=True)):
        angles = sin_idx_rope[t], cos_idx_rope[t]
        q = (q_norm[t].double() @ wq_b.double()) * q_norm_scale[t] * wq_b_scale.flatten()
        for n, head in enumerate(q.split(lanes)):
            queries[t, n], of_queries[t, n] = quantised(turned(head, *angles) @ hadamard_q)
        row = turned(normed(x @ wk, ln_gamma_k, ln_beta_k, layernorm_epsilon_k), *angles) @ hadamard_k
        for cache, kept in zip((keys, scales), quantised(row), strict=True):
            sparse.store(cache, kept.reshape(-1), slot, "PA_BSND")
    weights = token_x @ weights_proj / (heads * lanes) ** 0.5
    return queries, of_queries, weights, keys, scales


REFERENCES = dict.fromkeys(LAYER, reference_layer) | dict.fromkeys(BEFORE, reference_before)

# both sides of their limits ----------------------------------------------------------------------------------------

A3 = "ascend910_93"


def nothing(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sized(lengths: tuple[int, ...] = (1,) * 4, dtype: torch.dtype = torch.bfloat16, **more: Any) -> dict[str, Any]:
    """A whole layer of the sizes that a chip takes."""
    sizes = {
        "pages": 1, "size": 128, "he": 7168, "hcq": 1536, "n": 128, "d": 128, "dr": 64, "hckv": 512, "m": 64, "di": 128,
    }  # fmt: skip
    return layer(lengths, made=nothing, **{**sizes, **more})(dtype)


def sized_before(count: int = 3, **more: Any) -> dict[str, Any]:
    """The other operator."""
    sizes = {"he": 7168, "hcq": 1536, "n": 64, "d": 128, "dr": 64, "size": 128}
    return before((0,) * count, made=nothing, **{**sizes, **more})(torch.bfloat16)


def edges() -> list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]]:
    """Operator, targets, a legal call, the same beyond one limit, what the refusal says."""
    both, fine = (HOST, A3), sized()
    wider = {"w_uq_qr": (1536, 128), "w_dkv_kr": (7168, 512), "w_idx_qb": (1536, 128)}
    texts = ("Huq == N * (D + Dr)", "Hkv == Hckv + Dr", "Hiq == M * Di")
    found = [
        (both, fine, fine | {name: nothing(*shape, dtype=torch.bfloat16)}, text)
        for (name, shape), text in zip(wider.items(), texts, strict=True)
    ]
    found += [
        (both, fine, sized(dr=65), "Dr % 2 == 0 and Dr <= Di"),
        (both, fine, sized(dr=130), "Dr % 2 == 0 and Dr <= Di"),
        ((A3,), fine, sized((1,) * 3), "B == 4"),
        ((A3,), fine, sized(he=7680), "He == 7168"),
        ((A3,), fine, sized(hcq=2048), "Hcq == 1536"),
        ((A3,), fine, sized(n=64), "N == 128"),
        ((A3,), fine, sized(d=192), "D == 128"),
        ((A3,), fine, sized(hckv=256), "Hckv == 512"),
        ((A3,), fine, sized(dr=32), "Dr == 64"),
        ((A3,), fine, sized(m=32), "M == 64"),
        ((A3,), fine, sized(di=64), "Di == 128"),
        ((A3,), fine, sized(size=64), "Size == 128"),
        ((A3,), fine, sized(dtype=torch.float16), "requires x in bfloat16"),
        ((A3,), fine, sized(index=torch.int64), "requires cache_index in int32"),
    ]
    good, narrow = sized_before(), {"wq_b": torch.int8, "wq_b_scale": torch.float32}
    shapes = ((1536, 128), (128, 1))
    fewer = {name: nothing(*s, dtype=each) for (name, each), s in zip(narrow.items(), shapes, strict=True)}
    other = [
        (both, good, good | fewer, "Hq == N * D"),
        (both, good, sized_before(dr=65), "Dr % 2 == 0 and Dr <= D"),
        (both, good, sized_before(dr=130), "Dr % 2 == 0 and Dr <= D"),
        (both, good, sized_before(layout_query="BSND"), "layout_query == 'TND' and layout_key == 'PA_BSND'"),
        (both, good, sized_before(layernorm_epsilon_k=1e-5), "layernorm_epsilon_k == 1e-06"),
        ((A3,), good, sized_before(he=7680), "He == 7168"),
        ((A3,), good, sized_before(hcq=2048), "Hcq == 1536"),
        ((A3,), good, sized_before(n=32), "N == 64"),
        ((A3,), good, sized_before(d=192), "D == 128"),
        ((A3,), good, sized_before(dr=32), "Dr == 64"),
        ((A3,), good, sized_before(size=64), "Size == 128"),
        ((A3,), good, good | {"idx_k_cache_index": nothing(3, dtype=torch.int32)}, "requires idx_k_cache_index in"),
    ]  # fmt: skip
    return [(name, *each) for names, edges in ((LAYER, found), (BEFORE, other)) for name in names for each in edges]


EDGES = edges()
