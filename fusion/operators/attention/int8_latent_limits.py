"""Limits of npu_fused_infer_attention_score_v2 on int8 queries over an int8 latent.

Sources are the page of op-plugin (MLA, full quantisation) and the checks of the kernel of A2 and A3 in ops-transformer,
incre_flash_attention_tiling: int8 is read only from pages in NZ.
"""

from __future__ import annotations

from fusion.operators.attention.layouts import in_layouts
from fusion.operators.limits import Limit

SCALES = ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value")
FLOAT_QUERIES = Limit("dtype(query) != 'int8'")
_INT8 = "query_quant_mode == 3"
_BATCHED = in_layouts("BSH", "BSND", "BNSD")
_LINES = "the kernel reads int8 from pages in lines of NZ alone, [blocks, heads · D / 32, size, 32]"
_ROWS = {"BSH": "B, S, num_query_heads", "BSND": "B, S, N", "BNSD": "B, N, S", "TND": "Tq, N", "NTD": "N, Tq"}
"""Layout of the query -> shape of the scales of its tokens and heads."""

INT8_HOST = (
    Limit("query_quant_mode in (0, 3)", because="the other modes are for floats of 8 bits"),
    Limit("key_quant_mode == 0 and value_quant_mode == 0", when=_INT8, because="keys have one scale"),
    *(Limit(f"given({name})", when=_INT8) for name in SCALES),
    Limit("not given(dequant_scale_query)", when="query_quant_mode == 0"),
    Limit("dtype(query) == 'int8' and dtype(key) == 'int8' and dtype(value) == 'int8'", when=_INT8),
    Limit(FLOAT_QUERIES.text, when="query_quant_mode == 0"),
    Limit(
        "given(query_rope)",
        when=_INT8,
        because="only attention over a latent, with rotated lanes apart, takes int8 queries",
    ),
    *(
        Limit(f"shape(dequant_scale_query) == ({rows})", when=f"{_INT8} and {in_layouts(layout)}")
        for layout, rows in _ROWS.items()
    ),
    Limit("shape(dequant_scale_key) == (1,)", when=_INT8),
    Limit("shape(dequant_scale_value) == (1,)", when=_INT8),
)
INT8_KERNEL = (
    *(Limit(f"dtype({name}) == 'float32'", when=_INT8) for name in SCALES[1:]),
    Limit("input_layout in ('BSH', 'BSND', 'TND', 'BSH_NBSD', 'BSND_NBSD', 'TND_NTD')", when=_INT8),
    Limit("dtype(query_rope) == 'bfloat16' and dtype(key_rope) == 'bfloat16'", when=_INT8),
    Limit("given(block_table) and rank(key) == 5", when=_INT8, because=_LINES),
    Limit("C * L == 512 and L == 32", when=f"{_INT8} and rank(key) == 5", because="a line of NZ holds 32 int8"),
    Limit("Cr * Lr == 64 and Lr == 16", when=f"{_INT8} and rank(key) == 5", because="a line of NZ holds 16 floats"),
    Limit("block_size == 128", when=_INT8),
    Limit("sparse_mode in (0, 3)", when=_INT8),
    Limit("not return_softmax_lse", when=_INT8, because="of int8 queries no log-sum-exp is documented"),
    Limit("not given(atten_mask)", when=f"{_INT8} and sparse_mode == 0"),
    Limit("sparse_mode == 0", when=f"{_INT8} and {_BATCHED} and S == 1", because="one query sees all keys"),
    Limit("sparse_mode == 3", when=f"{_INT8} and {_BATCHED} and S > 1", because="several queries are in line"),
    Limit("S <= 16", when=f"{_INT8} and {_BATCHED}"),
)
