"""What the kernels of npu_fused_infer_attention_score (v1 and v2) ask of a call, from the pages of op-plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion.operators.contract import Limit
from fusion.operators.dtypes import HALVES

_MASKS = frozenset({torch.bool, torch.int8, torch.uint8})
_LENGTHS = frozenset({torch.int64})
_QUERY = {"BSH": "B S H", "BSND": "B S N D", "BNSD": "B N S D", "TND": "Tq N D", "NTD": "N Tq D"}
_ROPE = {"BSH": "B S Hr", "BSND": "B S N Dr", "BNSD": "B N S Dr", "TND": "Tq N Dr", "NTD": "N Tq Dr"}
_OUTPUTS = {
    "BSH": ("", "_NBSD", "_BNSD"),
    "BSND": ("", "_NBSD", "_BNSD"),
    "BNSD": ("", "_NBSD", "_BSND"),
    "TND": ("", "_NTD"),
    "NTD": ("_TND",),
}
# A cache of pages may have another rank than the query: [pages, block, N · D], [pages, N, block, D], or fractal NZ.
_KEY = ("P Q K", "P Q U K", "P Q C U L")
_VALUE = ("P Q V", "P Q U V", "P Q Cv U L")
_KEY_ROPE = ("P Q Kr", "P Q U Kr", "P Q Cr U L")

_PACKED = "input_layout in ('TND', 'TND_NTD', 'NTD_TND')"
_BATCHED = "input_layout not in ('TND', 'TND_NTD', 'NTD_TND')"
_MERGED = "input_layout in ('BSH', 'BSH_NBSD', 'BSH_BNSD')"
_BSND = "input_layout in ('BSND', 'BSND_NBSD', 'BSND_BNSD')"
_BNSD = "input_layout in ('BNSD', 'BNSD_BSND', 'BNSD_NBSD')"
_TND = "input_layout in ('TND', 'TND_NTD')"
_NTD = "input_layout == 'NTD_TND'"


@dataclass(frozen=True)
class Names:
    """What the two versions call the same arguments, and what they have that we do not use."""

    heads: str
    scale: str
    query_lengths: str
    key_lengths: str
    lse: str
    unused: tuple[str, ...]
    sink: str | None = None


V2 = Names(
    heads="num_query_heads",
    scale="softmax_scale",
    query_lengths="actual_seq_qlen",
    key_lengths="actual_seq_kvlen",
    lse="return_softmax_lse",
    unused=(
        "pse_shift", "dequant_scale_query", "dequant_scale_key", "dequant_offset_key", "dequant_scale_value",
        "dequant_offset_value", "dequant_scale_key_rope", "quant_scale_out", "quant_offset_out", "quant_scale_p",
        "query_dtype", "key_dtype", "value_dtype", "out_dtype",
    ),
    sink="learnable_sink",
)  # fmt: skip
V1 = Names(
    heads="num_heads",
    scale="scale",
    query_lengths="actual_seq_lengths",
    key_lengths="actual_seq_lengths_kv",
    lse="softmax_lse_flag",
    unused=(
        "pse_shift", "dequant_scale1", "quant_scale1", "dequant_scale2", "quant_scale2", "quant_offset2",
        "antiquant_scale", "antiquant_offset", "key_antiquant_scale", "key_antiquant_offset", "value_antiquant_scale",
        "value_antiquant_offset", "query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix",
        "key_rope_antiquant_scale",
    ),
)  # fmt: skip


def dims(names: Names) -> Mapping[str, str]:
    """Argument -> dims: every layout of the query with every form of key and value."""
    layouts = [(given, given + to) for given, outputs in _OUTPUTS.items() for to in outputs]
    rows = [(given, name, form) for given, name in layouts for form in range(3)]
    found = {
        "query": " / ".join(f"input_layout={name}: {_QUERY[given]}" for given, name, _ in rows),
        "key": " / ".join(_KEY[form] for _, _, form in rows),
        "value": " / ".join(_VALUE[form] for _, _, form in rows),
        "query_rope": " / ".join(_ROPE[given] for given, _, _ in rows),
        "key_rope": " / ".join(_KEY_ROPE[form] for _, _, form in rows),
        "block_table": "E M",
    }
    return found | ({names.sink: "Ns"} if names.sink else {})


def dtypes(names: Names) -> Mapping[str, frozenset[torch.dtype]]:
    """Argument -> dtypes; lengths count where they are tensors."""
    found = dict.fromkeys(("query", "key", "value", "query_rope", "key_rope"), HALVES)
    lengths = dict.fromkeys((names.query_lengths, names.key_lengths), _LENGTHS)
    sink = {names.sink: frozenset({torch.bfloat16})} if names.sink else {}
    return found | lengths | sink | {"atten_mask": _MASKS, "block_table": frozenset({torch.int32})}


def limits(names: Names, *, in_tensors: bool) -> Mapping[str, tuple[Limit | str, ...]]:
    """Chip -> limits."""
    return {"host": _host(names)}


def _host(names: Names) -> tuple[Limit | str, ...]:
    """What every machine asks for: shapes that fit together, and nothing that the decomposition does not compute."""
    heads = names.heads
    return (
        *(f"not given({each})" for each in names.unused),
        f"{heads} > 0",
        f"num_key_value_heads == 0 or num_key_value_heads > 0 and {heads} % num_key_value_heads == 0",
        Limit(f"H % {heads} == 0", when=_MERGED),
        Limit(f"N == {heads}", when=f"not {_MERGED}"),
    )
