"""What the attention operators compute, in float64, one query of one head of one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.operators.undocumented import Undocumented

UNLIMITED = 2147483647


def infer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    kv_heads: int = 0,
    scale: float = 1.0,
    layout: str = "BSH",
    mask: Tensor | None = None,
    mode: int = 0,
    before: int = UNLIMITED,
    after: int = UNLIMITED,
    query_lengths: Sequence[int] | Tensor | None = None,
    key_lengths: Sequence[int] | Tensor | None = None,
    table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    lse: bool = False,
    query_padding: Tensor | None = None,
    key_padding: Tensor | None = None,
    key_prefix: Tensor | None = None,
    value_prefix: Tensor | None = None,
    prefix_length: Sequence[int] | None = None,
    result: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    kv_heads = kv_heads or heads
    given, _, wanted = layout.partition("_")
    wanted = wanted or given
    packed = given in ("TND", "NTD")
    of_query = sequences(query, given, heads, query_lengths, query_padding)
    count, longest = len(of_query), max(len(each) for each in of_query)
    of_rope = sequences(query_rope, given, heads, query_lengths) if query_rope is not None else None

    def keys(x: Tensor, before: Tensor | None = None) -> list[Tensor]:
        if table is not None:
            return paged(x, table, kv_heads, whole(key_lengths, count))
        own = sequences(x, given, kv_heads, key_lengths, key_padding)
        if before is None:
            return own
        first = sequences(before, given, kv_heads, prefix_length)[0]
        return [torch.cat([first, each]) for each in own]

    of_key, of_value = keys(key, key_prefix), keys(value, value_prefix)
    of_key_rope = keys(key_rope) if key_rope is not None else None
    outputs, sums = [], []
    for b in range(count):
        out = torch.zeros(len(of_query[b]), heads, of_value[b].shape[-1], dtype=torch.float64)
        total = torch.full((len(of_query[b]), heads), math.inf, dtype=torch.float64)
        for i in range(len(of_query[b])):
            for h in range(heads):
                g = h // (heads // kv_heads)
                seen = [j for j in range(len(of_key[b])) if sees(mode, mask, before, after, b, i, j, of_query, of_key)]
                if not seen:
                    continue
                scores = [of_query[b][i, h] @ of_key[b][j, g] for j in seen]
                if of_rope is not None and of_key_rope is not None:
                    ropes = [of_rope[b][i, h] @ of_key_rope[b][j, g] for j in seen]
                    scores = [score + rope for score, rope in zip(scores, ropes, strict=True)]
                logits = torch.stack(scores) * scale
                if bias is not None:
                    logits = logits + bias[b if len(bias) > 1 else 0, h, i, seen]
                column = logits if sink is None else torch.cat([logits, sink[h : h + 1]])
                weights = column.softmax(0)[: len(seen)]
                out[i, h] = weights @ of_value[b][seen, g]
                total[i, h] = column.logsumexp(0)
        outputs.append(out)
        sums.append(total)
    if packed:
        joined = torch.cat(outputs) if result is None else in_int8(torch.cat(outputs), *result)
        result = joined.transpose(0, 1) if wanted == "NTD" else joined
        return result, torch.cat(sums).unsqueeze(-1) if lse else query.new_empty(0)
    size = query.shape[given.index("S")]
    assert longest <= size
    behind = 0 if query_padding is None else int(query_padding)
    filled = torch.stack([padded(out, size, 0.0, query_padding, behind) for out in outputs])  # B S N D
    log_sums = torch.stack([padded(each, size, math.inf, query_padding, behind) for each in sums])
    if result is not None:
        filled = in_int8(filled, *result)
    return arranged(filled, wanted), log_sums.transpose(1, 2).unsqueeze(-1) if lse else query.new_empty(0)


def in_int8(out: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """Numbers [.., N, D] times one scale, or that of each channel of each head, plus the offset, rounded."""
    numbers = []
    for head in range(out.shape[-2]):
        by, zero = (
            torch.zeros(1) if each is None else each.flatten() if each.numel() == 1
            else each.reshape(out.shape[-2], -1)[head]
            for each in (scale, offset)
        )  # fmt: skip
        numbers.append((out[..., head, :] * by + zero).round().clamp(-128, 127))
    return torch.stack(numbers, -2)


def sees(
    mode: int,
    mask: Tensor | None,
    before: int,
    after: int,
    b: int,
    i: int,
    j: int,
    of_query: list[Tensor],
    of_key: list[Tensor],
) -> bool:
    longer = len(of_key[b]) - len(of_query[b])
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= i + longer
    if mode == 4:
        return i + longer - before <= j <= i + longer + after
    if mask is None:
        return True
    if mode == 0 and not i - before <= j <= i + after:
        return False
    return not hidden(mask, b, i, j, len(of_query), of_query)


def hidden(mask: Tensor, b: int, i: int, j: int, batch: int, of_query: list[Tensor]) -> bool:
    if mask.dim() == 4:
        return bool(mask[b % mask.shape[0], 0, i, j])
    if mask.dim() == 3:
        return bool(mask[b % mask.shape[0], i, j])
    single = all(len(each) == 1 for each in of_query)
    return bool(mask[b, j] if single else mask[i, j])


def whole(lengths: Sequence[int] | Tensor | None, count: int) -> list[int]:
    assert lengths is not None
    numbers = [int(each) for each in lengths]
    return numbers * count if len(numbers) == 1 else numbers[:count]


def sequences(
    x: Tensor, layout: str, heads: int, lengths: Sequence[int] | Tensor | None, padding: Tensor | None = None
) -> list[Tensor]:
    """The sequences of a tensor, each [S, N, D]; with a padding, the last rows before so many others."""
    if layout in ("TND", "NTD"):
        tokens = x if layout == "TND" else x.transpose(0, 1)
        assert lengths is not None
        ends = [0, *(int(each) for each in lengths)]
        if ends[-1] < len(tokens):
            raise Undocumented("the results of tokens behind the last sequence")
        if ends != sorted(ends) or ends[-1] > len(tokens):
            raise Undocumented("ends of sequences that go back, or lie behind the last token")
        return [tokens[a:b] for a, b in pairwise(ends)]
    change: dict[str, Callable[[Tensor], Tensor]] = {
        "BSH": lambda t: t.unflatten(-1, (heads, -1)),
        "SBH": lambda t: t.transpose(0, 1).unflatten(-1, (heads, -1)),
        "BSND": lambda t: t,
        "BNSD": lambda t: t.transpose(1, 2),
    }
    found = change[layout](x)
    limits = whole(lengths, len(found)) if lengths is not None else [found.shape[1]] * len(found)
    if any(limit > found.shape[1] for limit in limits):
        raise Undocumented("more positions than there are")
    if padding is not None:
        end = found.shape[1] - int(padding)
        starts = [end - limit if limit <= end else end for limit in limits]  # of what finds no room nothing is read
        return [sequence[start:end] for sequence, start in zip(found, starts, strict=True)]
    return [sequence[:limit] for sequence, limit in zip(found, limits, strict=True)]


def paged(cache: Tensor, table: Tensor, heads: int, lengths: list[int]) -> list[Tensor]:
    """The first tokens of every sequence, each [S, N, D], token by token out of its page."""
    block = cache.shape[{3: 1, 4: 2, 5: 3}[cache.dim()]]

    def token(b: int, j: int) -> Tensor:
        page = cache[int(table[b, j // block])]
        if cache.dim() == 3:
            return page[j % block].reshape(heads, -1)
        if cache.dim() == 4:
            return page[:, j % block]
        return page[:, :, j % block].reshape(heads, -1)

    empty = cache.new_empty(0, *token(0, 0).shape)
    return [torch.stack([token(b, j) for j in range(n)]) if n else empty for b, n in enumerate(lengths)]


def padded(x: Tensor, size: int, value: float, before: Tensor | None = None, behind: int = 0) -> Tensor:
    """Rows, and others behind them, or also before them."""
    count = 0 if before is None else size - len(x) - behind
    rest = x.new_full((size - len(x), *x.shape[1:]), value)
    return torch.cat([rest[:count], x, rest[count:]])


def arranged(x: Tensor, layout: str) -> Tensor:
    """[B, S, N, D] in a layout."""
    if layout == "BSH":
        return x.flatten(-2)
    if layout == "SBH":
        return x.flatten(-2).transpose(0, 1)
    return x.permute(["BSND".index(dim) for dim in layout])


def fused_infer_v2(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    names = {
        "num_query_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "softmax_scale": "scale",
        "input_layout": "layout",
        "atten_mask": "mask",
        "sparse_mode": "mode",
        "pre_tokens": "before",
        "next_tokens": "after",
        "actual_seq_qlen": "query_lengths",
        "actual_seq_kvlen": "key_lengths",
        "block_table": "table",
        "learnable_sink": "sink",
        "pse_shift": "bias",
        "return_softmax_lse": "lse",
        "query_padding_size": "query_padding",
        "kv_padding_size": "key_padding",
        "key_shared_prefix": "key_prefix",
        "value_shared_prefix": "value_prefix",
        "actual_shared_prefix_len": "prefix_length",
    }
    scale, offset = more.pop("quant_scale_out", None), more.pop("quant_offset_out", None)
    more["result"] = None if scale is None else (scale, offset)
    ignored = {"block_size", "inner_precise", "query_quant_mode", "key_quant_mode", "value_quant_mode"}
    of_query = more.pop("dequant_scale_query", None)
    if of_query is not None:
        of_key, of_value = more.pop("dequant_scale_key"), more.pop("dequant_scale_value")
        heads = (more["num_query_heads"], -1)

        def by_token(x: Tensor) -> Tensor:
            rows = x.unflatten(-1, heads) if more["input_layout"].startswith("BSH") else x
            return (rows.double() * of_query.unsqueeze(-1)).reshape(x.shape)

        query, more["query_rope"] = by_token(query), by_token(more["query_rope"]) * of_key
        key, value = key.double() * of_key, value.double() * of_value
    elif more.get("key_quant_mode") in (1, 3):
        key, value = (_of_tokens(x, name, more) for x, name in ((key, "key"), (value, "value")))
        if "block_table" in more:  # pages in the order of their sequences, as their scales are
            more["block_table"] = torch.arange(len(key)).reshape(len(more["block_table"]), -1)
    elif key.dtype == torch.int8:
        key, value = (_of_int8(x, name, more) for x, name in ((key, "key"), (value, "value")))
    return infer_attention(query, key, value, **{names.get(n, n): v for n, v in more.items() if n not in ignored})


def _of_tokens(x: Tensor, name: str, more: dict[str, Any]) -> Tensor:
    """x · scale, token by token; pages as one sequence after the other reads them."""
    scale, offset = more.pop(f"dequant_scale_{name}"), more.pop(f"dequant_offset_{name}", None)
    table, wide = more.get("block_table"), x.double()
    numbers = wide if table is None else wide[table.long().flatten()]
    of, zero = (None if each is None else _of_rows(each, x, more) for each in (scale, offset))
    return (numbers if zero is None else numbers + zero) * of


def _of_rows(each: Tensor, x: Tensor, more: dict[str, Any]) -> Tensor:
    """Numbers of tokens as rows of keys, or as pages in the order of their sequences, have them."""
    table, heads = more.get("block_table"), more["num_key_value_heads"]
    if more["key_quant_mode"] == 1:
        each = each[0].unsqueeze(1).expand(-1, heads, -1)
    if table is None:
        before_heads = more["input_layout"].startswith("BSND")
        rows = each[..., : x.shape[1 if before_heads else 2]]
        return (rows.transpose(1, 2) if before_heads else rows).unsqueeze(-1)
    rows = each[..., : table.shape[1] * x.shape[2]].unflatten(-1, (table.shape[1], -1))
    return rows.transpose(1, 2).flatten(0, 1).unsqueeze(-1)


def _of_int8(x: Tensor, name: str, more: dict[str, Any]) -> Tensor:
    """(x + offset) · scale of keys or values, head by head."""
    scale, offset = more.pop(f"dequant_scale_{name}"), more.pop(f"dequant_offset_{name}", None)
    heads, paged = more["num_key_value_heads"], more.get("block_table") is not None
    rows = x.unflatten(-1, (heads, -1)) if x.dim() == 3 else x
    behind = rows is not x or (not paged and more["input_layout"].startswith("BSND"))
    at, out = rows.dim() - 2 if behind else 1, torch.empty(rows.shape, dtype=torch.float64)
    for h in range(heads):
        of_head = [
            torch.zeros(1) if each is None else each if each.numel() == 1 else each.reshape(heads, -1)[h]
            for each in (scale, offset)
        ]
        lines = (x.shape[2], 1, x.shape[4]) if x.dim() == 5 else (-1,)  # channels, or lines of them in NZ
        by, zero = (each if each.numel() == 1 else each.reshape(lines) for each in of_head)
        out.select(at, h).copy_((rows.select(at, h).double() + zero) * by)
    return out.reshape(x.shape)


def fused_infer_v1(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    names = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "softmax_lse_flag": "return_softmax_lse",
        "key_antiquant_scale": "dequant_scale_key",
        "value_antiquant_scale": "dequant_scale_value",
        "key_antiquant_offset": "dequant_offset_key",
        "value_antiquant_offset": "dequant_offset_value",
        "key_antiquant_mode": "key_quant_mode",
        "value_antiquant_mode": "value_quant_mode",
        "quant_scale2": "quant_scale_out",
        "quant_offset2": "quant_offset_out",
    }
    return fused_infer_v2(query, key, value, **{names.get(n, n): v for n, v in apart(more).items()})


def apart(more: dict[str, Any]) -> dict[str, Any]:
    """Scales and offsets of keys and values that are one tensor as two."""
    told = {name: each for name, each in more.items() if not name.startswith("antiquant")}
    scale, offset, mode = (more.get(f"antiquant_{name}") for name in ("scale", "offset", "mode"))
    for number, name in enumerate(("key", "value")) if scale is not None else ():
        part = slice(number, number + 1) if mode == 1 else number
        for what, each in (("scale", scale), ("offset", offset)):
            if each is not None:
                told[f"{name}_antiquant_{what}"] = each[part] if mode == 1 else each[part].reshape(-1)
        told[f"{name}_antiquant_mode"] = mode or 0
    return told


def incre(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    names = {"scale_value": "scale", "actual_seq_lengths": "actual_seq_lengths_kv"}
    told = {names.get(n, n): v for n, v in more.items()}
    return fused_infer_v1(query, key, value, sparse_mode=1 if "atten_mask" in more else 0, **told)[0]


def prompt(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    told = {"scale" if name == "scale_value" else name: each for name, each in more.items()}
    return fused_infer_v1(query, key, value, **({"next_tokens": 0} | told))[0]


def fusion(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **more: Any) -> tuple[Any, ...]:
    packed = input_layout == "TND"
    names = {"atten_mask": "mask", "sparse_mode": "mode", "pre_tockens": "before", "next_tockens": "after"}
    names |= {"actual_seq_qlen": "query_lengths", "actual_seq_kvlen": "key_lengths", "scale": "scale", "sink": "sink"}
    call = {names[name]: value for name, value in more.items()}
    width = query.shape[-1] // head_num
    merged = input_layout in ("BSH", "SBH")
    call["kv_heads"] = key.shape[-1] // width if merged else key.shape[input_layout.index("N")]
    call |= {"heads": head_num, "layout": input_layout}
    out, lse = infer_attention(query, key, value, lse=True, **call)
    if lse.isinf().any():
        raise Undocumented("the statistics of a row that sees no key")
    # The largest score is a log-sum-exp in the limit of low temperature: no other way to it than to try.
    cold = 1e6
    sharp = {**call, "scale": call["scale"] * cold}
    if "sink" in call:
        sharp["sink"] = call["sink"] * cold
    top = infer_attention(query, key, value, lse=True, **sharp)[1] / cold
    total = (lse - top).exp()
    lanes = (-1, -1, 8) if packed else (-1, -1, -1, 8)
    return out, top.expand(lanes), total.expand(lanes), query.new_empty(0)
