"""Dims, dtypes and limits of npu_fused_infer_attention_score (v1 and v2), from the pages of op-plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fusion.operators.attention.int8_cache_limits import CACHE, Antiquant
from fusion.operators.attention.int8_latent_limits import FLOAT_QUERIES, INT8_HOST, INT8_KERNEL
from fusion.operators.attention.layouts import LAYOUTS, in_layouts
from fusion.operators.attention.visibility import mask_limits
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, HALVES, INT8, INT32, INT64
from fusion.operators.encodings import STORED
from fusion.operators.limits import A2_A3, Limit

_MASKS = frozenset({torch.bool, torch.int8, torch.uint8})
_QUERY = {"BSH": "B S H", "BSND": "B S N D", "BNSD": "B N S D", "TND": "Tq N D", "NTD": "N Tq D"}
_ROPE = {"BSH": "B S Hr", "BSND": "B S N Dr", "BNSD": "B N S Dr", "TND": "Tq N Dr", "NTD": "N Tq Dr"}
# A paged cache may have another rank than the query: [pages, block, N · D], [pages, N, block, D], or fractal NZ.
_KEY = ("P Q K", "P Q U K", "P Q C U L")
_VALUE = ("P Q V", "P Q U V", "P Q Cv U L")
_KEY_ROPE = ("P Q Kr", "P Q U Kr", "P Q Cr U Lr")

_PACKED, _BATCHED = in_layouts("TND", "NTD"), in_layouts("BSH", "BSND", "BNSD")
_MERGED, _BSND, _BNSD, _TND, _NTD = map(in_layouts, ("BSH", "BSND", "BNSD", "TND", "NTD"))
_HEADS_JOINED = f"({_MERGED} or given(block_table))"
"""True if keys and values of rank 3 have the lanes of all heads in one dim."""
_BIAS = "given(pse_shift)"
_MASKED = "given(atten_mask) and sparse_mode in (0, 1)"


@dataclass(frozen=True)
class Names:
    """Names of the arguments of one version of the operator, and the arguments that are not computed."""

    heads: str
    scale: str
    query_lengths: str
    key_lengths: str
    lse: str
    antiquant: Antiquant
    result: tuple[str, str]
    """Scale and offset of an int8 result."""
    uncomputed: Mapping[str, str]
    padded: bool = False
    """Return True if the version has padding sizes, which right-align sequences in their rows, and a shared prefix of
    keys.
    """
    sink: str | None = None
    int8_queries: bool = False
    """Return True if the version takes int8 queries over an int8 latent."""


V2 = Names(
    heads="num_query_heads",
    scale="softmax_scale",
    query_lengths="actual_seq_qlen",
    key_lengths="actual_seq_kvlen",
    lse="return_softmax_lse",
    antiquant=Antiquant(
        ("dequant_scale_key", "dequant_scale_value"), ("dequant_offset_key", "dequant_offset_value"),
        ("key_quant_mode", "value_quant_mode"),
    ),
    result=("quant_scale_out", "quant_offset_out"),
    uncomputed={
        "dequant_scale_key_rope quant_scale_p": "they are for floats of 8 bits",
        "query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype "
        "value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype "
        "dequant_scale_key_rope_dtype out_dtype": "formats of 8 and 4 bits are not decomposed",
    },
    sink="learnable_sink",
    int8_queries=True,
)  # fmt: skip
V1 = Names(
    heads="num_heads",
    scale="scale",
    query_lengths="actual_seq_lengths",
    key_lengths="actual_seq_lengths_kv",
    lse="softmax_lse_flag",
    antiquant=Antiquant(
        ("key_antiquant_scale", "value_antiquant_scale"), ("key_antiquant_offset", "value_antiquant_offset"),
        ("key_antiquant_mode", "value_antiquant_mode"),
        joint=("antiquant_scale", "antiquant_offset", "antiquant_mode"),
    ),
    result=("quant_scale2", "quant_offset2"),
    uncomputed={
        "dequant_scale1 quant_scale1 dequant_scale2": "queries in int8 are not decomposed",
        "key_rope_antiquant_scale": "it is reserved",
    },
    padded=True,
)  # fmt: skip


def dims(names: Names) -> Mapping[str, str]:
    """Return argument -> dims, with an alternative for each layout of the query and each form of keys and values."""
    layouts = [(given, name) for name, (given, _) in LAYOUTS.items() if given in _QUERY]
    rows = [(given, name, form) for given, name in layouts for form in range(3)]
    declared = {
        "query": " / ".join(f"input_layout={name}: {_QUERY[given]}" for given, name, _ in rows),
        "key": " / ".join(_KEY[form] for _, _, form in rows),
        "value": " / ".join(_VALUE[form] for _, _, form in rows),
        "query_rope": " / ".join(_ROPE[given] for given, _, _ in rows),
        "key_rope": " / ".join(_KEY_ROPE[form] for _, _, form in rows),
        "block_table": "E M",
        "pse_shift": "Bp Np Sp Tp",
    }
    return declared | ({names.sink: "Ns"} if names.sink else {})


def dtypes(names: Names) -> Mapping[str, frozenset[torch.dtype]]:
    """Return argument -> dtypes; those of the lengths are for the overload in which these are tensors."""
    accepted = {"query": HALVES | INT8 if names.int8_queries else HALVES}
    accepted |= dict.fromkeys(("key", "value"), HALVES | frozenset(STORED))
    accepted |= dict.fromkeys(("query_rope", "key_rope", "pse_shift", *names.antiquant.offsets), HALVES)
    accepted |= dict.fromkeys(names.antiquant.scales, HALVES | FLOAT32)
    accepted |= {"dequant_scale_query": FLOAT32} if names.int8_queries else {}
    lengths = dict.fromkeys((names.query_lengths, names.key_lengths), INT64)
    sink = {names.sink: BFLOAT16} if names.sink else {}
    return accepted | lengths | sink | {"atten_mask": _MASKS, "block_table": INT32}


def limits(names: Names) -> Mapping[str, tuple[Limit | str, ...]]:
    """Return chip -> limits; of Ascend 950 those of version 2 on a cache of float8 alone are declared."""
    unasked = tuple(Limit(f"not given({name})", because=NO_RULE) for name in _without_rule(names))
    a2 = (*unasked, *_kernel(names), *_ONE_QUERY, *_PAGES, *_packed(names), *_latent(names), *_BIASED)
    a2 = (*a2, *names.antiquant.kernel(names.lse, names.query_lengths), *(INT8_KERNEL if names.int8_queries else ()))
    queries = INT8_HOST if names.int8_queries else (FLOAT_QUERIES,)
    cache = names.antiquant.host(" and query_quant_mode == 0" if names.int8_queries else "")
    host = (*_host(names), *queries, *cache)
    shared = (*unasked, *_kernel(names), *_ONE_QUERY, *_PAGES, *_BIASED, *names.antiquant.float8(names.lse))
    return {"host": host, **dict.fromkeys(A2_A3, a2)} | ({"ascend950": shared} if names.int8_queries else {})


def _host(names: Names) -> tuple[Limit | str, ...]:
    """Return the limits of every machine: shapes agree, and the decomposition computes all modes of the call."""
    heads, query_lengths, key_lengths = names.heads, names.query_lengths, names.key_lengths
    shared = f"(num_key_value_heads == 0 and {{0}} == {heads} or {{0}} == num_key_value_heads)"
    sink = () if names.sink is None else (
        Limit(f"Ns == {heads}", when="given(learnable_sink)"),
        Limit(f"not {names.lse}", when="given(learnable_sink)", because="whether it counts the sink is not documented"),
    )  # fmt: skip
    return (
        f"{heads} > 0",
        f"num_key_value_heads == 0 or num_key_value_heads > 0 and {heads} % num_key_value_heads == 0",
        "sparse_mode in (0, 1, 2, 3, 4)",
        Limit(f"H % {heads} == 0", when=_MERGED),
        Limit(f"N == {heads}", when=f"not {_MERGED}"),
        Limit("given(key_rope)", when="given(query_rope)"),
        Limit("given(query_rope)", when="given(key_rope)"),
        Limit("given(atten_mask)", when="sparse_mode == 1"),
        Limit("not given(atten_mask)", when=f"{_PACKED} and sparse_mode in (0, 1)"),
        Limit(f"given({query_lengths}) and given({key_lengths})", when=_PACKED),
        *(
            Limit(f"length({lengths}) == 1 or length({lengths}) >= B", when=f"given({lengths}) and {_BATCHED}")
            for lengths in (query_lengths, key_lengths)
        ),
        Limit(f"length({query_lengths}) == length({key_lengths})", when=_PACKED),
        Limit("rank(key) == rank(query)", when="not given(block_table)"),
        Limit("P == B", when=f"not given(block_table) and {_BATCHED}"),
        Limit(shared.format("U"), when=f"not given(block_table) and {_BSND}"),
        Limit(shared.format("Q"), when="rank(key) >= 4 and " + f"(given(block_table) or {_BNSD})"),
        Limit(shared.format("Q"), when=f"not given(block_table) and {_TND}"),
        Limit(shared.format("P"), when=f"not given(block_table) and {_NTD}"),
        Limit(f"given({key_lengths})", when="given(block_table)"),
        Limit("E == B", when=f"given(block_table) and {_BATCHED}"),
        Limit(f"E == length({key_lengths})", when=f"given(block_table) and {_PACKED}"),
        Limit("Q == block_size", when="given(block_table) and rank(key) == 3"),
        Limit("U == block_size", when="given(block_table) and rank(key) >= 4"),
        *_width_limits(names),
        *mask_limits(
            _MASKED,
            ("Q", f"not given(block_table) and not {_BNSD}"),
            ("U", f"not given(block_table) and {_BNSD}"),
            ("M * block_size", "given(block_table)"),
        ),
        *_bias_limits(names),
        *_result_limits(names),
        *(_padding_limits(names) if names.padded else ()),
        *(_prefix_limits() if names.padded else ()),
        *sink,
    )


def _width_limits(names: Names) -> Iterator[Limit]:
    """Yield the limits that keys and rotated keys have the head dim of queries, and that heads divide the values."""
    heads = names.heads
    joined = f"num_key_value_heads == 0 and {{0}} == {heads} * {{1}} or {{0}} == num_key_value_heads * {{1}}"
    rows = f"not {_MERGED} and (rank(key) == 4 or not given(block_table))"
    for rope, given in (("", ""), ("r", " and given(query_rope)")):
        width, merged = f"D{rope}", f"H{rope} // {heads}"
        yield Limit(f"K{rope} == {width}", when=rows + given)
        yield Limit(f"K{rope} == {merged}", when=f"{_MERGED} and rank(key) == 4{given}")
        yield Limit(
            joined.format(f"K{rope}", width), when=f"not {_MERGED} and given(block_table) and rank(key) == 3{given}"
        )
        yield Limit(joined.format(f"K{rope}", f"({merged})"), when=f"{_MERGED} and rank(key) == 3{given}")
        yield Limit(f"C{rope} * L{rope} == {width}", when=f"not {_MERGED} and rank(key) == 5{given}")
        yield Limit(f"C{rope} * L{rope} == {merged}", when=f"{_MERGED} and rank(key) == 5{given}")
    yield Limit(f"Hr % {heads} == 0", when=f"{_MERGED} and given(query_rope)")
    several = f"rank(key) == 3 and {_HEADS_JOINED}"
    yield Limit(f"V % {heads} == 0", when=f"{several} and num_key_value_heads == 0")
    yield Limit("V % num_key_value_heads == 0", when=f"{several} and num_key_value_heads > 0")


NO_RULE = "no rule needs it, and what kernels ask for is not declared"
_PADDED = ("query_padding_size", "kv_padding_size")
_PREFIX = ("key_shared_prefix", "value_shared_prefix")


def _without_rule(names: Names) -> tuple[str, ...]:
    """Return the arguments that no rule of the pass ever sets.

    Arguments that are legal only beside one of them, such as an offset beside its scale, are left out.
    """
    joint = () if names.antiquant.joint is None else names.antiquant.joint[:1]
    return (names.result[0], *joint, *((*_PADDED, _PREFIX[0]) if names.padded else ()))


def _result_limits(names: Names) -> tuple[Limit, ...]:
    """Return limits on scale and offset of an int8 result: one number, or one per head and channel of the values."""
    scale, offset = names.result
    given, joined = f"given({scale})", f"rank(key) == 3 and {_HEADS_JOINED}"
    floats = (Limit(f"not {given}", when="query_quant_mode == 3", because="the page has no such result"),)
    channels = (
        (f"{names.heads} * V", f"rank(key) < 5 and not ({joined})"),
        (f"{names.heads} * Cv * L", "rank(key) == 5"),
        ("V", f"{joined} and num_key_value_heads == 0"),
        (f"V // num_key_value_heads * {names.heads}", f"{joined} and num_key_value_heads > 0"),
    )
    return (
        Limit(given, when=f"given({offset})", because="it is added to what the scale gives"),
        Limit(f"shape({offset}) == shape({scale})", when=f"given({offset})"),
        *(Limit(f"numel({scale}) in (1, {count})", when=f"{given} and {form}") for count, form in channels),
        *(floats if names.int8_queries else ()),
    )


def _padding_limits(names: Names) -> tuple[Limit, ...]:
    """Return limits on padding sizes: they need lengths, and exclude masks and biases of the call, because no page says
    how the rows of these are aligned."""
    limits = (
        Limit(text, when=f"given({padding})", because=because)
        for padding, lengths in zip(_PADDED, (names.query_lengths, names.key_lengths), strict=True)
        for text, because in (
            (f"given({lengths})", "without lengths, sequences begin in the first row"),
            (f"numel({padding}) == 1", ""),
            (_BATCHED, "packed sequences have no rows between them"),
            ("not given(block_table) and not given(key_shared_prefix)", "the page has none of them beside it"),
            ("not given(pse_shift)", "no page says to which rows biases belong"),
            ("not given(atten_mask) or sparse_mode in (2, 3, 4)", "no page says to which rows masks belong"),
        )
    )
    return *limits, Limit("S > 1", when="given(query_padding_size)", because="it is read for several queries alone")


def _prefix_limits() -> tuple[Limit, ...]:
    """Return limits on the shared prefix: keys and values of one sequence, in the layout and dims of the others."""
    key, value = _PREFIX
    given = f"given({key})"
    return (
        Limit(f"given({value})", when=given),
        Limit(given, when=f"given({value}) or given(actual_shared_prefix_len)"),
        Limit("length(actual_shared_prefix_len) == 1", when="given(actual_shared_prefix_len)"),
        Limit(_BATCHED, when=given),
        Limit("not given(block_table) and not given(query_rope)", when=given, because="the page has none beside it"),
        Limit(f"not ({CACHE})", when=given, because="stored keys before others are not decomposed"),
        *(
            Limit(text.format(prefix, name), when=f"{given} and {when}" if when else given)
            for prefix, name in zip(_PREFIX, ("key", "value"), strict=True)
            for text, when in (
                ("rank({0}) == rank({1}) and size({0}, 0) == 1 and size({0}, -1) == size({1}, -1)", ""),
                ("size({0}, 1) == size({1}, 1)", _BNSD),
                ("size({0}, 2) == size({1}, 2)", _BSND),
            )
        ),
        Limit(f"shape({value}) == shape({key})", when=f"{given} and shape(key) == shape(value)"),
        *(
            Limit(f"{columns} >= size(key_shared_prefix, {dim}) + {keys}", when=f"{given} and {when} and {layout}")
            for columns, when in (("size(atten_mask, -1)", _MASKED), ("Tp", _BIAS))
            for dim, keys, layout in ((2, "U", _BNSD), (1, "Q", f"not {_BNSD}"))
        ),
    )


def _bias_limits(names: Names) -> tuple[Limit, ...]:
    """Return limits on the bias `pse_shift` [1 or B, heads, >= S, >= T]; elements beyond S and T are not read."""
    return (
        Limit(_BATCHED, when=_BIAS, because="packed sequences take no bias"),
        Limit(f"Np == {names.heads}", when=_BIAS),
        Limit("Bp == 1 or Bp == B", when=_BIAS),
        Limit("Sp >= S", when=_BIAS),
        Limit("Tp >= U", when=f"{_BIAS} and not given(block_table) and {_BNSD}"),
        Limit("Tp >= Q", when=f"{_BIAS} and not given(block_table) and not {_BNSD}"),
        Limit("Tp >= M * block_size", when=f"{_BIAS} and given(block_table)"),
        Limit(f"not {names.lse}", when=_BIAS, because="whether it counts the bias is not documented"),
    )


_BIASED = (
    Limit("dtype(pse_shift) == dtype(query)", when=_BIAS),
    Limit("Sp == 1", when=f"{_BIAS} and S == 1"),
    Limit("not given(query_rope)", when=_BIAS),
)
"""Limits of the kernels on a bias (aclnnFusedInferAttentionScoreV4: pseShift, and the tiling of both kernels).

