"""How dense attention over a latent is put to the operator: its rotated lanes apart, joined to it, or all expanded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import require
from patterns.primitives import attention_calls as calls
from patterns.primitives import latent_calls


@dataclass(frozen=True)
class Seen:
    """What queries see of the first `rows` of a latent: told in words, or shown by a mask, as `by` wants it."""

    by: str
    order: str
    window: int | None
    known: Any
    length: Tensor | None
    rows: Any
    mask: Tensor | None
    empty: str

    def told(self, queries: Any, keys: Any, lse: bool = False) -> calls.Seen:
        """In words, of so many queries and keys: the operator's causal order ends at the last key, whichever it is.

        For `lse`, the log-sum-exp, every query must see a key.
        """
        if lse:
            own = calls.Seen(self.order, self.window, self.known, self.length)
            calls.require_a_key(own, queries, keys if self.rows is None else self.rows)
        require(self.order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
        if self.order == "left":
            require(queries <= (keys if self.rows is None else self.rows), "there are fewer keys than queries")
            return calls.Seen("right", self.window, queries)
        every = self.known is None and self.length is None
        return calls.Seen(self.order, self.window, self.rows if every else self.known, self.length)

    def shown(self) -> Tensor:
        """The mask [B or 1, 1, S, T], true where a key is hidden."""
        require(self.mask is not None, "there is no mask")
        assert self.mask is not None
        return self.mask

    def cut(self, kv: Tensor) -> Tensor:
        """The rows of a latent [B, T, 1, D] that a mask speaks of."""
        return kv if self.rows is None else kv[:, : self.rows]


def apart(
    q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: Seen, scale: float, version: int, values: str
) -> Tensor:
    """Queries [B, N, S, C] and [B, N, S, Dr] over a latent [.., C] and [.., Dr], as [B, S, N, C].

    In memory it is [N, B, S, C] where `values` are expanded from "heads first".
    """
    queries = q[0].shape[2]
    heads_first = values == "heads first"
    if heads_first and seen.by == "words" and not calls.few(queries):
        latent, rope = _by_sequence(q[0], kv)
        return _packed(q, latent, rope, seen.told(queries, latent.shape[1]), scale, version)
    return _beside(q, kv, seen, scale, version, heads_first=heads_first)[0]


def apart_with_sum(
    q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: Seen, scale: float, version: int
) -> tuple[Tensor, Tensor]:
    """The same with the log-sum-exp of the scores, [B, N, S, 1], where every query is known to see a key."""
    y, total = _beside(q, kv, seen, scale, version, lse=True)
    return y, total if seen.by == "words" else calls.sum_where_empty(total, seen.shown())


def _beside(
    q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: Seen, scale: float, version: int, lse: bool = False,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence beside the other."""
    how = dict(scale=scale, version=version, lse=lse, heads_first=heads_first)
    queries = q[0].shape[2]
    latent, rope = _by_sequence(q[0], kv)
    if seen.by == "mask":
        latent, rope = seen.cut(latent), seen.cut(rope)
        y, total = _fused(q, latent, rope, None, **how, **calls.shown(seen.shown(), queries))
        y = calls.where_empty(y.transpose(1, 2), latent.transpose(1, 2), seen.shown(), seen.empty)
        return y.transpose(1, 2), total
    told = seen.told(queries, latent.shape[1], lse)
    lengths = told.length if told.known is None else [told.known]
    return _fused(q, latent, rope, lengths, **how, **told.arguments(latent.device, queries))


def _packed(
    q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, told: calls.Seen, scale: float, version: int
) -> Tensor:
    """The same for queries of one sequence after the other; a latent that is seen in part is read as pages."""
    batch: Any = q[0].shape[0]
    if told.known is None and told.length is None:
        lengths = calls.ends_of(batch, latent.shape[1], latent.device)
        latent, rope = (each.flatten(0, 1) for each in (latent, rope))
        return calls.heads_before(q, latent, rope, lengths, told, version, softmax_scale=scale)
    blocks = [latent_calls.pages(each, 1) for each in (latent, rope)]
    table = torch.arange(blocks[0].shape[0], dtype=torch.int32, device=latent.device).reshape(batch, -1)
    known = [told.known] * batch if isinstance(batch, int) else torch.full((batch,), told.known or 0)
    latent, rope = (each.flatten(2) for each in blocks)
    return calls.heads_before(
        q, latent, rope, known if told.length is None else told.length, told, version, softmax_scale=scale,
        block_table=table, block_size=latent.shape[1],
    )  # fmt: skip


