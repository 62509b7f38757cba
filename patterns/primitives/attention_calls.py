"""How attention is put to the operators: layouts, lengths and masks, as they are read where the tensors lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import require

BAND = 2048  # the mask of the orders 2, 3 and 4 is fixed: what it holds is not read for a larger one


KEYS = "actual_seq_kvlen"
FIRST_NAMES = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_qlen": "actual_seq_lengths",
    KEYS: "actual_seq_lengths_kv",
    "return_softmax_lse": "softmax_lse_flag",
}
"""What the first version of the operator calls the arguments of the second."""


@dataclass(frozen=True)
class Seen:
    """What queries see, in words; see `Attention.written`."""

    order: str = "full"
    window: int | None = None
    known: int | None = None
    length: Tensor | None = None

    def arguments(self, device: torch.device, queries: Any) -> dict[str, Any]:
        """Sparse mode with what belongs to it; a single query needs none."""
        if self.order == "full" or queries == 1:
            return {}
        triangle = torch.ones(BAND, BAND, dtype=torch.bool, device=device).triu(1)
        if self.window is not None:
            return dict(sparse_mode=4, pre_tokens=self.window, next_tokens=0, atten_mask=triangle)
        return dict(sparse_mode=2 if self.order == "left" else 3, atten_mask=triangle)


def shown(mask: Tensor, queries: Any) -> dict[str, Any]:
    """What the operator is given of a mask that it is shown: queries that see nothing give 0."""
    return dict(atten_mask=mask) if queries == 1 else dict(atten_mask=mask, inner_precise=2)


def finished(y: Tensor, finish: Any) -> Tensor:
    """[B, N, S, E] in the arrangement and the dtype of the model, whose symbolic sizes are named."""
    sizes: dict[Any, Any] = {"B": y.shape[0], "S": y.shape[2]}
    for op, how in finish:
        match op:
            case "reshape":
                y = y.reshape([sizes.get(each, each) for each in how])
            case "cast":
                y = y.to(*how)
            case _:
                y = y.permute(how)
    return y


def fused(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any, version: int, lse: bool = False, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """The operator of this version, for lengths as numbers or in a tensor; with `lse` its log-sum-exps as well."""
    arguments |= dict(return_softmax_lse=True) if lse else {}
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2
    if version == 1:
        operator = torch.ops.npu.npu_fused_infer_attention_score
        arguments = {FIRST_NAMES.get(name, name): value for name, value in arguments.items()}
    overload = operator.tensor_lengths if isinstance(lengths, Tensor) else operator.default
    return overload(q, k, v, **{FIRST_NAMES[KEYS] if version == 1 else KEYS: lengths}, **arguments)


def heads_last(x: Tensor) -> bool:
    """Whether x [B, N, S, D] lies in memory as [B, S, N, D]."""
    return x.stride(1) < x.stride(2)


def batched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Seen = Seen(),
    mask: Tensor | None = None,
    lse: bool = False,
    version: int = 2,
) -> tuple[Tensor, Tensor]:
    """One sequence beside the other; the order of heads and positions is that of the memory."""
    width: Any = v.shape[3]
    queries = q.shape[2]
    if k.shape[3] != width:
        require(isinstance(width, int) and width < k.shape[3], "values are wider than keys")
        v = torch.nn.functional.pad(v, (0, k.shape[3] - width))
    arguments: dict[str, Any] = dict(num_query_heads=q.shape[1], num_key_value_heads=k.shape[1], softmax_scale=scale)
    arguments |= seen.arguments(q.device, queries) if mask is None else dict(sparse_mode=1, **shown(mask, queries))
    lengths = seen.length if seen.known is None else [seen.known]  # one number for every sequence
    last = heads_last(k) and heads_last(v)
    if last:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mixed = not last and queries != 1 and heads_last(q)
    layout = "BSND" if last else "BNSD_BSND" if mixed else "BNSD"
    y, total = fused(q, k, v, lengths, version, lse, input_layout=layout, **arguments)
    y = y.transpose(1, 2) if last or mixed else y
    return y[..., :width], total


def packed(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, seen: Seen, version: int = 2) -> Tensor:
    """One sequence after the other, [T, N, D], told where each ends."""
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    require(seen.length is None and seen.known is None, "only a part of the keys is seen")
    require(seen.order != "left" or queries == keys, "packed sequences are causal towards their last key")
    rows = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)]
    order = "right" if seen.order == "left" else seen.order
    ends = ends_of(batch, keys, q.device)
    return _in_sequence(rows[0], rows[1], rows[2], q, k, ends, sink, scale, Seen(order, seen.window), version)


def paged(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, seen: Seen) -> Tensor:
    """Keys [B, M, T, D] as B pages of T keys, one for each sequence; queries packed."""
    batch: Any = q.shape[0]
    queries: Any = q.shape[2]
    keys: Any = k.shape[2]
    together = isinstance(keys, int) and not heads_last(k) and not heads_last(v)
    require(together, "the keys of a head are no page: as many as are known before, lying together")
    table = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
    require(seen.order != "left" or queries <= keys, "there are fewer keys than queries")
    last = queries if seen.order == "left" else keys
    known = [seen.known or last] * batch if isinstance(batch, int) else torch.full((batch,), seen.known or last)
    order = "right" if seen.order == "left" else seen.order
    lengths = known if seen.length is None else seen.length
    pages = dict(block_table=table, block_size=keys)
    rows = q.transpose(1, 2).flatten(0, 1)
    return _in_sequence(rows, k, v, q, k, lengths, sink, scale, Seen(order, seen.window), 2, **pages)


def ends_of(batch: Any, size: Any, device: torch.device, beside: Any = None) -> Any:
    """Where each sequence ends: numbers, or a tensor if those `beside` are one or their number is symbolic."""
    if isinstance(batch, int) and not isinstance(beside, Tensor):
        return [size * (number + 1) for number in range(batch)]
    return torch.arange(1, batch + 1, device=device) * size


def _in_sequence(
    rows: Tensor, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, lengths: Any, sink: Tensor | None, scale: float,
    seen: Seen, version: int, **pages: Any,
) -> Tensor:  # fmt: skip
    batch: Any = q.shape[0]
    heads, queries = q.shape[1:3]
    ends = ends_of(batch, queries, q.device, beside=lengths)
    beside = {} if sink is None else dict(learnable_sink=sink)
    y, _ = fused(
        rows, keys, values, lengths, version, actual_seq_qlen=ends, input_layout="TND", **beside,
        num_query_heads=heads, num_key_value_heads=k.shape[1], softmax_scale=scale,
        **seen.arguments(q.device, queries), **pages,
    )  # fmt: skip
    return y.unflatten(0, (batch, queries)).transpose(1, 2)


def few(queries: Any) -> bool:
    """Whether there are as many queries as layouts that give heads first, one sequence beside the other, are for."""
    return isinstance(queries, int) and 1 < queries <= 16


def with_heads(q: Tensor) -> Tensor:
    """Queries [B, S, N, C] with heads of zeros, so that their number is a power of two: over a latent it must be."""
    heads = q.shape[2]
    more = (1 << (heads - 1).bit_length()) - heads
    return torch.nn.functional.pad(q, (0, 0, 0, more)) if more else q


def heads_before(
    q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, lengths: Any, seen: Seen, version: int, **arguments: Any
) -> Tensor:
    """Queries [B, N, S, C] and [B, N, S, Dr] over a latent, one sequence after the other, as [B, S, N, C].

    In memory it is [N, B, S, C]. Without a block table, `latent` [B · T, 1, C] and `rope` are packed too.
    """
    batch: Any = q[0].shape[0]
    heads, queries = q[0].shape[1:3]
    rows, turned = (each.transpose(1, 2).flatten(0, 1) for each in q)
    y, _ = fused(
        rows, latent, latent, lengths, version, query_rope=turned, key_rope=rope, input_layout="TND_NTD",
        actual_seq_qlen=ends_of(batch, queries, rows.device, beside=lengths), num_query_heads=heads,
        num_key_value_heads=1, **seen.arguments(rows.device, queries), **arguments,
    )  # fmt: skip
    return y.unflatten(1, (batch, queries)).permute(1, 2, 0, 3)


def encoder(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A whole sequence that attends to itself."""
    last = heads_last(q) and heads_last(k) and heads_last(v)
    if last:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    heads = q.shape[2 if last else 1]
    y = torch.ops.npu.npu_fusion_attention(q, k, v, heads, "BSND" if last else "BNSD", scale=scale)[0]
    return y.transpose(1, 2) if last else y


