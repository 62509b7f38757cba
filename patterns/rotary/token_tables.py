"""Tables of a rotation that all heads of a token share, and the rotation of heads by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, tensor
from fusion.graph import dims_of


@dataclass(frozen=True)
class TokenTables(Group):
    """Cosines and sines of every token, shared by queries and keys, of every lane or of every pair."""

    cos: Any = tensor("Bt St Angles")
    sin: Any = tensor("Bt St Angles")

    def terms(self, p):
        """Build the terms of cosines and sines, expanded from pairs to lanes or not, and cast to float32 or not."""
        return [p.maybe_cast(p.maybe_repeated(each, 2), to=torch.float32) for each in (self.cos, self.sin)]

    def rows(self, x: Tensor) -> list[Tensor]:
        """Return the tables as [B, S, D] for tokens `x` [B, S, H], and as [1, T, D] for packed tokens [T, H]."""
        batch, rows = x.shape[:2] if x.dim() == 3 else (1, x.shape[0])
        return [_per_token(each, batch, rows) for each in (self.cos, self.sin)]


def rotated_lanes(p, x, tables, orders, like, heads_first=None, factor=1.0):
    """Build the term of the rotation of `x` by `tables`, in float32 or narrower, rounded to the dtype of `like`.

    Args:
        p: the builder of the form.
        x: the lanes.
        tables: the tables of tokens.
        orders: the group with the orders of pairs, and the dtype of the result.
        like: the tensor with the dtype of the model.
        heads_first: the order of dims, as in `p.per_token`.
        factor: the number by which the tables may be multiplied.
    """
    both = (p.per_token(each, x, heads_first) for each in tables.terms(p))
    cos, sin = (each if factor == 1 else p.maybe_scaled(each, factor) for each in both)
    how = dict(source=orders.source, result=orders.result, dtype=orders.dtype)
    return p.as_dtype(p.rotation(x=p.maybe_cast(x, to=torch.float32), cos=cos, sin=sin, **how), like)


def _per_token(table: Tensor, batch: Any, rows: Any) -> Tensor:
    """Expand `table` [B or 1, S or 1, D], whose tokens the caller may have packed, to [batch, rows, D]."""
    first, second = table.shape[:2]
    own = zip(dims_of((first, second)), dims_of((batch, rows)), strict=True)
    if all(have in (1, size) for have, size in own):
        return table.expand(batch, rows, table.shape[-1])
    tokens = batch * rows
    first, second = (tokens // second, second) if first == 1 else (first, tokens // first)
    return table.expand(first, second, table.shape[-1]).reshape(batch, rows, -1)
