"""How attention is put to npu_fused_infer_attention_score: layouts, lengths and masks, as they are read where they lie.

y, lse = fused(q, k, v, lengths, Call(scale, version, lse), input_layout=..., **spec.arguments(...))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import bounded, require

BAND = 2048
"""The mask of sparse modes 2, 3 and 4 is fixed: what it holds is not read for a larger one."""
KEYS = "actual_seq_kvlen"
UNLIMITED = 2147483647
"""A window of tokens that hides none."""
FIRST_NAMES = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_qlen": "actual_seq_lengths",
    KEYS: "actual_seq_lengths_kv",
    "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_key": "key_antiquant_offset",
    "dequant_offset_value": "value_antiquant_offset",
    "key_quant_mode": "key_antiquant_mode",
    "value_quant_mode": "value_antiquant_mode",
}
"""What the first version of the operator calls the arguments of the second."""

Parts = tuple[Tensor, Tensor]
"""A result [B, N, S, E] and the log-sum-exp of its scores [B, N, S, 1], empty unless asked for."""


@dataclass(frozen=True)
class Call:
    """The factor of the scores, the version of the operator (0 for those that it has replaced), and whether it gives
    the log-sum-exp of the scores.

    Attributes:
        int8: what is told of keys and values in int8, None for floats.
    """

    scale: float
    version: int = 2
    lse: bool = False
    int8: Any = None


@dataclass(frozen=True)
class MaskSpec:
    """A mask without its entries, as the operator takes it.

    Attributes:
        kind: "none", "causal_upper_left" (key j ≤ query i) or "causal_lower_right" (the last query sees
            the last key).
        window: how many keys before its own a query sees; None for all.
        kv_len: how many keys every sequence has, where that is known.
        kv_lens: the same of each sequence, [B].
    """

    kind: str = "none"
    window: int | None = None
    kv_len: Any = None
    kv_lens: Tensor | None = None

    def arguments(self, device: torch.device, queries: Any) -> dict[str, Any]:
        """Sparse mode with what belongs to it; a single query has no causal order."""
        if self.kind == "none":
            return {}
        triangle = torch.ones(BAND, BAND, dtype=torch.bool, device=device).triu(1)
        if self.window is not None:
            return dict(sparse_mode=4, pre_tokens=self.window, next_tokens=0, atten_mask=triangle)
        return dict(sparse_mode=2 if self.kind == "causal_upper_left" else 3, atten_mask=triangle)

    def towards_last(self) -> MaskSpec:
        """The same, causal towards the last key, as which a causal order of as many queries as keys counts as well."""
        return replace(self, kind="causal_lower_right" if self.kind == "causal_upper_left" else self.kind)

    def from_last(self, queries: Any, keys: Any) -> MaskSpec:
        """The same for an operator whose causal order ends at the last key, whichever it is, with `kv_len` known."""
        if self.kv_lens is not None:
            return self
        kv_len = queries if self.kind == "causal_upper_left" else keys if self.kv_len is None else self.kv_len
        require(kv_len <= keys, "there are fewer keys than queries, which stand in line from the first on")
        return replace(self.towards_last(), kv_len=kv_len)


def viewed(y: Tensor, view: Any) -> Tensor:
    """[B, N, S, E] in the arrangement and the dtype of the model, whose symbolic sizes are named."""
    sizes: dict[Any, Any] = {"B": y.shape[0], "S": y.shape[2]}
    for op, how in view:
        match op:
            case "reshape":
                y = y.reshape([sizes.get(each, each) for each in how])
            case "cast":
                y = y.to(*how)
            case _:
                y = y.permute(how)
    return y


def fused(q: Tensor, k: Tensor, v: Tensor, lengths: Any, call: Call, **arguments: Any) -> Parts:
    """The operator for lengths as numbers or in a tensor: its output, and the log-sum-exps if the call has them."""
    if call.version == 0:
        return _older(q, k, v, lengths, call, **arguments)
    arguments |= dict(softmax_scale=call.scale) | (dict(return_softmax_lse=True) if call.lse else {})
    arguments |= {} if call.int8 is None else call.int8.arguments(q, k, arguments["input_layout"])
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2
    if call.version == 1:
        operator = torch.ops.npu.npu_fused_infer_attention_score
        arguments = {FIRST_NAMES.get(name, name): value for name, value in arguments.items()}
    overload = operator.tensor_lengths if isinstance(lengths, Tensor) else operator.default
    with bounded():  # a result is a mean of values
        return overload(q, k, v, **{FIRST_NAMES[KEYS] if call.version == 1 else KEYS: lengths}, **arguments)


def _older(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Any,
    call: Call,
    *,
    input_layout: str,
    num_query_heads: Any,
    num_key_value_heads: Any,
    **arguments: Any,
) -> Parts:
    """The same by the operators that it has replaced: one for a single query of each sequence, one for several."""
    require(not call.lse and call.int8 is None, "the older operators give no log-sum-exp and are told no int8 scales")
    require("pse_shift" not in arguments, "a bias is told to the operator that has replaced the older ones alone")
    told = dict(
        num_heads=num_query_heads, num_key_value_heads=num_key_value_heads, scale_value=call.scale,
        input_layout=input_layout,
    )  # fmt: skip
    mode = arguments.pop("sparse_mode", 0)
    if q.shape[1 if input_layout == "BSND" else 2] == 1:
        told |= {name: arguments[name] for name in ("atten_mask", "block_table", "block_size") if name in arguments}
        operator = torch.ops.npu.npu_incre_flash_attention
        overload = operator.tensor_lengths if isinstance(lengths, Tensor) else operator.default
        with bounded():  # a mean of values
            return overload(q, k, v, actual_seq_lengths=lengths, **told), q
    require("block_table" not in arguments, "the older operator for several queries reads no pages")
    numbers = not isinstance(lengths, Tensor) and all(isinstance(each, int) and each > 0 for each in lengths or ())
    require(numbers, "the older operator for several queries is told lengths in numbers, and of keys that there are")
    told |= {name: arguments[name] for name in ("atten_mask", "pre_tokens") if name in arguments}
    told |= dict(sparse_mode=mode, next_tokens=arguments.get("next_tokens", UNLIMITED))
    with bounded():  # a mean of values
        return torch.ops.npu.npu_prompt_flash_attention(q, k, v, actual_seq_lengths_kv=lengths, **told), q


def heads_last(x: Tensor) -> bool:
    """Whether x [B, N, S, D] lies in memory as [B, S, N, D]."""
    return x.stride(1) < x.stride(2)


def positions_first(x: Tensor) -> bool:
    """Whether x [B, N, S, D] lies in memory as [S, B, N, D], the heads of all sequences beside each other."""
    beside = x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return beside and (x.shape[2] == 1 or x.stride(2) > x.stride(0))


def of_one(x: Tensor) -> Tensor:
    """What lies so, as [1, B · N, S, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2).transpose(0, 1).unsqueeze(0)


