"""Small calls of the attention operators: every layout, sparse mode and form of cache that models use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

FULL = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)
"""The mask that sparse modes 2, 3 and 4 ask for and do not read."""
FORMS = {"BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD", "SBH": "SBH"}


FIRST = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "return_softmax_lse": "softmax_lse_flag",
    "dequant_scale_key": "key_antiquant_scale",
    "dequant_scale_value": "value_antiquant_scale",
    "dequant_offset_key": "key_antiquant_offset",
    "dequant_offset_value": "value_antiquant_offset",
    "key_quant_mode": "key_antiquant_mode",
    "value_quant_mode": "value_antiquant_mode",
    "quant_scale_out": "quant_scale2",
    "quant_offset_out": "quant_offset2",
}
"""What the first version calls the arguments of the second."""


Make = Callable[[torch.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Attend:
    """Sizes of a call; `lengths` of its sequences in query and key."""

    layout: str = "BNSD"
    b: int = 2
    n: int = 4
    m: int = 2
    s: int = 5
    t: int = 5
    d: int = 16
    dv: int = 0
    rope: int = 0
    lengths: tuple[list[int] | None, list[int] | None] = (None, None)
    block: int = 0
    form: int = 3
    mask: tuple[int, ...] = ()
    mode: int = 0
    before: int = 2147483647
    after: int = 2147483647
    sink: bool = False
    bias: tuple[int, ...] = ()
    lse: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def v2(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of npu_fused_infer_attention_score_v2."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        given = a.layout.split("_")[0]
        call: dict[str, Any] = {
            "query": placed(random(a.b, a.s, a.n, a.d, dtype=dtype), given),
            "key": keys(a, a.d, dtype),
            "value": keys(a, a.dv or a.d, dtype),
            "num_query_heads": a.n,
            "num_key_value_heads": 0 if a.m == a.n else a.m,
            "softmax_scale": a.d**-0.5,
            "input_layout": a.layout,
            "sparse_mode": a.mode,
        }
        if a.rope:
            call["query_rope"] = placed(random(a.b, a.s, a.n, a.rope, dtype=dtype), given)
            call["key_rope"] = keys(a, a.rope, dtype)
        for name, lengths in zip(("actual_seq_qlen", "actual_seq_kvlen"), a.lengths, strict=True):
            if lengths is not None:
                call[name] = lengths
        if a.block:
            call |= {"block_table": table(a), "block_size": a.block}
        if a.mask:
            mask = torch.rand(a.mask) < 0.4
            mask[..., 0, :] = True  # somebody sees nothing
            call["atten_mask"] = mask
        if a.mode in (2, 3, 4):
            call["atten_mask"] = FULL
        if a.mode in (0, 4):
            call |= {"pre_tokens": a.before, "next_tokens": a.after}
        if a.bias:
            call["pse_shift"] = random(*a.bias, dtype=dtype)
        if a.sink:
            call["learnable_sink"] = random(a.n, dtype=dtype)
        if a.lse:
            call["return_softmax_lse"] = True
        return call | a.more

    return make


def whole(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """The same with queries and a latent in int8, the rotated queries divided by their scales."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = v2(a)(dtype)
        latent = torch.randint(-127, 128, call["key"].shape, dtype=torch.int8)
        query = torch.randint(-127, 128, call["query"].shape, dtype=torch.int8)
        given, wide = a.layout.split("_")[0], torch.promote_types(dtype, torch.float32)
        rows = placed(torch.rand(a.b, a.s, a.n, 1, dtype=torch.float64) + 0.5, given).squeeze(-1).to(wide) / 100
        of_keys = torch.full((1,), 0.02, dtype=wide)
        rows = rows.reshape(a.b, a.s, a.n) if given == "BSH" else rows
        turned = call["query_rope"].unflatten(-1, (a.n, -1)) if given == "BSH" else call["query_rope"]
        turned = (turned / (rows * of_keys).unsqueeze(-1)).reshape(call["query_rope"].shape).to(dtype)
        call |= {"query": query, "key": latent, "value": latent, "query_rope": turned, "query_quant_mode": 3}
        scales = {"dequant_scale_query": rows, "dequant_scale_key": of_keys, "dequant_scale_value": of_keys.clone()}
        return call | scales

    return make


