"""Calls of npu_fused_infer_attention_score over a latent, which differ in the keys that the operator reads.

unrotated   queries q W_UK [B, N, S, C], latent [.., C]
apart       queries q_nope W_UK [B, N, S, C] and q_rope [B, N, S, Dr], latent [.., C] and rotated lanes [.., Dr]
joined      the arguments of `apart`, concatenated to one key head of C + Dr lanes
expanded    queries q_nope [B, N, S, D] and q_rope, keys c W_UK [.., N, D], values c W_UV [.., N, E], rotated lanes
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from fusion import require
from patterns.attention import calls
from patterns.attention.calls import Call, MaskSpec, Parts
from patterns.attention.masks.visibility import Dense
from patterns.attention.sources import Rows
from patterns.cache import pages as cached

APART = (512, 64)
"""Widths of the latent and of its rotated lanes that the operator takes as separate arguments."""
NO_LANES = "keys: they have no rotated lanes; npu_fused_infer_attention_score requires query_rope and key_rope here"


@dataclass(frozen=True)
class Keys:
    """Keys of a latent: their source, the mask, and the number of leading rows that the model reads (None: all)."""

    source: Any
    seen: Any
    first_rows: Any

    def __post_init__(self) -> None:
        """Refuse an unproven mask before queries are computed, which costs more."""
        self.seen.refuse_unproven()

    def count(self, batch: Any) -> Any:
        """Count the keys of each of `batch` sequences that the model reads."""
        return self.source.keys(batch) if self.first_rows is None else self.first_rows

    def cut(self, kv: Tensor) -> Tensor:
        """Take the rows of `kv` [B, T, ..] that the model reads."""
        return kv if self.first_rows is None else kv[:, : self.first_rows]

    def spec(self, queries: Any, batch: Any) -> MaskSpec:
        """Return the mask, for `queries` queries of each of `batch` sequences, with a lower-right causal order; see
        `MaskSpec`.
        """
        return self.source.spec(self.seen.within(self.first_rows).spec(), queries, self.count(batch), latent=True)


def apart(q: Parts, keys: Keys, call: Call, heads_first: bool = False, **scales: Any) -> Parts:
    """Call npu_fused_infer_attention_score with latent and rotated lanes as separate arguments.

    Returns the result [B, N, S, C] and the log-sum-exp. `q` are absorbed queries and their rotated lanes. With
    `heads_first` the result is [N, B, S, C] in memory. `scales` are the arguments that dequantise int8 queries and an
    int8 latent.
    """
    require(len(q) == 2, NO_LANES)
    batch, heads, queries = q[0].shape[:3]
    source, count = keys.source, keys.count(batch)
    latent, rope = source.read(batch)
    q, seen = source.posed(q, keys.seen.within(keys.first_rows), count)
    require(
        not (heads_first and call.lse),
        "log-sum-exp: the result has heads before queries; npu_fused_infer_attention_score requires heads "
        "behind queries beside it",
    )
    require(
        not (heads_first and scales),
        "result: it has heads before queries, over an int8 latent; npu_fused_infer_attention_score requires "
        "heads behind queries there",
    )
    if heads_first and not isinstance(seen, Dense) and not _few(queries):
        return _packed(q, keys, seen, call)
    lengths, masking = seen.lengths_and_mask(source, q[0], count, latent=True)
    if isinstance(seen, Dense) and not source.paged:
        latent, rope = keys.cut(latent), keys.cut(rope)
    rows = [each.transpose(1, 2) if scales else _with_heads(each.transpose(1, 2)) for each in q]
    y, lse = calls.fused(
        rows[0], latent, latent, lengths, call, query_rope=rows[1], key_rope=rope, num_query_heads=rows[0].shape[2],
        num_key_value_heads=1, input_layout="BSND_NBSD" if heads_first else "BSND", **masking, **source.arguments(),
        **scales,
    )  # fmt: skip
    y = (y.permute(1, 2, 0, 3) if heads_first else y)[:, :, :heads]
    if scales:  # no product with W_UV follows, which would bring the result into the layout of the model
        return seen.restored(y.transpose(1, 2)), lse
    y = seen.restored(y, last=True, values=None if source.paged else latent.transpose(1, 2)).transpose(1, 2)
    return y, lse[:, :heads] if call.lse else lse


def joined(q: Parts, keys: Keys, call: Call) -> Parts:
    """Call npu_fused_infer_attention_score on queries and keys [.., C + Dr]; return the first C lanes, [B, N, S, C].

    The keys, latent and rotated lanes concatenated, are also the values.
    """
    require(len(q) == 2, NO_LANES)
    require(
        not keys.source.paged,
        "pages: latent and rotated lanes are two caches; a call on joined lanes requires contiguous keys",
    )
    require(
        tuple(each.shape[-1] for each in q) != APART,
        "widths: they are 512 and 64; npu_fused_infer_attention_score requires these as two tensors",
    )
    key = keys.cut(torch.cat(keys.source.read(q[0].shape[0]), dim=-1)).transpose(1, 2)
    y, lse = Rows(key, key).batched(torch.cat(q, dim=-1), keys.seen, call)
    return y[..., : q[0].shape[-1]], lse


def unrotated(q: Tensor, keys: Keys, call: Call) -> Parts:
    """Call npu_fused_infer_attention_score on `q` [B, N, S, C], with the latent as keys and values: [B, N, S, C]."""
    source = Rows(keys.cut(keys.source.read(q.shape[0])[0]).transpose(1, 2))
    latent = source.first.transpose(1, 2)
    count = latent.shape[1]
    (q,), seen = source.posed((q,), keys.seen, count)
    lengths, masking = seen.lengths_and_mask(source, q, count)
    y, lse = calls.fused(
        q.transpose(1, 2), latent, latent, lengths, call, num_query_heads=q.shape[1], num_key_value_heads=1,
        input_layout="BSND", **masking,
    )  # fmt: skip
    return seen.restored(y, last=True, values=source.first).transpose(1, 2), lse


def expanded(q: Parts, keys: Keys, up: Parts, call: Call) -> Parts:
    """Call npu_fused_infer_attention_score on keys and values of all heads, products of the latent and `up`.

    Returns the result [B, N, S, E] and the log-sum-exp. `q` are queries [B, N, S, D] and their rotated lanes [B, N, S,
    Dr]; `up` are W_UK [N, D, C] and W_UV [N, C, E].
    """
    require(not keys.source.paged, "pages: they are read in place; a call on expanded keys requires contiguous ones")
    batch, _, queries = q[0].shape[:3]
    (up_key, up_value), heads = up, up[0].shape[0]
    q, seen = keys.source.posed(q, keys.seen, keys.count(batch))
    spec = replace(keys, seen=seen).spec(queries, batch)
    latent, rope = (keys.cut(each)[:, : calls.longest(spec.kv_len)] for each in keys.source.read(batch))
    if batch == 1 and spec.kv_lens is None and not any(map(calls.heads_last, q)):
        return _expanded_heads_first(q, (latent[0, :, 0], rope[0]), (up_key.transpose(1, 2), up_value), spec, call)
    weights = (up_key.flatten(0, 1), up_value.transpose(1, 2).flatten(0, 1))
    k, v = (linear(latent.squeeze(2), each.contiguous()).unflatten(-1, (heads, -1)) for each in weights)
    lengths = [*spec.kv_len] if isinstance(spec.kv_len, tuple) else spec.kv_lens
    y, lse = calls.fused(
        q[0].transpose(1, 2), k, v, lengths, call, query_rope=q[1].transpose(1, 2), num_query_heads=heads,
        num_key_value_heads=heads, key_rope=rope.expand(-1, -1, heads, -1).contiguous(), input_layout="BSND",
        **spec.arguments(k.device, queries),
    )  # fmt: skip
    return seen.restored(y, last=True).transpose(1, 2), lse


def _expanded_heads_first(q: Parts, kv: Parts, up: Parts, spec: MaskSpec, call: Call) -> Parts:
    """Call npu_fused_infer_attention_score in layout NTD_TND on one sequence, whose heads are first in memory.

    Args:
        q: queries [1, N, S, D] and their rotated lanes.
        kv: the latent [T, C] and the rotated lanes [T, 1, Dr].
        up: W_UK as [N, C, D], and W_UV [N, C, E].
        spec: the mask.
        call: scale and version.

    Returns:
        The result [1, N, S, E] and the log-sum-exp.
    """
    query, query_rope = (each.squeeze(0) for each in q)
    latent, rope = kv
    heads, queries = query.shape[:2]
    k, v = (torch.matmul(latent, each.contiguous()) for each in up)
    y, lse = calls.fused(
        query, k, v, calls.ends_of(1, latent.shape[0], k.device), call, query_rope=query_rope,
        key_rope=rope.transpose(0, 1).expand(heads, -1, -1).contiguous(), num_query_heads=heads,
        num_key_value_heads=heads, input_layout="NTD_TND", actual_seq_qlen=calls.ends_of(1, queries, k.device),
        **spec.arguments(k.device, queries),
    )  # fmt: skip
    return y.unsqueeze(0).transpose(1, 2), lse.transpose(0, 1).unsqueeze(0) if call.lse else lse


def _packed(q: Parts, keys: Keys, seen: Any, call: Call) -> Parts:
    """Call npu_fused_infer_attention_score in layout TND_NTD, with the sequences of `q` packed one after the other.

    `keys` and the mask `seen` are as in `apart`, which returns the same. If a sequence sees a part of its rows alone,
    rows are passed as pages: the operator takes lengths of pages.
    """
    batch, heads, queries = q[0].shape[:3]
    source = keys.source
    spec = source.spec(seen.spec(), queries, keys.count(batch), latent=True)
    latent, rope = source.read(batch)
    pages = source.arguments()
    if not source.paged and spec.kv_len is None and spec.kv_lens is None:
        lengths = calls.ends_of(batch, latent.shape[1], latent.device)
        latent, rope = (each.flatten(0, 1) for each in (latent, rope))
    else:
        lengths = calls.each_length(spec, q[0])
        if not source.paged:
            latent, rope = (
                cached.cut(each, 1, "npu_fused_infer_attention_score").flatten(2) for each in (latent, rope)
            )
            table = torch.arange(latent.shape[0], dtype=torch.int32, device=latent.device).reshape(batch, -1)
            pages = dict(block_table=table, block_size=latent.shape[1])
    rows, turned = (each.transpose(1, 2).flatten(0, 1) for each in q)
    y, lse = calls.fused(
        rows, latent, latent, lengths, call, query_rope=turned, key_rope=rope, input_layout="TND_NTD",
        actual_seq_qlen=calls.ends_of(batch, queries, rows.device, lengths=lengths), num_query_heads=heads,
        num_key_value_heads=1, **spec.arguments(rows.device, queries), **pages,
    )  # fmt: skip
    return seen.restored(y.unflatten(1, (batch, queries)).permute(1, 2, 0, 3), last=True).transpose(1, 2), lse


def _few(queries: Any) -> bool:
    """Return True if `queries` is a number from 2 to 16, as batched layouts that return heads first require."""
    return isinstance(queries, int) and 1 < queries <= 16


def _with_heads(q: Tensor) -> Tensor:
    """Pad the heads of `q` [B, S, N, C] with zeros to a power of two, as the operator requires over a latent."""
    heads = q.shape[2]
    more = (1 << (heads - 1).bit_length()) - heads
    return pad(q, (0, 0, 0, more)) if more else q
