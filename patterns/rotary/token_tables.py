"""Tables of a rotation that all heads of a token share, and lanes of the heads turned by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, tensor
from fusion.graph import dims_of


@dataclass(frozen=True)
class TokenTables(Group):
    """cos and sin of every token, which queries and keys are rotated by: of every lane, or of every pair."""

    cos: Any = tensor("Bt St Angles")
    sin: Any = tensor("Bt St Angles")

    def terms(self, p):
        """Both, wherever a table of pairs is written out for their lanes."""
        return [p.maybe_cast(p.maybe_repeated(each, 2), to=torch.float32) for each in (self.cos, self.sin)]

    def rows(self, x: Tensor) -> list[Tensor]:
        """Both as [B, S, D] for tokens x [B, S, H]; as [1, T, D] for those without their sequences, [T, H]."""
        batch, rows = x.shape[:2] if x.dim() == 3 else (1, x.shape[0])
        return [_of_tokens(each, batch, rows) for each in (self.cos, self.sin)]


def rotated_lanes(p, x, tables, of, like, heads_first=None, factor=1.0):
    """Lanes `x` by `tables`, in the orders and the dtype `of` says, in float32, as by the operators, or in the model's.

    `heads_first` as in `p.per_token`; tables may be multiplied by the number `factor`.
    """
    both = (p.per_token(each, x, heads_first) for each in tables.terms(p))
    cos, sin = (each if factor == 1 else p.maybe_scaled(each, factor) for each in both)
    how = dict(source=of.source, result=of.result, dtype=of.dtype)
    return p.as_dtype(p.rotation(x=p.maybe_cast(x, to=torch.float32), cos=cos, sin=sin, **how), like)


def _of_tokens(table: Tensor, batch: Any, rows: Any) -> Tensor:
    """A table [B or 1, S or 1, D], of tokens that the caller may have packed otherwise, as [batch, rows, D]."""
    first, second = table.shape[:2]
    own = zip(dims_of((first, second)), dims_of((batch, rows)), strict=True)
    if all(have in (1, size) for have, size in own):
        return table.expand(batch, rows, table.shape[-1])
    tokens = batch * rows
    first, second = (tokens // second, second) if first == 1 else (first, tokens // first)
    return table.expand(first, second, table.shape[-1]).reshape(batch, rows, -1)
