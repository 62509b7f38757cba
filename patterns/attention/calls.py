"""Calls of npu_fused_infer_attention_score and of the operators that it replaced, in layouts that need no copies.

y, lse = fused(q, k, v, lengths, Call(scale, version, lse), input_layout=..., **spec.arguments(...))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import bounded, require

BAND = 2048
"""Size of the constant mask [BAND, BAND] of sparse modes 2, 3 and 4, whatever the lengths of queries and keys are."""
KEYS = "actual_seq_kvlen"
UNLIMITED = 2147483647
"""A `next_tokens` that hides no key."""
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
"""Argument of npu_fused_infer_attention_score_v2 -> its name in npu_fused_infer_attention_score."""

Parts = tuple[Tensor, Tensor]
"""An output [B, N, S, E] and its log-sum-exp [B, N, S, 1], which is unspecified unless the call asks for it."""


@dataclass(frozen=True)
class Call:
    """The options of an attention call that no operand determines.

    Attributes:
        scale: the factor of the scores.
        version: 2 or 1, the version of npu_fused_infer_attention_score; 0 for the operators that it replaced.
        lse: True if the call returns the log-sum-exp of the scores.
        encoded: `Scales` or `TokenScales` of stored keys and values (see `encodings`); None for floats.
    """

    scale: float
    version: int = 2
    lse: bool = False
    encoded: Any = None


@dataclass(frozen=True)
class MaskSpec:
    """A mask as a kind, a window and lengths, from which the operator derives the entries.

    Attributes:
        kind: "none", "causal_upper_left" (key j ≤ query i) or "causal_lower_right" (the last query sees
            the last key).
        window: the number of keys before its own that a query sees; None for all.
        kv_len: the number of keys that every sequence sees, or a tuple of one for each; None for all keys, or where
            `kv_lens` is given.
        kv_lens: the number of keys of each sequence [B]; None if `kv_len` says all.
    """

    kind: str = "none"
    window: int | None = None
    kv_len: Any = None
    kv_lens: Tensor | None = None

    def arguments(self, device: torch.device, queries: Any) -> dict[str, Any]:
        """Return sparse_mode, atten_mask and the window as arguments of the operator; {} for the kind "none".

        The fixed atten_mask that causal modes require is made on `device`; the number of `queries` is not read.
        """
        if self.kind == "none":
            return {}
        triangle = torch.ones(BAND, BAND, dtype=torch.bool, device=device).triu(1)
        if self.window is not None:
            return dict(sparse_mode=4, pre_tokens=self.window, next_tokens=0, atten_mask=triangle)
        return dict(sparse_mode=2 if self.kind == "causal_upper_left" else 3, atten_mask=triangle)

    def towards_last(self) -> MaskSpec:
        """Replace an upper-left causal kind by lower-right, which is the same mask for as many queries as keys."""
        return replace(self, kind="causal_lower_right" if self.kind == "causal_upper_left" else self.kind)

    def from_last(self, queries: Any, keys: Any) -> MaskSpec:
        """Return the mask as one whose causal order is lower-right, with `kv_len` set; `self` if it has `kv_lens`.

        An upper-left causal mask of `queries` rows is the lower-right one over the first `queries` of the `keys`.
        """
        if self.kv_lens is not None:
            return self
        kv_len = queries if self.kind == "causal_upper_left" else keys if self.kv_len is None else self.kv_len
        require(
            longest(kv_len) <= keys,
            "keys: there are fewer of them than queries under an upper-left causal mask; "
            "npu_fused_infer_attention_score requires as many keys as queries at least",
        )
        return replace(self.towards_last(), kv_len=kv_len)


def longest(kv_len: Any) -> Any:
    """Return the greatest of the lengths `kv_len`: a number for all sequences, one for each, or None for all keys."""
    return max(kv_len) if isinstance(kv_len, tuple) else kv_len


def viewed(y: Tensor, view: Any) -> Tensor:
    """Apply the reshapes, permutes and casts of `view` to `y` [B, N, S, E]; "B" and "S" in a shape are sizes of `y`."""
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
    """Call the attention operator of the version in `call` on queries `q`, keys `k` and values `v`; see `Call`.

    `lengths` are those of the keys, a list of numbers or a tensor; `arguments` are further ones of the operator.
    Returns the output and the log-sum-exp.
    """
    if call.version == 0:
        return _older(q, k, v, lengths, call, **arguments)
    arguments |= dict(softmax_scale=call.scale) | (dict(return_softmax_lse=True) if call.lse else {})
    arguments |= {} if call.encoded is None else call.encoded.arguments(q, k, arguments["input_layout"])
    operator = torch.ops.npu.npu_fused_infer_attention_score_v2
    if call.version == 1:
        operator = torch.ops.npu.npu_fused_infer_attention_score
        arguments = {FIRST_NAMES.get(name, name): value for name, value in arguments.items()}
    overload = operator.tensor_lengths if isinstance(lengths, Tensor) else operator.default
    with bounded():  # a mean of values is as bounded as the values
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
    """Call npu_incre_flash_attention for one query of each sequence, npu_prompt_flash_attention for several.

    The arguments are those of `fused`. The second result is `q`, in the place of a log-sum-exp.
    """
    require(
        not call.lse and call.encoded is None,
        "result: quantised keys, or a log-sum-exp, stand beside it; npu_incre_flash_attention and "
        "npu_prompt_flash_attention require neither",
    )
    require(
        "pse_shift" not in arguments,
        "bias: it is added to the scores; npu_incre_flash_attention and npu_prompt_flash_attention require "
        "scores without one here",
    )
    options = dict(
        num_heads=num_query_heads, num_key_value_heads=num_key_value_heads, scale_value=call.scale,
        input_layout=input_layout,
    )  # fmt: skip
    mode = arguments.pop("sparse_mode", 0)
    if q.shape[1 if input_layout == "BSND" else 2] == 1:
        options |= {name: arguments[name] for name in ("atten_mask", "block_table", "block_size") if name in arguments}
        operator = torch.ops.npu.npu_incre_flash_attention
        overload = operator.tensor_lengths if isinstance(lengths, Tensor) else operator.default
        with bounded():  # a mean of values is as bounded as the values
            return overload(q, k, v, actual_seq_lengths=lengths, **options), q
    require(
        "block_table" not in arguments,
        "keys: they are pages; npu_prompt_flash_attention requires contiguous keys for several queries",
    )
    numbers = not isinstance(lengths, Tensor) and all(isinstance(each, int) and each > 0 for each in lengths or ())
    require(numbers, "lengths: they are a tensor, or 0; npu_prompt_flash_attention requires positive Python numbers")
    options |= {name: arguments[name] for name in ("atten_mask", "pre_tokens") if name in arguments}
    options |= dict(sparse_mode=mode, next_tokens=arguments.get("next_tokens", UNLIMITED))
    with bounded():  # a mean of values is as bounded as the values
        return torch.ops.npu.npu_prompt_flash_attention(q, k, v, actual_seq_lengths_kv=lengths, **options), q


def heads_last(x: Tensor) -> bool:
    """Return True if `x` [B, N, S, D] has the memory layout [B, S, N, D]."""
    return x.stride(1) < x.stride(2)


def positions_first(x: Tensor) -> bool:
    """Return True if `x` [B, N, S, D] is stored position by position, as [S, B, N, D], by its strides.

    The heads of all sequences at one position are then evenly spaced, so that B and N can be viewed as one dim.
    """
    adjacent = x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return adjacent and (x.shape[2] == 1 or x.stride(2) > x.stride(0))


def batch_as_heads(x: Tensor) -> Tensor:
    """View `x` [B, N, S, D] of memory layout [S, B, N, D] as the heads of one sequence, [1, B · N, S, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2).transpose(0, 1).unsqueeze(0)


