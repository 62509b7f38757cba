"""Terms that rules about a latent share: its row of both caches, its queries, rotated lanes, attention over it.

[k, k_r] = x W_DKV      latent = s norm(k)      key_rope = rope(k_r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.kit.orders import HALF, in_order
from patterns.rotary.token_tables import TokenTables, rotated_lanes


@dataclass(frozen=True)
class Tables(TokenTables):
    """The same for a latent's rotated key, and the queries beside it."""

    def of_tokens(self, x: Tensor, row: LatentRow, dtype: torch.dtype) -> list[Tensor]:
        """Both as [B, S, D] for tokens [B, S, H], or as [T, D] for those without their sequences, [T, H].

        They come in the order of the rotated key and are given in halves, rounded to `dtype`: the operators read them
        so, and what a table in float32 loses is no more than a rotated lane is rounded by.
        """
        return self.in_halves(x, row.result, row.widths[1], dtype)

    def in_halves(self, x: Tensor, order: str, width: Any, dtype: torch.dtype) -> list[Tensor]:
        """The same of tables of so many lanes in an order."""
        both = (_in_halves(each, order, width, dtype) for each in self.rows(x))
        return [each.reshape(*x.shape[:-1], each.shape[-1]) for each in both]


@dataclass(frozen=True)
class LatentRow(Group):
    """The row of a token: lanes `begin` … `split` are its latent, those from there to `end` its rotated key."""

    gamma: Any = tensor("Hckv")
    eps: Any = scalar()
    factor: Any = scalar()
    begin: Any = attribute()
    split: Any = attribute()
    end: Any = attribute()
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def terms(self, p, both, tables, like):
        """The latent, which may be multiplied by a number, and the rotated key, of what holds them."""
        latent, turning = (p.lanes(p.reshaped(both), *of) for of in ((self.begin, self.split), (self.split, self.end)))
        norm = p.rms_norm(x=latent, gamma=self.gamma, eps=self.eps)
        rope = rotated_lanes(p, turning, tables, self, like)
        return p.maybe_scaled(norm, self.factor), rope

    def reordered(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Both rows, of which the rotated key comes in halves, in the order that the model has."""
        return latent, in_order(rope, HALF, self.result)

    def scaled_gamma(self, dtype: torch.dtype) -> Tensor:
        """The gain of the norm, times what the latent is multiplied by, rounded to `dtype`."""
        return (self.gamma if self.factor == 1 else self.gamma * self.factor).to(dtype)

    @property
    def widths(self) -> tuple[Any, Any]:
        """Lanes of the latent, and of the rotated key."""
        return self.split - self.begin, self.end - self.split

    def guard(self, dkv: Any) -> None:
        """Refuse a layer that gives other lanes as well."""
        whole = self.begin == 0 and self.end == dkv.shape[0]
        require(whole, "latent and rotated key do not make up one projection")


@dataclass(frozen=True)
class LatentQueries(Group):
    """The norm of the latent of the queries, and which lanes of every head are absorbed by W_UK and which rotated."""

    gamma: Any = tensor("Hcq")
    eps: Any = scalar()
    up: Any = tensor("N D Hckv")
    width: Any = attribute()
    begin: Any = attribute()
    first: Any = attribute()
    heads_first: Any = attribute()
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def norm(self, p, low):
        """Of the latent, as the first layer gives it."""
        return p.rms_norm(x=low, gamma=self.gamma, eps=self.eps)

    def guard(self, row: LatentRow) -> None:
        """Refuse lanes that lie otherwise than those of the operators: rotated ones last, and no others."""
        last = self.begin == 0 and self.first == self.up.shape[1]
        require(last, "the lanes that are rotated do not follow those that are not")
        whole = self.width == self.first + row.end - row.split
        require(whole, "the heads have more lanes than both parts of the queries")
        orders = dict(queries=self.result, keys=row.result)
        require(self.result == row.result, "rotated queries are in {queries} order, keys in {keys} order", **orders)

    def restored(self, query: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Rotated and absorbed queries [B, S, N, C] or [T, N, C] as the model has them."""
        heads_before = query.transpose(1, 2) if query.dim() == 4 else query
        rope = self.reordered(rope)
        return rope.transpose(1, 2) if self.heads_first else rope, heads_before

    def reordered(self, rope: Tensor) -> Tensor:
        """Rotated queries that come in halves, in the order that the model has them in."""
        return in_order(rope, HALF, self.result)


def _in_halves(table: Tensor, order: str, width: Any, dtype: torch.dtype) -> Tensor:
    """A table [B, S, D], or [B, S, D / 2] of pairs, as the operators read it."""
    if table.shape[-1] == width:
        return in_order(table.to(dtype), order, HALF)
    pairs = table.unsqueeze(-1).expand(*table.shape, 2)
    return (pairs if order == HALF else pairs.transpose(-1, -2)).to(dtype).flatten(-2)