def where_empty(y: Tensor, v: Tensor, mask: Tensor, empty: str) -> Tensor:
    """`y`, which is 0 for a query that sees no key, with what plain attention gives there.

    "mean": of all values, as a softmax of equal scores gives it; "nan", as a softmax of -inf does; "zero".
    """
    if empty == "zero":
        return y
    nothing = mask.all(-1, keepdim=True)
    if empty == "nan":
        return torch.where(nothing, torch.nan, y)
    groups = y.shape[1] // v.shape[1]
    mean = v.mean(2, keepdim=True).unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)
    return torch.where(nothing, mean, y)


def sum_where_empty(lse: Tensor, mask: Tensor) -> Tensor:
    """A log-sum-exp, which the operator says is +inf for a query that sees no key, with -inf there."""
    return torch.where(mask.all(-1, keepdim=True), -torch.inf, lse)


def require_a_key(seen: Seen, queries: Any, keys: Any) -> None:
    """That every query sees one of so many keys, where what is seen is told in words."""
    require(seen.order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
    room = keys if seen.known is None else seen.known
    enough = seen.order != "right" or (isinstance(queries, int) and isinstance(room, int) and queries <= room)
    require(seen.length is None and enough, "a query may see no key, of which the operator says +inf")


def beside_sink(y: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """y · exp(lse) / (exp(lse) + exp(sink)): y [B, N, S, E], lse [B, N, S, 1], sink [N]."""
    share = torch.sigmoid(lse - sink.to(lse.dtype).reshape(-1, 1, 1))
    return (y * share).to(y.dtype)