def ends_of(batch: Any, size: Any, device: torch.device, lengths: Any = None) -> Any:
    """Return the ends of `batch` packed sequences of `size` rows: a list of numbers, or a tensor [B].

    It is a tensor if `batch` is symbolic, or if `lengths`, the lengths of the other operand, is a tensor.
    """
    if isinstance(batch, int) and not isinstance(lengths, Tensor):
        return [size * (number + 1) for number in range(batch)]
    return torch.arange(1, batch + 1, device=device) * size


def each_length(spec: MaskSpec, q: Tensor) -> Any:
    """Return the number of keys of each sequence of `q` [B, ..] by `spec`: a list of numbers, or a tensor [B]."""
    batch: Any = q.shape[0]
    if spec.kv_lens is not None:
        return spec.kv_lens
    if isinstance(spec.kv_len, tuple):
        return [*spec.kv_len]
    return [spec.kv_len] * batch if isinstance(batch, int) else torch.full((batch,), spec.kv_len, device=q.device)


def in_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: Any, call: Call, ends: Any = None, **arguments: Any) -> Parts:
    """Call the operator on queries packed to [B · S, N, D] (layout TND), over packed keys or pages.

    Args:
        q: queries [B, N, S, D].
        k: keys, packed [.., M, D] or in pages.
        v: values alike.
        lengths: the ends of packed keys, or the lengths in pages.
        call: scale, version and results.
        ends: the ends of the packed queries; None for B sequences of S rows.
        arguments: further arguments of the operator.

    Returns:
        The output [B, N, S, E] and its log-sum-exp [B, N, S, 1].
    """
    batch: Any = q.shape[0]
    heads, queries = q.shape[1:3]
    ends = ends_of(batch, queries, q.device, lengths=lengths) if ends is None else ends
    y, lse = fused(
        q.transpose(1, 2).flatten(0, 1), k, v, lengths, call, actual_seq_qlen=ends, input_layout="TND",
        num_query_heads=heads, **arguments,
    )  # fmt: skip
    rows = (batch, queries)
    return y.unflatten(0, rows).transpose(1, 2), lse.unflatten(0, rows).transpose(1, 2) if call.lse else lse


