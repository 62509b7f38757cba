"""y[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j]  (Su et al., RoFormer, 2021).

*Matches* the rotation of pairs of lanes in every spelling, real or complex: the canonicaliser proves it lane by lane
and gives full-width tables. Pairs are (j, j + D/2), "half", or (2j, 2j + 1), "interleaved"; input and output may
differ. *Replaces with* `npu_rotary_mul` or `npu_interleave_rope`, which compute in float32: what is widened for that
and rounded again is rotated as it is, by tables of its dtype, where that takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor, variants


def four_dims(x: Tensor) -> Tensor:
    """Give x [.., D] leading dims of size 1 up to four dims; the kernels read four."""
    require(x.dim() <= 4, "{rank} dims are more than the four that the operator reads", rank=x.dim())
    for _ in range(4 - x.dim()):
        x = x.unsqueeze(0)
    return x


def dims_of(y: Tensor, x: Tensor) -> Tensor:
    """Take from y the dims of size 1 that `four_dims` has given to x."""
    return y if y.dim() == x.dim() else y.reshape(x.shape)


def to_halves(x: Tensor) -> Tensor:
    """Lanes (2p, 2p + 1) to (p, p + D/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def to_pairs(x: Tensor) -> Tensor:
    """Lanes (p, p + D/2) to (2p, 2p + 1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, order: str, matrix: Tensor | None = None) -> Tensor:
    """One operator, both sides in one order; x and the tables [.., D], read in the order in which x lies in memory.

    With a matrix [D, D] the operator multiplies by it where else it would turn the lanes itself.
    """
    ranked = [four_dims(each) for each in (x, cos, sin)]
    swapped = ranked[0].stride(1) < ranked[0].stride(2)
    if swapped:
        ranked = [each.transpose(1, 2) for each in ranked]
    y = torch.ops.npu.npu_rotary_mul(*ranked, order, matrix)
    return (y.transpose(1, 2) if swapped else y).reshape(x.shape)


def turning(like: Tensor) -> Tensor:
    """The matrix [D, D] that turns pairs, x · matrix = (-x₁, x₀, -x₃, x₂, …), for lanes of a tensor [.., D]."""
    width: Any = like.shape[-1]
    first, second = torch.eye(width, dtype=like.dtype, device=like.device).reshape(-1, 2, width).unbind(1)
    return torch.stack((second, -first), dim=1).reshape(width, width)


@dataclass(frozen=True)
class Turned(Group):
    """Lanes that are rotated, in which orders their pairs stand, and the dtype of the result."""

    x: Any = tensor("*B D")
    cos: Any = tensor("*T D")
    sin: Any = tensor("*U D")
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def term(self, p, word: str, **beside: Any):
        """A rotation of them, by the word for it, and what that captures beside, or of other lanes in its place."""
        return getattr(p, word)(**vars(self) | beside)

    def rounded(self, y: Tensor) -> Tensor:
        """A result in the dtype of the model."""
        return y.to(self.dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both tables [.., D] as the operators read them."""
        return self.cos, self.sin

    def tables_by_batch(self) -> tuple[Tensor, Tensor]:
        """The same written out for every sequence, [B, .., D], for chips whose kernels do not broadcast the batch."""
        batch = four_dims(self.x).shape[0]
        spread = (four_dims(each) for each in (self.cos, self.sin))
        cos, sin = (_for_batch(each, batch) for each in spread)
        cos, sin = (each.contiguous() for each in replace(self, cos=cos, sin=sin).tables())
        return cos, sin

    def by(self, order: str, matrix: Tensor | None = None) -> Tensor:
        """The rotation by `rotary_mul`."""
        return self.rounded(rotary_mul(self.x, *self.tables(), order, matrix))


@dataclass(frozen=True)
class Widened(Turned):
    """Lanes that are rotated in float32 and rounded back to their own dtype, by tables of every lane or of every pair.

    What a table in float32 loses in that dtype is no more than a rotated lane is rounded by.
    """

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")

    def term(self, p, word: str, **beside: Any):
        """The same of their cast, rounded back to their dtype; tables may be narrow themselves."""
        tables = {"cos": self.cos, "sin": self.sin}
        wide = {name: p.maybe_cast(p.maybe_repeated(of, 2), to=torch.float32) for name, of in tables.items()}
        captured = vars(self) | wide | beside
        captured["x"] = p.cast(captured["x"], to=torch.float32)
        return p.as_dtype(getattr(p, word)(**captured), self.x)

    def rounded(self, y: Tensor) -> Tensor:
        """As it is."""
        return y

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both in the dtype of the lanes, those of pairs written out on the way."""
        cos, sin = (self._written_out(each) for each in (self.cos, self.sin))
        return cos, sin

    def _written_out(self, table: Tensor) -> Tensor:
        if table.shape[-1] == self.x.shape[-1]:
            return table.to(self.x.dtype)
        return table.unsqueeze(-1).expand(*table.shape, 2).to(self.x.dtype).flatten(-2)


TURNED = (Turned, Widened)


def _for_batch(table: Tensor, batch: int) -> Tensor:
    require(table.shape[0] != batch, "the tables are there for every sequence")
    return table.expand(batch, -1, -1, -1)


@dataclass(frozen=True)
class Rope(Rule):
    """Rotary position embedding of one tensor."""

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The meaning in half order: x [*B, D], tables broadcast to it."""
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    @pattern
    @variants(turned=TURNED)
    def rotated(self, p, turned):
        """All lanes are rotated."""
        return turned.term(p, "rotation")

    @lowering
    def half(self, turned: Turned):
        """Half order on both sides."""
        require(turned.source == turned.result == "half", "the lanes are not in half order")
        return turned.by("half")

    @lowering
    def pairs(self, turned: Turned):
        """Interleaved order on both sides."""
        require(turned.source == turned.result == "interleaved", "the lanes are not in interleaved order")
        return turned.by("interleave")

    @lowering
    def pairs_by_matrix(self, turned: Turned):
        """The same by a constant matrix, for compilers that cannot say which lanes are turned."""
        require(turned.source == turned.result == "interleaved", "the lanes are not in interleaved order")
        return turned.by("interleave", turning(turned.x))

    @lowering
    def pairs_to_half(self, turned: Turned):
        """Interleaved in, half out: x [B, N, S, D] with tables that do not depend on N."""
        orders = turned.source, turned.result
        require(orders == ("interleaved", "half"), "the lanes do not go from interleaved to half order")
        x, cos, sin = (four_dims(each) for each in (turned.x, *turned.tables()))
        return turned.rounded(torch.ops.npu.npu_interleave_rope(x, cos, sin).reshape(turned.x.shape))

    @lowering
    def pairs_to_half_by_batch(self, turned: Turned):
        """The same with tables for every sequence."""
        cos, sin = turned.tables_by_batch()
        return self.pairs_to_half(replace(turned, cos=cos, sin=sin))

    @lowering
    def rows_to_half(self, turned: Turned):
        """The same for x [B, S, N, D]: every position is a batch entry of its own."""
        x, tables = turned.x, turned.tables()
        one = all(each.dim() == 4 and each.shape[2] == 1 for each in tables)
        require(x.dim() == 4 and one, "the tables depend on the heads")
        cos, sin = (each.expand(*x.shape[:2], 1, x.shape[3]).reshape(-1, 1, 1, x.shape[3]) for each in tables)
        rows = x.reshape(-1, x.shape[2], 1, x.shape[3])
        return self.pairs_to_half(replace(turned, x=rows, cos=cos, sin=sin)).reshape(x.shape)

    @lowering
    def through_half(self, turned: Turned):
        """Any orders, by reordering lanes around the rotation in half order."""
        require("interleaved" in (turned.source, turned.result), "the lanes are in half order already")
        x = to_halves(turned.x) if turned.source == "interleaved" else turned.x
        if turned.result == "half":
            return replace(turned, x=x).by("half")
        cos, sin = map(to_halves, turned.tables())
        return to_pairs(replace(turned, x=x, cos=cos, sin=sin).by("half"))
