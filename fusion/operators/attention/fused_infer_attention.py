"""Softmax attention for inference: out = softmax(scale · (q kᵀ + q_rope k_ropeᵀ) + bias, masked) v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import hint
from fusion.operators.attention import fused_infer_attention_limits as limits
from fusion.operators.attention.int8_latent_limits import SCALES
from fusion.operators.attention.int8_numbers import Grid, Int8Result, both_grids, int8_result
from fusion.operators.attention.layouts import (
    heads_first,
    is_packed,
    laid_out,
    lse_shape,
    output_shape,
    paged_heads,
    sizes_of,
    value_width,
)
from fusion.operators.attention.softmax import Visible, fused_softmax, written_softmax
from fusion.operators.attention.visibility import Band, Lengths, visible
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import INT64, compute_dtype
from fusion.operators.flops import causal, longest, number_of, scores
from fusion.operators.operator import Operator, in_tensors


@dataclass(frozen=True)
class Prefix:
    """Shared prefix: keys and values of one sequence, of which the first `length`, or all, precede every sequence."""

    key: Tensor
    value: Tensor
    length: int | None


@dataclass(frozen=True)
class Attention:
    """Arguments of one call of softmax attention, the same for all operators that compute it."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    heads: int
    kv_heads: int
    scale: float
    band: Band
    lengths: tuple[Lengths, Lengths]
    table: Tensor | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    lse: bool = False
    scales: tuple[Tensor, Tensor, Tensor] | None = None
    """Scales of int8 queries, one per token and head in the order of the layout, of all keys [1] and all values [1]."""
    antiquant: tuple[Grid, Grid] | None = None
    """Scales and offsets of an int8 cache: of keys, and of values."""
    padding: tuple[Tensor | None, Tensor | None] = (None, None)
    """Number of rows [1] behind the last token of each sequence, of queries and of keys; None: sequences begin in the
    first row."""
    prefix: Prefix | None = None
    int8_result: Int8Result | None = None

    def heads_of(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Permute keys or values `x` to [B, M, T, D], gathered from pages if the call has a block table.

        `before`, the keys or values of the shared prefix, is put in front of those of every sequence.
        """
        if self.table is not None:
            return paged_heads(x, self.layout, self.kv_heads, self.table)
        own = heads_first(x, self.layout, self.kv_heads)
        if before is None or self.prefix is None:
            return own
        first = heads_first(before, self.layout, self.kv_heads)[:, :, : self.prefix.length]
        return torch.cat((first.expand(own.shape[0], -1, -1, -1), own), dim=2)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, M, T, D], those of the shared prefix included."""
        before = (None, None) if self.prefix is None else (self.prefix.key, self.prefix.value)
        return self.heads_of(self.key, before[0]), self.heads_of(self.value, before[1])

    def all_lengths(self, keys: Tensor) -> tuple[Lengths, Lengths]:
        """Return the lengths of the queries, and of the keys, as `visible` takes them; either may be None.

        `keys` [B, M, T, D] are all keys of the call. The lengths of the keys include the shared prefix.
        """
        query_lengths, key_lengths = self.lengths
        if self.prefix is None or key_lengths is None:
            return query_lengths, key_lengths
        more = keys.shape[2] - heads_first(self.key, self.layout, self.kv_heads).shape[2]
        if isinstance(key_lengths, Tensor):
            return query_lengths, key_lengths + more
        return query_lengths, [each + more for each in key_lengths]


def computed(call: Attention) -> tuple[Tensor, Tensor]:
    """Compute `call`: the output in its layout, and the log-sum-exp in float32 or wider, an empty tensor [0] unless
    `call.lse`.
    """
    query = heads_first(call.query, call.layout, call.heads)
    key, value = call.keys_and_values()
    if call.antiquant is not None:
        key, value = (grid.dequantised(x, query) for grid, x in zip(call.antiquant, (key, value), strict=True))
        query = query.to(key.dtype)
    pairs = [(query, key)]
    if call.query_rope is not None and call.key_rope is not None:
        pairs.append((heads_first(call.query_rope, call.layout, call.heads), call.heads_of(call.key_rope)))
    seen = visible(
        query, key, call.all_lengths(key), call.band,
        packed=is_packed(call.layout), table=call.table, padding=call.padding,
    )  # fmt: skip
    if call.scales is not None:
        pairs, value = _scaled(call, pairs, value)
    out, lse = _attended(call, pairs, value, seen)
    out = out.to(_result_dtype(call)) if call.int8_result is None else call.int8_result.quantised(out)
    return laid_out(out, call.layout), lse


def _scaled(
    call: Attention, pairs: list[tuple[Tensor, Tensor]], value: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Multiply the queries of all `pairs` of queries and keys by the scales of int8 queries and keys, and `value` by
    its own.

    Nothing is rounded. The last of `pairs` are the rotated queries, which the scales multiply as well.
    """
    assert call.scales is not None
    query_scale, key_scale, value_scale = call.scales
    merged = call.layout.startswith("BSH")
    tokens = heads_first(query_scale if merged else query_scale.unsqueeze(-1), call.layout, call.heads) * key_scale
    wide = torch.promote_types(compute_dtype(pairs[-1][0]), tokens.dtype)
    return [(q.to(wide) * tokens, k) for q, k in pairs], value.to(wide) * value_scale


def _result_dtype(call: Attention) -> torch.dtype:
    """Return the dtype of the output: int8 if it is quantised, that of `query_rope` for int8 queries, else that of the
    query."""
    if call.int8_result is not None:
        return torch.int8
    rotated = call.scales is not None and call.query_rope is not None
    return call.query_rope.dtype if rotated and call.query_rope is not None else call.query.dtype


def _attended(
    call: Attention, pairs: list[tuple[Tensor, Tensor]], value: Tensor, seen: Visible
) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp ([0] unless `call.lse`) of the queries and keys in `pairs`, with `seen` as the
    mask.

    By torch's fused kernel if it takes the call, else in primitive ops.
    """
    (query, key), *more = pairs
    plain = not more and call.sink is None and call.bias is None and not call.lse
    if plain and key.shape[-1] == value.shape[-1]:
        return fused_softmax(query, key, value, seen, call.scale), query.new_empty([0], dtype=torch.float32)
    out, lse = written_softmax(pairs, value, seen, call.scale, call.sink, call.bias)
    if not call.lse:
        return out, query.new_empty([0], dtype=torch.float32)
    lse = lse[0].transpose(0, 1) if is_packed(call.layout) else lse
    return out, lse.contiguous()


def empty_results(call: Attention) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes and dtypes of the results of `computed`."""
    width = value_width(call.value, call.layout, call.kv_heads, call.table is not None)
    out = call.query.new_empty(output_shape(call.query, call.layout, call.heads, width), dtype=_result_dtype(call))
    sizes = lse_shape(call.query, call.layout, call.heads) if call.lse else [0]
    stored = call.query.dtype if call.int8_result is not None else _result_dtype(call)
    wide = torch.promote_types(stored, torch.float32) if call.lse else torch.float32
    return out, call.query.new_empty(sizes, dtype=wide)


def flops_of(call: Attention) -> float:
    """Estimate the operations of `call` over the keys that its sparse mode lets a query see.

    Packed sequences are taken as equally long. Where lengths are in a tensor, whose numbers are unknown, every sequence
    is taken to have as many keys as there is room for.
    """
    batch, heads, rows, width = sizes_of(call.query, call.layout, call.heads)
    query_lengths, key_lengths = call.lengths
    packed = is_packed(call.layout)
    sequences = number_of(query_lengths) if packed and query_lengths is not None else 1
    if call.table is not None:
        keys = longest(key_lengths, call.table.shape[1] * call.key.shape[1 if call.key.dim() == 3 else -2])
    else:
        room = hint(sizes_of(call.key, call.layout, call.kv_heads)[2])
        keys = room // sequences if packed else longest(key_lengths, room)
    seen = float(keys)
    if call.band.mode in (2, 3, 4):
        own = hint(rows) // sequences
        seen = min(causal(own, min(own, keys) if call.band.mode == 2 else keys), float(call.band.before) + 1)
    values = value_width(call.value, call.layout, call.kv_heads, call.table is not None)
    rope = 0 if call.query_rope is None else call.query_rope.shape[-1] // (heads if call.query_rope.dim() == 3 else 1)
    return scores(hint(batch) * hint(rows) * hint(heads) * seen, width + rope + values)


def _grids(given: Given, names: limits.Names) -> tuple[Grid, Grid] | None:
    """Return the grid of int8 keys and that of int8 values; None if a call has no scales for both.

    `names` are the arguments of the version: scale, offset and mode of keys and of values, or of both in one tensor.
    """
    arguments = names.antiquant
    if arguments.joint is not None and given[arguments.joint[0]] is not None:
        scale, offset, mode = (given[name] for name in arguments.joint)
        return both_grids(scale, offset, mode)
    key, value = (
        None if given[scale] is None else Grid(given[scale], given[offset], given[mode])
        for scale, offset, mode in zip(arguments.scales, arguments.offsets, arguments.modes, strict=True)
    )
    return None if key is None or value is None else (key, value)


def _read(given: Given, names: limits.Names) -> Attention:
    heads = given[names.heads]
    scales: Any = tuple(given[name] for name in SCALES) if names.int8_queries else (None,)
    return Attention(
        *(given[name] for name in ("query", "key", "value")),
        layout=given["input_layout"],
        heads=heads,
        kv_heads=given["num_key_value_heads"] or heads,
        scale=given[names.scale],
        band=Band(given["sparse_mode"], given["atten_mask"], given["pre_tokens"], given["next_tokens"]),
        lengths=(given[names.query_lengths], given[names.key_lengths]),
        table=given["block_table"],
        query_rope=given["query_rope"],
        key_rope=given["key_rope"],
        sink=given[names.sink] if names.sink else None,
        bias=given["pse_shift"],
        lse=given[names.lse],
        scales=None if scales[0] is None else scales,
        antiquant=_grids(given, names) if scales[0] is None else None,
        padding=(given["query_padding_size"], given["kv_padding_size"]) if names.padded else (None, None),
        prefix=_prefix(given) if names.padded else None,
        int8_result=int8_result(*(given[name] for name in names.result)),
    )


def _prefix(given: Given) -> Prefix | None:
    """Return the shared prefix of a call of version 1, None if it has none."""
    key, value, lengths = (
        given[name] for name in ("key_shared_prefix", "value_shared_prefix", "actual_shared_prefix_len")
    )
    return None if key is None else Prefix(key, value, None if lengths is None else lengths[0])


_V2_SCHEMA = (
    "npu::npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, "
    "Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, "
    "SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None, "
    "Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None, "
    "Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None, "
    "Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, "
    "int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1., int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int sparse_mode=0, int block_size=0, '
    "int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0, "
    "bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None, "
    "int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None, "
    "int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, int? dequant_scale_key_dtype=None, "
    "int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) "
    "-> (Tensor, Tensor)"
)
_V1_SCHEMA = (
    "npu::npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1., int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)
_SUMMARY = (
    "out = round(softmax(scale · (q kᵀ + q_rope k_ropeᵀ) + pse_shift, masked) v), in float32; a row that sees no key "
    "is 0; no page says what becomes of infinite numbers in pse_shift. int8 keys and values beside queries in floats: "
    "(n + offset) · scale, of each channel or of all, or as modes 1, 2, 3 say. Queries and latent in int8, version 2 "
    "alone: both products times dequant_scale_query · dequant_scale_key, by which query_rope was "
    "divided before, v times dequant_scale_value; a kernel holds exp(score - largest) in steps of 1/127, which is not "
    "decomposed. An output scale gives rint(out · scale + offset) in int8. Version 1 alone: keys and values of a "
    "shared prefix stand before those of each sequence; with a padding size, sequences end so many rows before the last"
)


def _declared(schema: str, names: limits.Names) -> tuple[Operator, Operator]:
    """Declare the operator of `schema`, and its overload with lengths in int64 tensors."""
    page = schema.partition("(")[0].removeprefix("npu::")
    numbers = Operator(
        schema=schema,
        compute=lambda given: computed(_read(given, names)),
        uncomputed=names.uncomputed,
        without_effect=frozenset({"block_size", "inner_precise"}),
        outputs=lambda given: empty_results(_read(given, names)),
        dims=limits.dims(names),
        dtypes=limits.dtypes(names),
        limits=limits.limits(names),
        flops=lambda given: flops_of(_read(given, names)),
        source=f"op-plugin: torch_npu.{page}; GE: FusedInferAttentionScore",
        summary=_SUMMARY,
    )
    lengths = (names.query_lengths, names.key_lengths)
    return numbers, in_tensors(numbers, lengths, INT64, lowerings=frozenset({"torchair"}))


FUSED_INFER_ATTENTION_SCORE_V2, FUSED_INFER_ATTENTION_SCORE_V2_TENSOR_LENGTHS = _declared(_V2_SCHEMA, limits.V2)
FUSED_INFER_ATTENTION_SCORE, FUSED_INFER_ATTENTION_SCORE_TENSOR_LENGTHS = _declared(_V1_SCHEMA, limits.V1)
