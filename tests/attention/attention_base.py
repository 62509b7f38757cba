"""What an entry of attention is: code, its inputs, which keys its queries see, and what the operator must be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.corpus.base import activations

B, N, M, S, T, D, E = 2, 4, 2, 6, 10, 16, 8
G = N // M

Seen = Callable[[int, int, int], bool]
More = Callable[[torch.dtype], tuple[Tensor, ...]]


def none(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """No further argument."""
    return ()


@dataclass(frozen=True)
class Entry:
    """One way to write attention, or something that resembles it.

    Attributes:
        form: the code, over (q, k, v, *more), each in `layout`.
        told: what the operator is told: its `mask_kind`, then "window n", "kv_len n" or "kv_lens";
            "" where nothing may be fused.
        reason: text of the refusal, where nothing may be fused.
        seen: whether query i of sequence b sees key j; None where every query sees every key.
        heads: heads of keys and values.
        keys: how many keys there are.
        queries: how many queries there are.
        values: width of a value.
        more: further arguments.
        layout: dims of q, k, v and the result: "BNSD", "BSND", "BSH", "XSD" (X = B · N), "NSD" or "SND" (no batch).
        scale: what the scores are multiplied by.
        meaning: the result [B, N, S, E] in float64, where it is not plain softmax attention.
    """

    form: Callable[..., Tensor]
    told: str = "none"
    reason: str = ""
    seen: Seen | None = None
    heads: int = N
    keys: int = S
    queries: int = S
    values: int = D
    more: More = none
    layout: str = "BNSD"
    scale: float = D**-0.5
    meaning: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        """The name of the code."""
        return getattr(self.form, "__name__", type(self.form).__name__)

    def base(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, N, S, D], keys [B, M, T, D], values [B, M, T, E] in float64."""
        return (
            activations(1, B, N, self.queries, D),
            activations(2, B, self.heads, self.keys, D),
            activations(3, B, self.heads, self.keys, self.values),
        )

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The arguments of the code."""
        qkv = (arranged(each, self.layout).to(dtype).contiguous() for each in self.base())
        return (*qkv, *self.more(dtype))

    def expected(self) -> Tensor:
        """The result in float64, by independent code."""
        if self.meaning is not None:
            return arranged(self.meaning(*self.base(), *self.more(torch.float64)), self.layout)
        return arranged(attend(*self.base(), self.visible(), self.scale), self.layout)

    def visible(self) -> Tensor:
        """Which keys are seen, [B, 1, S, T]."""
        seen = self.seen or (lambda b, i, j: True)
        rows = [[[seen(b, i, j) for j in range(self.keys)] for i in range(self.queries)] for b in range(B)]
        return torch.tensor(rows)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Plain attention in float64, one head after the other; a query that sees no key gives 0."""
    shared = q.shape[1] // k.shape[1]
    heads = []
    for n in range(q.shape[1]):
        scores = (scale * q[:, n] @ k[:, n // shared].mT).masked_fill(~seen[:, 0], -torch.inf)
        heads.append(scores.softmax(-1).nan_to_num(0.0) @ v[:, n // shared])
    return torch.stack(heads, 1)


def arranged(x: Tensor, layout: str) -> Tensor:
    """[B, N, S, D] in another layout."""
    match layout:
        case "BSND":
            return x.transpose(1, 2)
        case "BSH":
            return x.transpose(1, 2).flatten(2)
        case "XSD":
            return x.flatten(0, 1)
        case "NSD":
            return x[0]
        case "SND":
            return x[0].transpose(0, 1)
        case _:
            return x


def repeat(x: Tensor) -> Tensor:
    """Every key head for the query heads that share it."""
    return x[:, :, None].expand(-1, -1, G, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])


def lowest(x: Tensor) -> float:
    """The least number of a dtype."""
    return torch.finfo(x.dtype).min


def tensors(*each: Any) -> More:
    """Further arguments: whole numbers and booleans as they are, floats in the dtype of the trial."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = (torch.as_tensor(one) for one in each)
        return tuple(one.to(dtype) if one.is_floating_point() else one for one in made)

    return make