def encoder(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Call npu_fusion_attention without a mask, in layout BSH if q, k and v have it in memory, else in BNSD."""
    heads = q.shape[1]
    if not (heads_last(q) and heads_last(k) and heads_last(v)):
        return torch.ops.npu.npu_fusion_attention(q, k, v, heads, "BNSD", scale=scale)[0]
    q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
    y = torch.ops.npu.npu_fusion_attention(q, k, v, heads, "BSH", scale=scale)[0]
    return y.unflatten(2, (heads, -1)).transpose(1, 2)


def by_atb(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Any, scale: float) -> Tensor:
    """Call atb's _npu_paged_attention with one query of each sequence, `q` [B, N, 1, D].

    Keys `k` and values `v` are pages [Block, Size, M, D], listed by `table` [B, P] up to `lengths`. The output for a
    sequence of length 0 is 0.
    """
    require(
        q.shape[2] == 1, "queries: there are several of a sequence; _npu_paged_attention requires one of each sequence"
    )
    rows, heads = q.squeeze(2), (k.shape[2], q.shape[1])
    if not isinstance(lengths, Tensor):
        lengths = torch.full((q.shape[0],), lengths[0], device=q.device)
    out = torch.zeros(rows.shape, dtype=q.dtype, device=q.device)  # the kernel does not write rows of length 0
    attended = torch.ops.atb._npu_paged_attention.functional
    return attended(rows, k, v, *heads, scale, table, lengths.int(), out).unsqueeze(2)


def with_sink(y: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Compute y · exp(lse) / (exp(lse) + exp(sink)) [B, N, S, E] of `y`, `lse` [B, N, S, 1] and `sink` [N]."""
    share = torch.sigmoid(lse - sink.to(lse.dtype).reshape(-1, 1, 1))
    return (y * share).to(y.dtype)
