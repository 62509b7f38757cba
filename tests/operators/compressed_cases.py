"""Small calls of attention over a window and compressed keys, both sides of its limits, and its numbers, row by row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.limit_cases import starts, t
from tests.operators.sparse_cases import Make, random

ATTENTION = "cann_ops_transformer::sparse_flash_mla"
SCHEDULE = "cann_ops_transformer::sparse_flash_mla_metadata"
INT, F32 = torch.int32, torch.float32
A2, A3, A950 = CHIPS


def attention(
    rows: int = 3, keys: int = 9, entries: int = 0, listed: Any = None, batch: int = 2, heads: int = 4, width: int = 16,
    residual: tuple[int, ...] = (1, 0), **more: Any,
) -> Make:  # fmt: skip
    """`listed` are the lists of all rows of each sequence."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call: dict[str, Any] = {
            "q": random(batch, rows, heads, width, dtype=dtype), "ori_kv": random(batch, keys, 1, width, dtype=dtype),
            "sinks": torch.randn(heads), "softmax_scale": width**-0.5, "ori_win_left": 3,
        }  # fmt: skip
        if entries:
            call |= {
                "cmp_kv": random(batch, entries, 1, width, dtype=dtype), "cmp_ratio": 4,
                "cmp_residual_kv": torch.tensor(residual[:batch], dtype=INT),
            }  # fmt: skip
        if listed is not None:
            call["cmp_sparse_indices"] = torch.tensor(listed, dtype=INT).unsqueeze(2)
        return call | more

    return make


_LISTS = (((1, 0, -1, 0), (0, -1, -1, -1), (2, 1, 0, 1)), ((-1, 2, 1, 0), (1, 1, 0, -1), (2, 0, -1, -1)))
CASES: tuple[tuple[str, Make], ...] = (
    ("window", attention()),
    ("window, no sinks", attention(sinks=None)),
    ("more rows than keys", attention(rows=6, keys=4)),
    ("lengths", attention(seqused_ori_kv=torch.tensor([5, 9], dtype=INT), return_softmax_lse=True)),
    ("entries", attention(entries=3, return_softmax_lse=True)),
    ("entries, of which the first rows see none", attention(rows=9, keys=9, entries=2)),
    ("listed entries", attention(entries=3, listed=_LISTS)),
    ("listed entries, no sinks", attention(entries=3, listed=_LISTS, sinks=None, return_softmax_lse=True)),
    ("one row", attention(rows=1, entries=2, batch=1, heads=1)),
)


def schedule(dtype: torch.dtype) -> dict[str, Any]:
    return dict(num_heads_q=4, num_heads_kv=1, head_dim=16, cmp_residual_kv=torch.tensor([1, 0], dtype=INT))


SCHEDULES: tuple[tuple[str, Make], ...] = (
    ("residual", schedule),
    ("lengths", lambda dtype: schedule(dtype) | {"seqused_ori_kv": torch.tensor([5, 9], dtype=INT)}),
)


def reference(
    q: Tensor, ori_kv: Tensor, softmax_scale: float, ori_win_left: int, sinks: Tensor | None = None,
    cmp_kv: Tensor | None = None, cmp_ratio: int = 1, cmp_residual_kv: Tensor | None = None,
    cmp_sparse_indices: Tensor | None = None, seqused_ori_kv: Tensor | None = None, return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend row by row and head by head, in float64."""
    batch, rows, heads, _ = q.shape
    out, lse = torch.zeros_like(q), torch.zeros(batch, 1, rows, heads).double()
    for b in range(batch):
        length = ori_kv.shape[1] if seqused_ori_kv is None else int(seqused_ori_kv[b])
        for i in range(rows):
            last = length - rows + i
            seen = [ori_kv[b, j, 0] for j in range(max(0, last - ori_win_left), min(last, length - 1) + 1)]
            if cmp_kv is not None and cmp_residual_kv is not None:
                named = None if cmp_sparse_indices is None else cmp_sparse_indices[b, i, 0].tolist()
                room = cmp_kv.shape[1]
                bound = (room * cmp_ratio + int(cmp_residual_kv[b]) - rows + i + 1) // cmp_ratio
                seen += [cmp_kv[b, e, 0] for e in visible(named, min(max(bound, 0), room))]
            for n in range(heads):
                scores = [float(q[b, i, n] @ key) * softmax_scale for key in seen]
                shares = [math.exp(each) for each in scores]
                total = sum(shares) + (0.0 if sinks is None else math.exp(float(sinks[n])))
                if seen:
                    out[b, i, n] = sum(share / total * key for share, key in zip(shares, seen, strict=True))
                    lse[b, 0, i, n] = math.log(total)
    return out, lse if return_softmax_lse else torch.zeros(()).double()


def visible(named: list[int] | None, bound: int) -> list[int]:
    """The entries below `bound`: all, or those `named` before the first -1, among as many places as the bound."""
    if named is None:
        return list(range(bound))
    ended = named[: named.index(-1)] if -1 in named else named
    return [each for each in ended[:bound] if each < bound]


def reference_schedule(**_: Any) -> Tensor:
    return torch.zeros(1024, dtype=INT)


REFERENCES = {ATTENTION: reference, SCHEDULE: reference_schedule}


def call(
    entries: int = 0, ratio: int = 1, listed: int = 0, heads: int = 8, keys: int = 9, **more: Any
) -> dict[str, Any]:  # fmt: skip
    made: dict[str, Any] = {"q": t(2, 3, heads, 512), "ori_kv": t(2, keys, 1, 512), "sinks": t(heads, dtype=F32)}
    if entries:
        made |= {"cmp_kv": t(2, entries, 1, 512), "cmp_residual_kv": t(2, dtype=INT), "cmp_ratio": ratio}
    if listed:
        made["cmp_sparse_indices"] = t(2, 3, 1, listed, dtype=INT)
    return made | more


EDGES = [
    *starts(call(), call(2, 128, keys=260), call(2, 4, 512), name=ATTENTION),
    *starts(schedule(torch.bfloat16) | {"seqused_ori_kv": torch.ones(2, dtype=INT)}, name=SCHEDULE),
    (ATTENTION, (HOST, A2, A3), call(), call(layout_q="TND"), "packed and paged keys"),
    (ATTENTION, (HOST, A2, A3), call(), call(cmp_ratio=4), "cmp_ratio == 1"),
    (ATTENTION, (A2, A3), call(), call(heads=6), "N in"),
    (ATTENTION, (A950,), call(heads=6), call(3, 4, 512), "C == W // cmp_ratio"),
    (ATTENTION, (A950,), call(1, 4, keys=4), call(1, 129, keys=130), "cmp_ratio <= 128"),
]