def ends_of(batch: Any, size: Any, device: torch.device, beside: Any = None) -> Any:
    """Where each sequence ends: numbers, or a tensor if those `beside` are one or their number is symbolic."""
    if isinstance(batch, int) and not isinstance(beside, Tensor):
        return [size * (number + 1) for number in range(batch)]
    return torch.arange(1, batch + 1, device=device) * size


def each_length(spec: MaskSpec, q: Tensor) -> Any:
    """How many keys each sequence of queries [B, ..] has: numbers, or a tensor [B]."""
    batch: Any = q.shape[0]
    if spec.kv_lens is not None:
        return spec.kv_lens
    return [spec.kv_len] * batch if isinstance(batch, int) else torch.full((batch,), spec.kv_len, device=q.device)


def laid(pages: Tensor, size: Any, layout: str = "BSND", heads: Any = 1) -> Tensor:
    """Pages of `size` rows of `heads` as an operator is told that they lie, in the words of `paged_rows`.

    [Block, Size, N · D] for "BSND", [Block, N, Size, D] for "BNSD", [Block, N, D / L, Size, L] for "NZ".
    """
    what = "lines of the pages" if layout == "NZ" else "pages"
    together = "the {what} do not lie together, so that reading them in place would copy them all"
    require(pages.is_contiguous(), together, what=what)
    dims = {"BSND": (size, -1), "BNSD": (heads, size, -1), "NZ": (heads, -1, size, pages.shape[-1])}
    return pages.reshape(pages.shape[0], *dims[layout])


def in_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: Any, call: Call, ends: Any = None, **arguments: Any) -> Parts:
    """Queries [B, N, S, D] one sequence after the other, over packed keys or pages: [B, N, S, E] and [B, N, S, 1].

    `ends` says where sequences end that are not all as long.
    """
    batch: Any = q.shape[0]
    heads, queries = q.shape[1:3]
    ends = ends_of(batch, queries, q.device, beside=lengths) if ends is None else ends
    y, lse = fused(
        q.transpose(1, 2).flatten(0, 1), k, v, lengths, call, actual_seq_qlen=ends, input_layout="TND",
        num_query_heads=heads, **arguments,
    )  # fmt: skip
    rows = (batch, queries)
    return y.unflatten(0, rows).transpose(1, 2), lse.unflatten(0, rows).transpose(1, 2) if call.lse else lse


def encoder(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A whole sequence that attends to itself."""
    heads = q.shape[1]
    if not (heads_last(q) and heads_last(k) and heads_last(v)):
        return torch.ops.npu.npu_fusion_attention(q, k, v, heads, "BNSD", scale=scale)[0]
    q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
    y = torch.ops.npu.npu_fusion_attention(q, k, v, heads, "BSH", scale=scale)[0]
    return y.unflatten(2, (heads, -1)).transpose(1, 2)


def by_atb(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Any, scale: float) -> Tensor:
    """One query [B, N, 1, D] of each sequence over pages [Block, Size, M, D], of which a row without keys gives 0."""
    require(q.shape[2] == 1, "the operator of the transformer library is for one query of each sequence")
    rows, heads = q.squeeze(2), (k.shape[2], q.shape[1])
    if not isinstance(lengths, Tensor):
        lengths = torch.full((q.shape[0],), lengths[0], device=q.device)
    out = torch.zeros(rows.shape, dtype=q.dtype, device=q.device)  # the kernel leaves such a row as it is
    attended = torch.ops.atb._npu_paged_attention.functional
    return attended(rows, k, v, *heads, scale, table, lengths.int(), out).unsqueeze(2)


def beside_sink(y: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """y · exp(lse) / (exp(lse) + exp(sink)): y [B, N, S, E], lse [B, N, S, 1], sink [N]."""
    share = torch.sigmoid(lse - sink.to(lse.dtype).reshape(-1, 1, 1))
    return (y * share).to(y.dtype)