def numbers(*sizes: int, dtype: torch.dtype, around: float) -> Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    return ((torch.rand(*sizes, dtype=torch.float64) + 0.5) * around).to(wide)


def in_int8(make: Make, a: Attend, channels: bool = False, offset: bool = True) -> Make:
    """The same with a result in int8, by one number or by that of each channel of each head."""

    def made(dtype: torch.dtype) -> dict[str, Any]:
        sizes = ((a.n * a.d,) if a.layout.startswith("BSH") else (a.n, a.d)) if channels else (1,)
        call = make(dtype) | {"quant_scale_out": numbers(*sizes, dtype=dtype, around=50)}
        return call | ({"quant_offset_out": numbers(*sizes, dtype=dtype, around=9)} if offset else {})

    return made


def in_first(make: Make) -> Make:
    """A call of the second version as one of the first."""
    return lambda dtype: {FIRST.get(name, name): value for name, value in make(dtype).items()}


def left_padded(a: Attend, *sides: str) -> Make:
    """A call of the first version whose queries or keys, or both, stand at the end of their rows, before two others."""

    def made(dtype: torch.dtype) -> dict[str, Any]:
        return in_first(v2(a))(dtype) | {f"{side}_padding_size": torch.tensor([2]) for side in sides}

    return made


def behind_prefix(a: Attend, size: int = 3, length: int | None = None) -> Make:
    """A call of the first version with keys and values of a prefix, of which as many as `length` count."""

    def made(dtype: torch.dtype) -> dict[str, Any]:
        before = replace(a, b=1, t=size)
        given = {f"{name}_shared_prefix": keys(before, a.d, dtype) for name in ("key", "value")}
        return in_first(v2(a))(dtype) | given | ({} if length is None else {"actual_shared_prefix_len": [length]})

    return made


def joint_cache(a: Attend, of: str = "all", offset: bool = False) -> Make:
    """A call of the first version over int8 keys and values with their scales in one tensor."""

    def made(dtype: torch.dtype) -> dict[str, Any]:
        call, heads = cache(a, "tokens" if of == "tokens" else "channels", offset, first=True)(dtype), (a.m, a.d)
        sizes = {"all": (), "channels": (a.m, 1, a.d), "lanes": heads, "merged": (a.m * a.d,)}
        for what in ("scale", "offset") if offset else ("scale",):
            both = [call.pop(f"{name}_antiquant_{what}") for name in ("key", "value")]
            parts = [each.flatten()[0] if of == "all" else each.reshape(sizes.get(of, each.shape)) for each in both]
            call[f"antiquant_{what}"] = torch.cat(parts) if of == "tokens" else torch.stack(parts)
        del call["key_antiquant_mode"], call["value_antiquant_mode"]
        return call | ({"antiquant_mode": 1} if of == "tokens" else {})

    return made


MODES = {"tokens": 1, "heads": 2, "tokens of heads": 3}


