"""Groups of captures that the prologs of latent attention share: rotation tables, the row of a token, queries.

[k, k_r] = x W_DKV      latent = s norm(k)      key_rope = rope(k_r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.rotary.orders import HALF, in_order
from patterns.rotary.token_tables import TokenTables, rotated_lanes


@dataclass(frozen=True)
class Tables(TokenTables):
    """cos and sin of every token, by which the queries and the rotated key of a latent are rotated."""

    def for_tokens(self, x: Tensor, row: LatentRow, dtype: torch.dtype) -> list[Tensor]:
        """Convert cos and sin to half order and `dtype`: [B, S, Dr] for tokens `x` [B, S, H], [T, Dr] for [T, H].

        The model has them in the order of the rotated key. Rounding a float32 table to `dtype` adds no larger error
        than the rounding of rotated lanes.
        """
        return self.in_halves(x, row.result, row.widths[1], dtype)

    def in_halves(self, x: Tensor, order: str, width: Any, dtype: torch.dtype) -> list[Tensor]:
        """Convert cos and sin of `width` lanes from `order` to half order and `dtype`, [*tokens of `x`, width]."""
        both = (_in_halves(each, order, width, dtype) for each in self.rows(x))
        return [each.reshape(*x.shape[:-1], each.shape[-1]) for each in both]


@dataclass(frozen=True)
class LatentRow(Group):
    """Row of a token: lanes `begin` … `split` are the latent, lanes `split` … `end` the key to rotate.

    Attributes:
        gamma, eps, factor: norm of the latent, and the number that multiplies the result.
        source, result, dtype: orders of lanes before and after the rotation, and its dtype.
    """

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
        """Build the terms of the latent, normalised and times `factor`, and of the rotated key, lanes of `both`."""
        bounds = ((self.begin, self.split), (self.split, self.end))
        latent, key = (p.lanes(p.reshaped(both), *lanes) for lanes in bounds)
        norm = p.rms_norm(x=latent, gamma=self.gamma, eps=self.eps)
        rope = rotated_lanes(p, key, tables, self, like)
        return p.maybe_scaled(norm, self.factor), rope

    def reordered(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return `latent`, and `rope` converted from half order to the order of the model."""
        return latent, in_order(rope, HALF, self.result)

    def scaled_gamma(self, dtype: torch.dtype) -> Tensor:
        """Multiply gamma by `factor` and cast it to `dtype`."""
        return (self.gamma if self.factor == 1 else self.gamma * self.factor).to(dtype)

    @property
    def widths(self) -> tuple[Any, Any]:
        """Numbers of lanes of the latent and of the rotated key."""
        return self.split - self.begin, self.end - self.split

    def guard(self, dkv: Any) -> None:
        """Refuse a layer `dkv` with outputs other than the latent and the key."""
        complete = self.begin == 0 and self.end == dkv.shape[0]
        require(
            complete,
            "projection of keys: the latent and the rotated key are not all its lanes; npu_mla_prolog_v3 "
            "requires [latent, rotated key] of one linear layer; join both weights",
        )


@dataclass(frozen=True)
class LatentQueries(Group):
    """Norm of the latent of the queries, and the lanes of each head of `width` lanes.

    Attributes:
        begin: first of the lanes that are multiplied by W_UK (`up`).
        first: first of the lanes that are rotated.
        source, result, dtype: orders of lanes before and after the rotation, and its dtype.
    """

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
        """Build the term of the norm of the latent `low`."""
        return p.rms_norm(x=low, gamma=self.gamma, eps=self.eps)

    def guard(self, row: LatentRow) -> None:
        """Refuse heads other than [lanes for W_UK, lanes to rotate], and another order of lanes than that of keys."""
        last = self.begin == 0 and self.first == self.up.shape[1]
        require(
            last,
            "queries: the rotated lanes of a head do not follow those without a rotation; npu_mla_prolog_v3 "
            "requires [nope, rope] in each head; permute the rows of their projection so",
        )
        complete = self.width == self.first + row.end - row.split
        require(
            complete,
            "queries: a head has more lanes than [nope, rope]; npu_mla_prolog_v3 requires all lanes of a head "
            "in one of both; drop the others from the projection",
        )
        orders = dict(queries=self.result, keys=row.result)
        require(
            self.result == row.result,
            "queries, keys: rotated queries are in {queries} order, rotated keys in {keys} order; "
            "npu_mla_prolog_v3 requires one order; rotate both alike",
            **orders,
        )

    def restored(self, query: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Return the operator's rotated queries `rope`, and absorbed ones `query`, in the layout of the model.

        Both are [B, S, N, ..] or [T, N, ..]; the results are [B, N, S, ..] or [T, N, ..].
        """
        absorbed = query.transpose(1, 2) if query.dim() == 4 else query
        rope = self.reordered(rope)
        return rope.transpose(1, 2) if self.heads_first else rope, absorbed

    def reordered(self, rope: Tensor) -> Tensor:
        """Convert rotated queries from half order to the order of the model."""
        return in_order(rope, HALF, self.result)


def _in_halves(table: Tensor, order: str, width: Any, dtype: torch.dtype) -> Tensor:
    """Convert `table` [B, S, width] in `order`, or [B, S, width / 2] of pairs, to half order and `dtype`."""
    if table.shape[-1] == width:
        return in_order(table.to(dtype), order, HALF)
    pairs = table.unsqueeze(-1).expand(*table.shape, 2)
    return (pairs if order == HALF else pairs.transpose(-1, -2)).to(dtype).flatten(-2)