def joined(
    q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: Seen, scale: float, version: int, lse: bool = False
) -> tuple[Tensor, Tensor]:
    """The same with queries and keys [.., C + Dr], and values of which the first C lanes count."""
    query, key = torch.cat(q, dim=-1), seen.cut(torch.cat(_by_sequence(q[0], kv), dim=-1)).transpose(1, 2)
    if seen.by == "mask":
        y, total = calls.batched(query, key, key, scale, mask=seen.shown(), version=version, lse=lse)
        y = calls.where_empty(y, key, seen.shown(), seen.empty)
        total = calls.sum_where_empty(total, seen.shown()) if lse else total
    else:
        told = seen.told(query.shape[2], key.shape[2], lse)
        y, total = calls.batched(query, key, key, scale, told, version=version, lse=lse)
    return y[..., : q[0].shape[-1]].transpose(1, 2), total


def expanded(
    q: tuple[Tensor | None, Tensor], kv: tuple[Tensor, Tensor], up: tuple[Tensor | None, Tensor | None], seen: Seen,
    scale: float, version: int, lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries [B, N, S, D] and [B, N, S, Dr] over keys and values of all heads, as [B, S, N, E]."""
    nope, rotated = q
    up_key, up_value = up
    require(nope is not None and up_value is not None, "the model itself absorbs the projections")
    assert nope is not None
    assert up_key is not None
    assert up_value is not None
    heads, queries = up_key.shape[0], nope.shape[2]
    rows = _by_sequence(nope, kv)
    told = seen.told(queries, rows[0].shape[1], lse)
    latent, rope = (seen.cut(each)[:, : told.known] for each in rows)
    if nope.shape[0] == 1 and told.length is None and not any(map(calls.heads_last, (nope, rotated))):
        weights = (up_key.transpose(1, 2), up_value)
        return _heads_first((nope, rotated), latent[0, :, 0], rope[0], weights, told, scale, version, lse)
    joined = (up_key.flatten(0, 1), up_value.transpose(1, 2).flatten(0, 1))
    k, v = (linear(latent.squeeze(2), each.contiguous()).unflatten(-1, (heads, -1)) for each in joined)
    query, query_rope = (each.transpose(1, 2) for each in (nope, rotated))
    return calls.fused(
        query, k, v, told.length, version, lse, query_rope=query_rope, num_query_heads=heads, num_key_value_heads=heads,
        key_rope=rope.expand(-1, -1, heads, -1).contiguous(), softmax_scale=scale, input_layout="BSND",
        **told.arguments(k.device, queries),
    )  # fmt: skip


def _heads_first(
    q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, up: tuple[Tensor, Tensor], told: calls.Seen, scale: float,
    version: int, lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same for one sequence whose heads lie first in memory, over a latent [T, C] times [N, C, D] and [N, C, E]."""
    query, query_rope = (each.squeeze(0) for each in q)
    heads, queries = query.shape[:2]
    k, v = (torch.matmul(latent, each.contiguous()) for each in up)
    y, total = calls.fused(
        query, k, v, calls.ends_of(1, latent.shape[0], k.device), version, lse, query_rope=query_rope,
        key_rope=rope.transpose(0, 1).expand(heads, -1, -1).contiguous(), num_query_heads=heads,
        num_key_value_heads=heads, softmax_scale=scale, input_layout="NTD_TND",
        actual_seq_qlen=calls.ends_of(1, queries, k.device), **told.arguments(k.device, queries),
    )  # fmt: skip
    return y.unsqueeze(0), total.transpose(0, 1).unsqueeze(0) if lse else total


def _by_sequence(q: Tensor, kv: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Latents as [B, T, 1, C] and [B, T, 1, Dr]."""
    return [each.reshape(q.shape[0], -1, 1, each.shape[-1]) for each in kv]


def _fused(
    q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, lengths: Any, scale: float, version: int, lse: bool,
    heads_first: bool, **told: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, query_rope = (calls.with_heads(each.transpose(1, 2)) for each in q)
    y, total = calls.fused(
        query, latent, latent, lengths, version, lse, query_rope=query_rope, key_rope=rope,
        num_query_heads=query.shape[2], num_key_value_heads=1, softmax_scale=scale,
        input_layout="BSND_NBSD" if heads_first else "BSND", **told,
    )  # fmt: skip
    heads = q[0].shape[1]
    return (y.permute(1, 2, 0, 3) if heads_first else y)[:, :, :heads], total[:, :heads] if lse else total