def cache(
    a: Attend, of: str = "channels", offset: bool = False, first: bool = False
) -> Callable[[torch.dtype], dict[str, Any]]:
    """The same over int8 keys and values with scales of channels, of heads or of all; `first` by the first version."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = v2(a)(dtype)
        shapes = {"channels": (1, a.m, 1, a.d), "rows": (a.m, 1, a.d), "heads": (a.m,), "all": (1,)}
        room = blocks(a) * a.block if a.block else a.t
        shape = {"tokens": (1, a.b, room + 1), "tokens of heads": (a.b, a.m, room), **shapes}[of]
        for name in ("key", "value"):
            call[name] = torch.randint(-127, 128, call[name].shape, dtype=torch.int8)
            wide = torch.promote_types(dtype, torch.float32) if "tokens" in of else dtype
            call[f"dequant_scale_{name}"] = (torch.rand(shape, dtype=torch.float64) / 40 + 0.01).to(wide)
            if offset:
                call[f"dequant_offset_{name}"] = torch.randint(-20, 21, shape).to(dtype)
        call |= dict.fromkeys(("key_quant_mode", "value_quant_mode"), MODES.get(of, 0))
        return {FIRST.get(name, name): value for name, value in call.items()} if first else call

    return make


def v1(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of npu_fused_infer_attention_score."""
    return lambda dtype: {FIRST.get(name, name): value for name, value in v2(a)(dtype).items()}


