"""The facet of attention that says which keys a query sees: all, those of a structured mask, or those of a dense one.

    Visibility      what was read of the mask
    Unmasked        every query sees every key
    Structured      a causal order, a window, lengths: the operator is told so, and reads no mask
    Dense           the mask itself, true where a key is hidden

A form captures `Visibility`; a lowering chooses as which of the three it is put to the operator. A query that sees no
key gives 0 in the operator, and a log-sum-exp of +inf; plain attention gives what `fully_masked_row` says, and -inf.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec

Queries = tuple[Tensor, ...]
_OWN = "sequences do not all see the same"


@dataclass(frozen=True)
class Visibility(Group):
    """What was read of a mask.

    Attributes:
        mask: true where a key is hidden; None where there are only words for it, or it cannot be computed.
        count: how many keys every query of a sequence sees, which may be none, where a dense mask says no more.
        kv_lens, kv_len: how many keys are seen, of each sequence or of all.
        mask_kind: "none", "causal_upper_left", "causal_lower_right" as in `MaskSpec`, or "dense".
        window: how many keys before its own a query sees.
        fully_masked_row: what a query without keys gives: "zero", "mean" (of all values), "nan", "lowest" (the mean of
            values whose keys are lowered least), "lowest_or_nan" or "lowest_or_zero" (NaN or 0 where they are lowered
            by -inf); always "zero" where every query is known to see a key.
        levels: by how much keys are lowered, where a query without keys sees those that are lowered least.
    """

    mask: Any = tensor("*L S T", optional=True, needed=False)
    levels: Any = tensor("*L S T", optional=True)
    count: Any = tensor("B", optional=True)
    kv_lens: Any = tensor("B", optional=True)
    mask_kind: Any = attribute()
    window: Any = attribute()
    kv_len: Any = attribute()
    fully_masked_row: Any = attribute()

    def hides_nothing(self) -> bool:
        """Whether every query sees every key."""
        return self.mask_kind == "none" and self.kv_len is None and self.kv_lens is None

    def refuse_unproven(self) -> None:
        """Refuse what a lowering is not told: before anything is computed for it."""

    def said(self, *but: str) -> dict[str, Any]:
        """As the readers say it, of everything or of what has other names."""
        return {each.name: getattr(self, each.name) for each in fields(Visibility) if each.name not in but}


@dataclass(frozen=True)
class Unmasked(Visibility):
    """Every query sees every key."""

    def refuse_others(self) -> None:
        """Refuse whatever hides a key."""
        require(self.kv_len is None and self.kv_lens is None, "not a whole sequence attends to itself")
        require(self.mask_kind == "none", "a query does not see every key")


@dataclass(frozen=True)
class Structured(Visibility):
    """What is seen, told in words."""

    def refuse_unproven(self) -> None:
        """Refuse a mask for which there are no words."""
        proven = self.mask_kind != "dense" or self.count is not None
        require(proven, "what the mask lets through is not proven to be causal, a window or a length")

    def refuse_own(self) -> None:
        """Refuse what a sequence sees that others do not."""
        require(self.kv_lens is None and self.count is None, _OWN)

    def spec(self) -> MaskSpec:
        """The words."""
        self.refuse_unproven()
        if self.count is not None:
            return MaskSpec(kv_lens=self.count)
        return MaskSpec(self.mask_kind, self.window, self.kv_len, self.kv_lens)

    def posed(self, queries: Queries, keys: Any) -> tuple[Queries, Structured]:
        """Queries [B, N, S, D] that are 0 and see all keys where, without one, they give the mean of all values."""
        if self.count is None or self.fully_masked_row != "mean":
            return queries, self
        nothing = self.count <= 0
        zeroed = tuple(each.masked_fill(nothing.reshape(-1, 1, 1, 1), 0) for each in queries)
        return zeroed, replace(self, count=self.count.masked_fill(nothing, keys), fully_masked_row="zero")

    def within(self, rows: Any) -> Structured:
        """The same of the first so many keys, None for all that there are."""
        told = self.kv_len is not None or self.kv_lens is not None or self.count is not None
        return self if rows is None or told or self.mask_kind == "causal_upper_left" else replace(self, kv_len=rows)

    def asked(self, source: Any, q: Tensor, keys: Any, latent: bool = False) -> tuple[Any, dict[str, Any]]:
        """Of queries [B, N, S, D] over the keys of a source: lengths, and what else the operator is told."""
        spec = source.spec(self.spec(), q.shape[2], keys, latent)
        return source.lengths(spec, q), spec.arguments(q.device, q.shape[2])

    def restored(self, y: Tensor, last: bool = False, values: Tensor | None = None) -> Tensor:
        """The result [B, N, S, E], or heads `last` [B, S, N, E], with what plain attention gives without a key."""
        if self.count is None or self.fully_masked_row != "nan":
            return y
        return y.masked_fill((self.count <= 0).reshape(-1, 1, 1, 1), torch.nan)

    def restored_lse(self, lse: Tensor) -> Tensor:
        """The log-sum-exp [B, N, S, 1] with -inf for a query without keys."""
        spec = self.spec()
        if spec.kv_lens is None or spec.kind == "causal_lower_right":  # of which every query is known to see a key
            return lse
        return lse.masked_fill((spec.kv_lens <= 0).reshape(-1, 1, 1, 1), -torch.inf)


@dataclass(frozen=True)
class Dense(Visibility):
    """What is seen, shown by the mask [B or 1, 1, S, T]."""

    def refuse_own(self) -> None:
        """As of `Structured`."""
        shared = all(each is None or each.shape[0] == 1 for each in (self.shown(), self.levels))
        require(shared and self.kv_lens is None, _OWN)

    def shown(self) -> Tensor:
        """The mask."""
        require(self.mask is not None, "there is no mask")
        return self.mask

    def blind(self, last: bool = False) -> Tensor:
        """Which queries see nothing, [B or 1, 1, S, 1], or [B or 1, S, 1, 1] beside heads that come `last`."""
        blind = self.shown().all(-1, keepdim=True)
        return blind.transpose(1, 2) if last else blind

    def posed(self, queries: Queries, keys: Any) -> tuple[Queries, Dense]:
        """As of `Structured`; or such queries see the keys that are lowered least."""
        if self.levels is None and self.fully_masked_row != "mean":
            return queries, self
        if self.levels is None:
            nothing, empty = self.blind(), "zero"
            mask = self.shown() & ~nothing
        else:
            finite = self.fully_masked_row == "lowest"
            least = self.levels.amax(-1, keepdim=True)
            mask = self.levels < (least if finite else least.clamp(min=torch.finfo(least.dtype).min))
            nothing, empty = least < 0, "zero" if finite else self.fully_masked_row.removeprefix("lowest_or_")
        opened = replace(self, mask=mask, levels=None, fully_masked_row=empty)
        return tuple(each.masked_fill(nothing, 0) for each in queries), opened

    def within(self, rows: Any) -> Dense:
        """The mask speaks of so many keys itself."""
        return self

    def asked(self, source: Any, q: Tensor, keys: Any, latent: bool = False) -> tuple[Any, dict[str, Any]]:
        """As of `Structured`, with the mask."""
        mask = source.widened(self.shown(), q.shape[0], keys)
        spec = source.spec(MaskSpec(), q.shape[2], keys, latent)
        mode = {} if latent else dict(sparse_mode=1)
        blind = {} if q.shape[2] == 1 else dict(inner_precise=2)  # queries that see nothing give 0
        return source.lengths(spec, q), dict(**mode, atten_mask=mask, **blind)

    def restored(self, y: Tensor, last: bool = False, values: Tensor | None = None) -> Tensor:
        """As of `Structured`; `values` [B, M, T, E] have the mean that was not asked of the operator."""
        match self.fully_masked_row:
            case "zero":
                return y
            case "nan":
                return y.masked_fill(self.blind(last), torch.nan)
            case _:
                assert self.levels is None, "queries that see the keys that are lowered least are posed so before"
                mean = _mean(values, y.shape[2 if last else 1])
                return torch.where(self.blind(last), mean.transpose(1, 2) if last else mean, y)

    def restored_lse(self, lse: Tensor) -> Tensor:
        """As of `Structured`."""
        return lse.masked_fill(self.blind(), -torch.inf)


def _mean(values: Tensor | None, heads: Any) -> Tensor:
    """The mean of values [B, M, T, E] for each of the heads, [B, N, 1, E]."""
    assert values is not None
    mean = values.mean(2, keepdim=True).unsqueeze(2).expand(-1, -1, heads // values.shape[1], -1, -1)
    return mean.flatten(1, 2)
