"""Small calls of the operators of atb for latent attention, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Make = Callable[[torch.dtype], dict[str, Any]]
MLA, LSE, TENSORS = (f"atb::npu_multi_head_latent_attention{kind}" for kind in ("", ".lse", ".tensor_lengths"))
RING = "atb::npu_ring_mla"
PREPROCESS = ("atb::npu_mla_preprocess.out", "atb::npu_mla_preprocess.functional")


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


# attention over a latent -------------------------------------------------------------------------------------------

N, C, DR, SIZE = 4, 32, 16, 8


def in_lines(pages: Tensor, line: int) -> Tensor:
    """Pages [Blocks, Size, 1, D] as [Blocks, D / line, Size, line]."""
    return pages.squeeze(2).unflatten(-1, (-1, line)).transpose(1, 2).contiguous()


def spec_mask(rows: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    """-10000 where a key stands behind a row, for all keys of the longest context."""
    masks = []
    for count, length in zip(rows, keys, strict=True):
        last = torch.arange(length - count, length)[:, None]
        masks.append((torch.arange(max(keys)) > last) * -10000.0)
    return torch.cat(masks).double()


def free_mask(rows: int, size: int = SIZE) -> Tensor:
    return torch.full((size - 3 + 2 * rows, size), -10000.0, dtype=torch.float64).triu(2 - rows)


@dataclass(frozen=True)
class Latent:
    keys: tuple[int, ...] = (11, 8, 1)
    rows: tuple[int, ...] | None = None
    mode: str = "krope_ctkv"
    mask: str | None = None
    lse: bool = False
    in_tensors: bool = False


def given(make: Make, **more: Any) -> Make:
    return lambda dtype: make(dtype) | more


def without(make: Make, name: str) -> Make:
    return lambda dtype: {each: value for each, value in make(dtype).items() if each != name}


def latent(a: Latent) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        narrow, tokens = a.mode == "int8_nzcache", sum(a.rows or (1,) * len(a.keys))
        blocks = max(1, -(-max(a.keys) // SIZE))
        table = torch.randperm(2 * blocks * len(a.keys))[: blocks * len(a.keys)].reshape(len(a.keys), blocks)
        unused = torch.arange(blocks)[None] * SIZE >= torch.tensor(a.keys)[:, None]
        ctkv = int8(2 * table.numel(), SIZE, 1, C) if narrow else random(2 * table.numel(), SIZE, 1, C, dtype=dtype)
        k_rope = random(2 * table.numel(), SIZE, 1, DR, dtype=dtype)
        if a.mode != "krope_ctkv":
            ctkv, k_rope = in_lines(ctkv, 16), in_lines(k_rope, 8)
        call: dict[str, Any] = {
            "q_nope": int8(tokens, N, C) if narrow else random(tokens, N, C, dtype=dtype),
            "q_rope": random(tokens, N, DR, dtype=dtype),
            "ctkv": ctkv,
            "k_rope": k_rope,
            "block_tables": table.masked_fill(unused, 1000).to(torch.int32),  # what is there must not matter
            "context_lens": torch.tensor(a.keys) if a.in_tensors else list(a.keys),
            "q_headnum": N,
            "qk_scale": 0.2,
            "kv_headnum": 1,
            "cache_mode": a.mode,
        }
        if a.lse:
            return call | {"return_lse": True, "calc_type": "calc_type_ring"}
        if narrow:
            scales = {name: torch.rand(N) * 1e-4 + 1e-5 for name in ("qk_descale", "pv_descale")}
            call |= scales
        if a.rows:
            call |= {"calc_type": "calc_type_spec", "qseqlen": list(a.rows)}
        if a.mask:
            mask = spec_mask(a.rows or (), a.keys) if a.mask == "spec" else free_mask(max(a.rows or ()))
            call |= {"mask_type": f"mask_type_{a.mask}", "mask": mask.to(dtype)}
        return call

    return make


MODES = ("krope_ctkv", "nzcache", "int8_nzcache")
LATENT: tuple[tuple[str, str, Make], ...] = (
    *((MLA, f"decode, {mode}", latent(Latent(mode=mode))) for mode in MODES),
    (MLA, "rows", latent(Latent((11, 9), (2, 2)))),
    *((MLA, f"rows of unequal number, {mode}", latent(Latent((11, 9, 4), (2, 1, 4), mode=mode))) for mode in MODES[1:]),
    *((MLA, f"mask of rows, {mode}", latent(Latent((11, 9), (3, 2), mode, "spec"))) for mode in MODES),
    *((MLA, f"mask of fixed shape, {mode}", latent(Latent((11, 16), (2, 2), mode, "free"))) for mode in MODES[1:]),
    (MLA, "mask of fixed shape over two pages", latent(Latent((9, 8, 17, 4), (4,) * 4, mask="free"))),
    (MLA, "an empty context", latent(Latent((5, 0)))),
    (MLA, "no mask by name", given(latent(Latent()), mask_type="undefined", calc_type="calc_type_undefined")),
    (TENSORS, "decode", latent(Latent(in_tensors=True))),
    (TENSORS, "rows", latent(Latent((11, 9), (2, 2), mask="free", in_tensors=True))),
    (LSE, "decode", latent(Latent(lse=True))),
)


# a step of attention over parts of the keys ------------------------------------------------------------------------


def ring(rows: tuple[int, ...], keys: tuple[int, ...], *, triu: bool = False, merged: bool = False, m: int = N) -> Make:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        t, k, d, wide = sum(rows), sum(keys), 16, torch.promote_types(dtype, torch.float32)
        shapes = {
            "q_nope": (t, N, d),
            "q_rope": (t, N, 8),
            "k_nope": (k, m, d),
            "k_rope": (k, m, 8),
            "value": (k, m, d),
        }
        call: dict[str, Any] = {name: random(*shape, dtype=dtype) for name, shape in shapes.items()}
        both = torch.tensor([rows, keys], dtype=torch.int32)
        call |= {"mask": torch.ones(512, 512, dtype=dtype).triu(1), "seqlen": both[0] if triu else both}
        call |= {"head_num": N, "kv_head_num": m, "qk_scale": 0.3}
        call |= {"mask_type": "mask_type_triu" if triu else "no_mask"}
        if merged:
            before = {"pre_out": random(t, N, d, dtype=dtype), "prev_lse": random(N, t, dtype=wide) + 2}
            call |= {"calc_type": "calc_type_default", **before}
        return call

    return make


STEPS: tuple[tuple[str, Make], ...] = (
    ("first, causal", ring((5, 3), (5, 3), triu=True)),
    ("first", ring((2, 3), (7, 4))),
    ("merged", ring((2, 3), (7, 4), merged=True)),
    ("shared keys", ring((2, 3), (7, 4), m=2)),
    ("without keys", ring((2, 3), (7, 0), merged=True)),
    ("no mask by default", without(ring((2, 3), (7, 4)), "mask_type")),
    ("first by name", given(ring((2, 3), (7, 4)), calc_type="calc_type_first_ring")),
)


# what stands before ------------------------------------------------------------------------------------------------

HE, HCQ, D = 64, 32, 24


def weight(rows: int, columns: int) -> Tensor:
    """int8 [rows, columns] in lines of 16."""
    return int8(rows, columns).unflatten(-1, (-1, 16)).transpose(0, 1).unsqueeze(0).contiguous()


def preprocess(slots: tuple[int, ...], mode: str = "krope_ctkv", *, static: bool = True, packed: bool = False) -> Make:
    """Pages are 3 of 4 tokens; `packed`: scales as bits of float32 in int64."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        t, nk, nq, narrow = len(slots), C + DR + HCQ, N * (D + DR), mode == "int8_nzcache"
        angle = torch.rand(t, DR, dtype=torch.float64) * 6
        scales = [torch.rand(size) * 1e-3 + 1e-4 for size in (nk, nq)]
        latents, ropes = (
            int8(3, 4, 1, C) if narrow else random(3, 4, 1, C, dtype=dtype),
            random(3, 4, 1, DR, dtype=dtype),
        )
        if mode != "krope_ctkv":
            latents, ropes = in_lines(latents, 16), in_lines(ropes, 8)
        call: dict[str, Any] = {
            "input": random(t, HE, dtype=dtype), "gamma0": random(HE, dtype=dtype), "beta0": random(HE, dtype=dtype),
            "wdqkv": weight(nk, HE), "gamma1": random(HCQ, dtype=dtype), "beta1": random(HCQ, dtype=dtype),
            "wuq": weight(nq, HCQ), "gamma2": random(C, dtype=dtype), "cos": angle.cos().to(dtype),
            "sin": angle.sin().to(dtype), "wuk": random(N, D, C, dtype=dtype, scale=D**-0.5),
            "slotmapping": torch.tensor(slots, dtype=torch.int32), "cache_mode": mode,
            "quant_mode": "per_tensor_quant_asymm" if static else "per_token_quant_symm",
        }  # fmt: skip
        for number, scale in enumerate(scales):
            call[f"descale{number}"] = scale.view(torch.int32).long() if packed else scale
            if static:
                call[f"quant_scale{number}"] = torch.tensor([0.031], dtype=torch.float64).to(dtype)
                call[f"quant_offset{number}"] = torch.tensor([5 - number], dtype=torch.int8)
                call[f"bias{number}"] = torch.randint(-50, 50, scale.shape, dtype=torch.int32)
        if narrow:
            call["ctkv_scale"] = torch.tensor([0.04], dtype=torch.float64).to(dtype)
            call["q_nope_scale"] = (torch.rand(N, dtype=torch.float64) + 9).to(dtype)
        out = int8(t, N, C) if narrow else random(t, N, C, dtype=dtype)
        call |= {"kv_cache": latents.clone(), "kv_cache_rope": ropes.clone(), "kv_cache_out0": latents}
        return call | {"kv_cache_out1": ropes, "q_out0": out, "q_out1": random(t, N, DR, dtype=dtype)}

    return make


BEFORE: tuple[tuple[str, Make], ...] = (
    *((f"tokens, {mode}", preprocess((3, 7, 0, 11), mode)) for mode in MODES),
    ("scales of each token", preprocess((3, 7), static=False)),
    ("scales of each token by default", without(preprocess((3, 7), static=False), "quant_mode")),
    ("skipped", preprocess((-1, 7, -1, 0))),
    ("packed scales", preprocess((9,), packed=True)),
)