def fusion(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of npu_fusion_attention."""
    names = {"num_query_heads": "head_num", "softmax_scale": "scale", "learnable_sink": "sink"}
    names |= {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens"}

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = {names.get(name, name): value for name, value in v2(a)(dtype).items() if name != "num_key_value_heads"}
        return call | ({"sink": call["sink"].float()} if a.sink else {})

    return make


OLDER = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale_value",
    "actual_seq_kvlen": "actual_seq_lengths",
    "quant_scale_out": "quant_scale2",
    "quant_offset_out": "quant_offset2",
}
"""What the operator for one query calls the arguments of the second version."""


def incre(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of npu_incre_flash_attention."""
    return of_one_query(v2(a))


def of_one_query(make: Make) -> Make:
    """A call of the second version as one of npu_incre_flash_attention."""
    unknown = ("sparse_mode", "pre_tokens", "next_tokens")
    return lambda dtype: {OLDER.get(name, name): v for name, v in make(dtype).items() if name not in unknown}


def incre_cache(a: Attend, of: str = "all", offset: bool = False) -> Make:
    """Arguments of npu_incre_flash_attention over int8 keys and values."""
    second = {first: name for name, first in FIRST.items()}
    call = joint_cache(a, of, offset)
    return of_one_query(lambda dtype: {second.get(name, name): value for name, value in call(dtype).items()})


def incre_padded(a: Attend) -> Make:
    """Arguments of npu_incre_flash_attention whose keys stand at the end of their rows, before two others."""
    return lambda dtype: incre(a)(dtype) | {"kv_padding_size": torch.tensor([2])}


def prompt(a: Attend) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of npu_prompt_flash_attention."""
    return of_several_queries(v2(a))


def of_several_queries(make: Make) -> Make:
    """A call of the second version as one of npu_prompt_flash_attention."""
    names = OLDER | {"actual_seq_kvlen": "actual_seq_lengths_kv", "actual_seq_qlen": "actual_seq_lengths"}
    return lambda dtype: {names.get(name, name): value for name, value in make(dtype).items()}


def in_tensors(make: Callable[[torch.dtype], dict[str, Any]]) -> Callable[[torch.dtype], dict[str, Any]]:
    """The same call with its lengths in tensors."""
    return lambda dtype: {
        name: torch.tensor(value) if name.startswith("actual_seq") else value for name, value in make(dtype).items()
    }


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def placed(x: Tensor, layout: str) -> Tensor:
    """[B, S, N, D] in a layout, contiguous; packed, the batch is one sequence after the other."""
    if layout in ("TND", "NTD"):
        tokens = x.flatten(0, 1)
        return tokens if layout == "TND" else tokens.transpose(0, 1).contiguous()
    if layout in ("BSH", "SBH"):
        merged = x.flatten(-2)
        return merged if layout == "BSH" else merged.transpose(0, 1).contiguous()
    return x.permute(["BSND".index(dim) for dim in layout]).contiguous()


def keys(a: Attend, width: int, dtype: torch.dtype) -> Tensor:
    if not a.block:
        return placed(random(a.b, a.t, a.m, width, dtype=dtype), a.layout.split("_")[0])
    pages = 2 * a.b * blocks(a) + 1
    shapes = {
        3: (pages, a.block, a.m * width),
        4: (pages, a.m, a.block, width),
        5: (pages, a.m, width // 8, a.block, 8),
    }
    return random(*shapes[a.form], dtype=dtype)


def blocks(a: Attend) -> int:
    return -(-a.t // a.block)


def table(a: Attend) -> Tensor:
    pages = torch.randperm(2 * a.b * blocks(a) + 1)
    return pages[: a.b * blocks(a)].reshape(a.b, blocks(a)).to(torch.int32)


PACKED: dict[str, Any] = {"lengths": ([3, 10], [4, 10])}
CALLS: tuple[tuple[str, Attend], ...] = (
    *((f"{layout}, no mask", Attend(layout)) for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD")),
    *((f"{layout}, causal", Attend(layout, mode=3)) for layout in ("BSND_NBSD", "BNSD_NBSD", "BSH_BNSD", "BSND_BNSD")),
    ("equal heads", Attend(m=4)),
    ("one key head", Attend("BSND", m=1, mode=3)),
    ("left-up causal, more keys", Attend(s=3, t=7, mode=2)),
    ("right-down causal, more keys", Attend("BSH", s=3, t=7, mode=3)),
    ("right-down causal, fewer keys", Attend("BSND", s=5, t=3, mode=3)),
    ("band", Attend(s=4, t=7, mode=4, before=2, after=0)),
    ("band that begins late", Attend("BSH", s=5, t=5, mode=4, before=1, after=-1)),
    ("mask [B, 1, S, T]", Attend("BSH", mask=(2, 1, 5, 5))),
    ("mask [1, 1, S, T], padded", Attend("BSND", mask=(1, 1, 16, 32))),
    ("mask [1, S, T]", Attend(mask=(1, 5, 5), mode=1)),
    ("mask [S, T] and band", Attend(mask=(5, 5), before=3, after=2)),
    ("mask [B, T] of one query", Attend(s=1, t=6, mask=(2, 6))),
    ("decode with lengths", Attend("BSH", s=1, t=9, lengths=(None, [4, 9]))),
    ("one length for all", Attend(s=1, t=9, lengths=(None, [7]))),
    ("prefill with lengths", Attend("BSND", t=7, mode=3, lengths=([3, 5], [7, 6]))),
    ("a sequence without keys", Attend(s=1, t=4, lengths=(None, [0, 3]))),
    ("TND", Attend("TND", **PACKED)),
    ("TND causal", Attend("TND", mode=3, **PACKED)),
    ("TND_NTD band", Attend("TND_NTD", mode=4, before=2, after=1, **PACKED)),
    ("NTD_TND left-up causal", Attend("NTD_TND", mode=2, **PACKED)),
    ("TND of one sequence", Attend("TND", b=1, mode=3, lengths=([5], [5]))),
    ("pages [P, block, H], BSH decode", Attend("BSH", s=1, t=11, block=4, lengths=(None, [11, 6]))),
    ("pages [P, N, block, D]", Attend(s=1, t=11, block=4, form=4, lengths=(None, [11, 6]))),
    ("pages NZ", Attend(s=1, t=11, block=4, form=5, lengths=(None, [11, 6]))),
    ("pages, prefill", Attend("BSND", s=3, t=11, block=4, mode=3, lengths=([3, 2], [11, 6]))),
    ("pages, TND", Attend("TND", t=11, block=4, mode=3, lengths=([4, 10], [11, 6]))),
    ("pages [P, N, block, D], TND_NTD", Attend("TND_NTD", t=11, block=4, form=4, mode=3, lengths=([4, 10], [11, 6]))),
    ("pages NZ, one TND sequence", Attend("TND", b=1, t=11, block=4, form=5, mode=3, lengths=([5], [9]))),
    ("rope", Attend("BSND", m=4, rope=8, mode=3)),
    ("rope, latent of pages", Attend("BSND", s=2, t=11, m=1, rope=8, block=4, mode=3, lengths=(None, [11, 6]))),
    ("rope, NZ, TND_NTD", Attend("TND_NTD", t=11, m=1, rope=8, block=4, form=5, lengths=([4, 10], [9, 6]))),
    ("other value width", Attend("TND", dv=24, mode=3, **PACKED)),
    ("lse", Attend("BSH", lse=True, mode=3)),
    ("lse, TND", Attend("TND", lse=True, **PACKED)),
    ("bias", Attend(bias=(2, 4, 5, 5))),
    ("bias for all sequences, BSH, causal", Attend("BSH", s=3, t=7, mode=3, bias=(1, 4, 3, 7))),
    ("bias of more rows and keys, BSND, mask", Attend("BSND", mask=(2, 1, 5, 5), mode=1, bias=(1, 4, 16, 32))),
    ("bias, one query, lengths", Attend(s=1, t=6, lengths=(None, [4, 6]), bias=(2, 4, 1, 6))),
    ("bias, pages", Attend("BSND", s=3, t=11, block=4, mode=3, lengths=([3, 2], [11, 6]), bias=(2, 4, 3, 12))),
)  # fmt: skip
V2_ONLY: tuple[tuple[str, Attend], ...] = (
    ("sink", Attend("TND", sink=True, mode=3, **PACKED)),
    ("sink, NTD_TND band", Attend("NTD_TND", sink=True, mode=4, before=3, after=0, **PACKED)),
    ("sink, pages, decode", Attend("TND", s=1, t=11, block=4, sink=True, mode=3, lengths=([1, 2], [11, 6]))),
)
_PAGED: dict[str, Any] = dict(t=11, m=1, d=32, rope=16, block=4)
WHOLE: tuple[tuple[str, Attend], ...] = (
    ("whole numbers, BSND", Attend("BSND", s=2, t=7, m=1, d=32, rope=8, mode=3)),
    ("whole numbers, BNSD_NBSD", Attend("BNSD_NBSD", s=3, t=7, m=1, d=32, rope=8, mode=3)),
    ("whole numbers, BSH, one query", Attend("BSH", s=1, t=7, m=1, d=32, rope=8, lengths=(None, [7, 0]))),
    ("whole numbers, pages", Attend("BSND", s=2, mode=3, lengths=(None, [11, 6]), **_PAGED)),
    ("whole numbers, pages in lines", Attend("BSND", s=1, form=5, lengths=(None, [11, 6]), **_PAGED)),
    ("whole numbers, TND_NTD in lines", Attend("TND_NTD", form=5, mode=3, lengths=([4, 10], [9, 6]), **_PAGED)),
    ("whole numbers, lse", Attend("BSND", s=2, t=7, m=1, d=32, rope=8, mode=3, lse=True)),
)
CACHES: tuple[tuple[str, Attend, dict[str, Any]], ...] = (
    ("int8 rows, BNSD", Attend(s=1, t=9, d=32, lengths=(None, [4, 9])), {}),
    ("int8 rows, BSND, offsets", Attend("BSND", s=1, t=9, d=32, lengths=(None, [0, 9])), {"offset": True}),
    ("int8 rows, scales of heads, mask", Attend(s=1, t=6, d=32, mask=(2, 6)), {"of": "heads", "offset": True}),
    ("int8 rows, one scale", Attend("BSND", s=3, t=7, d=32, mode=3), {"of": "all", "offset": True}),
    ("int8 rows, several queries", Attend(s=3, t=7, d=32, mode=3), {"of": "rows"}),
    ("int8 pages", Attend("BSND", s=1, t=11, d=32, block=4, lengths=(None, [11, 6])), {"offset": True}),
    ("int8 pages of heads", Attend(s=1, t=11, d=32, block=4, form=4, lengths=(None, [11, 6])), {}),
    ("int8 pages in NZ", Attend(s=1, t=11, d=32, block=4, form=5, lengths=(None, [11, 6])), {"of": "rows"}),
    ("int8 rows, scales of tokens", Attend("BSND", s=1, t=9, d=32, lengths=(None, [0, 9])), {"of": "tokens"}),
    ("int8 rows, of tokens and heads", Attend(s=1, t=6, d=32, mask=(2, 6)), {"of": "tokens of heads"}),
    ("int8 pages, of tokens", Attend(s=1, t=11, d=32, block=4, form=4, lengths=(None, [11, 6])), {"of": "tokens"}),
    ("int8 rows, lse", Attend(s=2, t=7, d=32, lse=True), {"offset": True}),
)
_SOME = torch.arange(42).reshape(2, 1, 3, 7) % 3 == 0
FUSION: tuple[tuple[str, Attend], ...] = (
    *((f"{layout}, no mask", Attend(layout)) for layout in ("BSH", "SBH", "BSND", "BNSD")),
    ("causal", Attend("SBH", mode=2)),
    ("right-down causal, more keys", Attend(s=3, t=7, mode=3)),
    ("band", Attend("BSND", s=4, t=7, mode=4, before=2, after=0)),
    ("TND causal", Attend("TND", mode=3, lengths=([3, 10], [3, 10]))),
    ("mask and band", Attend(before=3, after=2, more={"atten_mask": torch.eye(5, dtype=torch.bool)})),
    ("the whole mask, BSH", Attend("BSH", s=3, t=7, mode=1, more={"atten_mask": _SOME})),
    ("sink", Attend("BSND", sink=True, mode=3)),
)
_PADDED = Attend("BSND", s=7, t=9, lengths=([3, 5], [4, 6]))
RESULTS: tuple[tuple[str, Make], ...] = (
    ("int8 result, BNSD_BSND", in_int8(v2(Attend("BNSD_BSND", mode=3)), Attend())),
    ("int8 result of channels, BSH", in_int8(v2(Attend("BSH")), Attend("BSH"), channels=True)),
    ("int8 result of channels, TND", in_int8(v2(Attend("TND", mode=3, **PACKED)), Attend(), channels=True)),
    ("int8 result, lse", in_int8(v2(Attend("BSND", lse=True)), Attend(), offset=False)),
)
"""By the names of the second version."""
FIRST_ONLY: tuple[tuple[str, Make], ...] = (
    ("queries and keys at the end of rows", left_padded(replace(_PADDED, mode=3), "query", "kv")),
    ("queries at the end of rows, lse", left_padded(replace(_PADDED, layout="BNSD", lse=True), "query")),
    ("keys at the end of rows, BSH", left_padded(Attend("BSH", s=1, t=9, lengths=(None, [4, 7])), "kv")),
    ("a prefix", behind_prefix(Attend(s=2, t=5))),
    ("a part of a prefix, BSH", behind_prefix(Attend("BSH", s=2, t=5), length=2)),
    ("a prefix, lengths", behind_prefix(Attend("BSND", s=3, t=5, mode=3, lengths=([3, 2], [5, 4])))),
    ("a prefix, mask", behind_prefix(Attend(s=2, t=5, mask=(2, 1, 2, 8), mode=1))),
    *(
        (f"int8 keys, scales of {of} in one tensor", joint_cache(Attend(s=2, t=7, d=32), of, offset))
        for of, offset in (("all", True), ("channels", False), ("lanes", True), ("merged", False))
    ),
    ("int8 keys, scales of tokens in one tensor", joint_cache(Attend("BSND", s=1, t=7, d=32), "tokens", True)),
    ("int8 pages, scales in one tensor", joint_cache(replace(CACHES[5][1], s=2), "merged", True)),
)
"""By the names of the first version."""
INCRE: tuple[tuple[str, Attend], ...] = (
    *((f"{layout}, no mask", Attend(layout, s=1)) for layout in ("BSND", "BNSD")),
    ("equal heads", Attend(s=1, m=4)),
    ("mask [B, T]", Attend(s=1, t=6, mask=(2, 6))),
    ("mask [B, 1, 1, T], padded", Attend("BSND", s=1, t=6, mask=(2, 1, 1, 16))),
    ("lengths", Attend("BSND", s=1, t=9, lengths=(None, [4, 9]))),
    ("a sequence without keys", Attend(s=1, t=4, lengths=(None, [0, 3]))),
    ("pages [P, block, H]", Attend("BSND", s=1, t=11, block=4, lengths=(None, [11, 6]))),
    ("pages [P, N, block, D], mask", Attend(s=1, t=11, block=4, form=4, mask=(2, 1, 1, 12), lengths=(None, [11, 6]))),
    ("bias", Attend("BSND", s=1, t=6, bias=(2, 4, 1, 8))),
    ("bias, pages", Attend(s=1, t=11, block=4, form=4, bias=(1, 4, 1, 12), lengths=(None, [11, 6]))),
    ("BSH, lengths", Attend("BSH", s=1, t=9, lengths=(None, [4, 9]))),
    ("BSH, pages, bias", Attend("BSH", s=1, t=11, block=4, lengths=(None, [11, 6]), bias=(2, 4, 1, 12))),
)
_ONE = Attend(s=1, t=7, d=32)
INCRE_NUMBERS: tuple[tuple[str, Make], ...] = (
    ("int8 result", of_one_query(in_int8(v2(_ONE), _ONE, offset=False))),
    ("int8 result of channels", of_one_query(in_int8(v2(replace(_ONE, layout="BSND")), _ONE, channels=True))),
    ("int8 keys", incre_cache(_ONE, offset=True)),
    ("int8 keys, scales of channels", incre_cache(replace(_ONE, layout="BSND"), "merged")),
    ("int8 keys, BSH", incre_cache(replace(_ONE, layout="BSH"), "merged", offset=True)),
    ("int8 pages", incre_cache(replace(CACHES[5][1], s=1), "merged", offset=True)),
    ("keys at the end of rows", incre_padded(Attend("BSND", s=1, t=9, lengths=(None, [4, 7])))),
)
PROMPT: tuple[tuple[str, Attend], ...] = (
    *((f"{layout}, no mask", Attend(layout, t=7)) for layout in ("BSND", "BNSD", "BNSD_BSND")),
    ("equal heads, left-up causal", Attend(m=4, mode=2)),
    ("left-up causal, lengths", Attend("BSND", s=3, t=7, mode=2, lengths=(None, [5, 7]))),
    ("right-down causal", Attend(mode=3)),
    ("band", Attend("BSND", mode=4, before=2, after=0)),
    ("one length", Attend(t=7, lengths=(None, [4]))),
    ("lengths of queries", Attend("BSND", t=7, lengths=([5, 3], [6, 7]))),
    ("one length of queries, left-up causal", Attend(mode=2, lengths=([4], None))),
    ("bias", Attend(t=7, bias=(2, 4, 5, 7))),
    ("bias of more rows, BSH", Attend("BSH", t=7, bias=(1, 4, 8, 9))),
    ("BSH, left-up causal", Attend("BSH", mode=2)),
    ("mask and what follows", Attend(mask=(2, 1, 5, 5), after=2)),
    ("mask and a window", Attend("BSND", t=7, mask=(5, 7), before=3, after=1)),
    ("the whole mask", Attend("BSH", t=7, mask=(1, 1, 8, 9), mode=1)),
)
PROMPT_NUMBERS: tuple[tuple[str, Make], ...] = (
    ("int8 result", of_several_queries(in_int8(v2(Attend("BNSD_BSND")), Attend(), offset=False))),
    ("int8 result of channels", of_several_queries(in_int8(v2(Attend("BSH", mode=2)), Attend("BSH"), channels=True))),
)