All kernels multiply scores by the scale before they add the bias, though the design notes say that they scale the sum.
"""

_PLAIN = "not given(query_rope)"
_HEAD = "D is the width of a head"
_WIDTHS = ((_MERGED, "H // {0}"), (f"not {_MERGED}", "D"))
"""Pairs of a condition on calls, and of the head dim in such calls for {0} heads."""


def _kernel(names: Names) -> tuple[Limit | str, ...]:
    """Return the limits of the kernels on dtypes, heads, head dims and masks."""
    heads = names.heads
    return (
        *(Limit(f"dtype({name}) == dtype(query)", when=f"not ({CACHE})") for name in ("key", "value")),
        f"{heads} <= 256",
        Limit(f"{heads} <= 64 * num_key_value_heads", when=f"num_key_value_heads > 0 and {_PLAIN}"),
        Limit("B <= 65536", when=_BATCHED),
        *(
            Limit(f"{width} % 16 == 0 and {width} <= 512".format(heads), when=when, because=_HEAD)
            for when, width in _WIDTHS
        ),
        Limit("shape(key) == shape(value)", when=_BATCHED),
        Limit("given(atten_mask)", when="sparse_mode in (2, 3, 4)"),
        Limit(
            "size(atten_mask, -1) == 2048 and size(atten_mask, -2) == 2048",
            when="sparse_mode in (2, 3, 4)",
            because="these modes take one fixed mask, triu(ones(2048, 2048), 1)",
        ),
        Limit(
            "rank(atten_mask) > 2",
            when=f"{_MASKED} and (given(query_rope) or input_layout not in ('BSH', 'BSND', 'BNSD', 'BNSD_BSND'))",
        ),
        Limit("size(atten_mask, 0) == S", when=f"{_MASKED} and rank(atten_mask) == 2 and S > 1"),
    )


_ALONE = "with one query the kernel ignores this"
_UNLIMITED = "pre_tokens >= 2147483647 and next_tokens >= 2147483647"
_ONE_QUERY = (
    Limit("S > 1", when="input_layout == 'BNSD_BSND'"),
    Limit("1 < S and S <= 16", when="input_layout in ('BSH_NBSD', 'BSND_NBSD', 'BNSD_NBSD')"),
    Limit("sparse_mode in (0, 1, 3)", when=f"{_BATCHED} and {_PLAIN} and S == 1", because=_ALONE),
    Limit(_UNLIMITED, when=f"{_BATCHED} and S == 1 and sparse_mode == 0 and given(atten_mask)", because=_ALONE),
    Limit("inner_precise in (0, 1)", when=f"{_BATCHED} and S == 1"),
    "inner_precise in (0, 1, 2, 3)",
)
"""Limits by the number of queries: calls with one query per sequence run another kernel than those with more."""

_PAGED = "given(block_table)"
_PAGE = "block_size is the number of positions of a page; allocate the cache in pages of such a size"
_NZ = "fractal NZ caches are for latents and for int8 keys"
_PAGES = (
    Limit(
        "block_size % 16 == 0 and block_size <= 512",
        when=f"{_PAGED} and {_BATCHED} and {_PLAIN} and S == 1",
        because=_PAGE,
    ),
    Limit(
        "block_size % 128 == 0 and 0 < block_size and block_size <= 512",
        when=f"{_PAGED} and {_BATCHED} and {_PLAIN} and S > 1",
        because=f"several queries of a sequence; {_PAGE}",
    ),
    Limit(
        "block_size % 16 == 0 and block_size <= 1024",
        when=f"{_PAGED} and ({_PACKED} or given(query_rope))",
        because=f"{_PAGE}; a cache without a block table is one page for each sequence, of all its positions",
    ),
    Limit(
        "rank(key) == 3 or rank(key) == 5",
        when=f"{_PAGED} and not {_BNSD} and not {_PACKED} and {_PLAIN}",
        because="pages are [blocks, block_size, key heads · D], or in NZ [blocks, key heads, D / 16, block_size, 16]",
    ),
    Limit("rank(key) < 5", when=f"{_PAGED} and {_PLAIN} and not ({CACHE})", because=_NZ),
    Limit("K <= 65535", when=f"{_PAGED} and rank(key) == 3"),
)
"""Limits of the kernels on paged caches."""


def _packed(names: Names) -> tuple[Limit | str, ...]:
    """Return the limits of the kernels on packed sequences."""
    plain = f"{_PACKED} and {_PLAIN}"
    alike = f"num_key_value_heads == 0 or num_key_value_heads == {names.heads}"
    sink, narrow = "given(learnable_sink)", f"{alike} or given(learnable_sink)" if names.sink else alike
    sinks = () if names.sink is None else (
        Limit("input_layout in ('TND', 'NTD_TND') and D <= 128", when=sink),
        Limit(_PLAIN, when=sink),
    )  # fmt: skip
    return (
        Limit(f"length({names.query_lengths}) <= 4096", when=_PACKED),
        Limit("sparse_mode in (0, 3, 4)", when=_PACKED),
        Limit("input_layout in ('TND', 'NTD_TND')", when=plain),
        Limit(f"D in (128, 192) or D == 64 and ({narrow})", when=plain, because="head dims of packed sequences"),
        Limit("K == D and V == D", when=f"{plain} and not given(block_table) and D != 192"),
        Limit("K == D and V in (128, 192)", when=f"{plain} and not given(block_table) and D == 192"),
        Limit(f"V == 128 or {alike}", when=f"{plain} and not given(block_table) and D == 192"),
        Limit("V == 128", when=f"{plain} and not given(block_table) and D == 192 and {_NTD}"),
        Limit(
            "rank(key) == 3",
            when=f"{plain} and given(block_table) and ({alike})",
            because="beside packed queries with as many key heads, pages are [blocks, block_size, key heads · D]",
        ),
        Limit("inner_precise in (0, 1)", when=f"{plain} and dtype(query) == 'float16'"),
        Limit("inner_precise == 0", when=f"{plain} and dtype(query) == 'bfloat16'"),
        *sinks,
    )


_LATENT = "beside rotated lanes, a latent has 512 lanes, and a head that is expanded from it 128"
_SUMS = "serving code takes log-sum-exps over a latent in these layouts alone"


def _latent(names: Names) -> tuple[Limit | str, ...]:
    """Return the limits of the kernels on calls with separate rotated lanes, as latent attention makes them: head dim
    512 if absorbed, 128 if not."""
    heads, rope = names.heads, "given(query_rope)"
    by_width: list[Limit | str] = []
    for when, text in _WIDTHS:
        width = text.format(heads)
        by_width.append(Limit(f"{width} in (128, 512)", when=f"{rope} and {when}", because=_LATENT))
        absorbed = f"{rope} and {when} and {width} == 512"
        by_width.append(Limit(f"num_key_value_heads == 1 and {heads} in (1, 2, 4, 8, 16, 32, 64, 128)", when=absorbed))
        by_width.append(Limit("sparse_mode in (0, 3, 4)", when=absorbed))
        by_width.append(Limit("input_layout in ('BSND', 'BNSD')", when=f"{absorbed} and {names.lse}", because=_SUMS))
        by_width.append(Limit("input_layout in (" + _ABSORBED + ")", when=absorbed))
        split = f"{rope} and {when} and {width} == 128"
        by_width.append(Limit("input_layout in (" + _SPLIT + ")", when=split))
        by_width.append(Limit("sparse_mode in (0, 3, 4)", when=split))
        by_width.append(Limit("not given(atten_mask)", when=f"{split} and sparse_mode == 0"))
    return (
        *by_width,
        Limit(f"Hr == 64 * {heads}", when=f"{rope} and {_MERGED}"),
        Limit("Dr == 64", when=f"{rope} and not {_MERGED}"),
        Limit(
            "dtype(query_rope) == dtype(query) and dtype(key_rope) == dtype(key)",
            when=f"{rope} and dtype(query) != 'int8'",
        ),
        Limit("input_layout not in ('BSH_BNSD', 'BSND_BNSD')", when=_PLAIN),
    )


_ABSORBED = "'BSH', 'BSND', 'BNSD', 'BNSD_NBSD', 'BSND_NBSD', 'BSH_NBSD', 'TND', 'TND_NTD'"
_SPLIT = "'BSH', 'BSND', 'TND', 'BNSD', 'BSH_BNSD', 'BSND_BNSD', 'BNSD_BSND', 'NTD_TND'"
