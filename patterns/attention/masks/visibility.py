"""Facet of attention: the keys that a query sees, which are all, those of a structured mask, or of a dense one.

    Visibility      the captures of the mask
    Unmasked        every query sees every key
    Structured      a causal order, a window, lengths: the operator gets these parameters, and reads no mask
    Dense           the mask itself, true where a key is hidden

A form captures `Visibility`; a lowering chooses one of the other three. For a query that sees no key the operator gives
0 and a log-sum-exp of +inf; plain attention gives the result of `fully_masked_row`, and -inf.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec

Queries = tuple[Tensor, ...]
_OWN = "mask: it differs among the sequences; a call with batch 1 requires one mask for all"


@dataclass(frozen=True)
class Visibility(Group):
    """The captures of a mask.

    Attributes:
        mask: true where a key is hidden; None where only its parameters are known, or it cannot be computed.
        levels: the numbers added to the scores, where a query without keys sees the keys that are lowered least.
        count: the number of keys that every query of a sequence sees, perhaps 0, if a dense mask is no more than that.
        mask_kind: "none", "causal_upper_left", "causal_lower_right" as in `MaskSpec`, or "dense".
        window: the number of keys before its own that a query sees.
        kv_lens: the number of visible keys of each sequence.
        kv_len: the number of visible keys of all sequences, or a tuple of one for each.
        fully_masked_row: the result of a query without keys: "zero", "mean" (of all values), "nan", "lowest" (the mean
            of values whose keys are lowered least), "lowest_or_nan" or "lowest_or_zero" (NaN or 0 where they are
            lowered by -inf); always "zero" where every query is known to see a key.
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
        """Return True if every query sees every key."""
        return self.mask_kind == "none" and self.kv_len is None and self.kv_lens is None

    def refuse_unproven(self) -> None:
        """Refuse a mask that the lowering cannot describe, before anything is computed for it."""

    def captures(self, *but: str) -> dict[str, Any]:
        """Return the captures of the mask, named as the readers name them, except `but`."""
        return {each.name: getattr(self, each.name) for each in fields(Visibility) if each.name not in but}


@dataclass(frozen=True)
class Unmasked(Visibility):
    """A mask by which every query sees every key."""

    def refuse_others(self) -> None:
        """Refuse every mask that hides a key."""
        require(
            self.kv_len is None and self.kv_lens is None,
            "keys: a window or a length leaves some out; npu_fusion_attention requires all keys of a sequence "
            "for its own tokens",
        )
        require(
            self.mask_kind == "none",
            "mask: it hides keys; npu_fusion_attention requires that every query sees every key",
        )


@dataclass(frozen=True)
class Structured(Visibility):
    """A mask described by a kind, a window and lengths."""

    def refuse_unproven(self) -> None:
        """Refuse a dense mask, unless it is a number of visible keys for each sequence."""
        proven = self.mask_kind != "dense" or self.count is not None
        require(
            proven,
            "mask: it is not proven to be causal, a window or a length of each sequence; this call requires "
            "one of these; write such a mask, or name it in the option assume",
        )

    def refuse_own(self) -> None:
        """Refuse a mask with a number of visible keys of its own for each sequence, `kv_lens` or `count`."""
        require(self.kv_lens is None and self.count is None, _OWN)

    def spec(self) -> MaskSpec:
        """Return the parameters of the mask as `MaskSpec`."""
        self.refuse_unproven()
        if self.count is not None:
            return MaskSpec(kv_lens=self.count)
        return MaskSpec(self.mask_kind, self.window, self.kv_len, self.kv_lens)

    def posed(self, queries: Queries, keys: Any) -> tuple[Queries, Structured]:
        """Return `queries` [B, N, S, D] and the mask, changed so that the operator gives the mean for sequences without
        keys.

        If plain attention gives the mean of all values there, the queries are set to 0 and see all `keys` keys; else
        nothing changes.
        """
        if self.count is None or self.fully_masked_row != "mean":
            return queries, self
        nothing = self.count <= 0
        zeroed = tuple(each.masked_fill(nothing.reshape(-1, 1, 1, 1), 0) for each in queries)
        return zeroed, replace(self, count=self.count.masked_fill(nothing, keys), fully_masked_row="zero")

    def within(self, rows: Any) -> Structured:
        """Return the mask with `rows` as the number of visible keys, unless lengths or an upper-left causal order limit
        it.

        `self` if `rows` is None.
        """
        bounded = self.kv_len is not None or self.kv_lens is not None or self.count is not None
        return self if rows is None or bounded or self.mask_kind == "causal_upper_left" else replace(self, kv_len=rows)

    def lengths_and_mask(self, source: Any, q: Tensor, keys: Any, latent: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return the lengths of keys, and the mask as further arguments of the operator: sparse mode, window and fixed
        mask.

        They are for queries `q` [B, N, S, D] over `keys` keys of `source`. `latent` is True for attention over a
        latent.
        """
        spec = source.spec(self.spec(), q.shape[2], keys, latent)
        return source.lengths(spec, q), spec.arguments(q.device, q.shape[2])

    def restored(self, y: Tensor, last: bool = False, values: Tensor | None = None) -> Tensor:
        """Set rows of `y` without a visible key to NaN where plain attention gives NaN.

        `y` is [B, N, S, E], or [B, S, N, E] for `last`. `values` are not read: `posed` has cared for a mean.
        """
        if self.count is None or self.fully_masked_row != "nan":
            return y
        return y.masked_fill((self.count <= 0).reshape(-1, 1, 1, 1), torch.nan)

    def restored_lse(self, lse: Tensor) -> Tensor:
        """Set the log-sum-exp `lse` [B, N, S, 1] of queries without a visible key to -inf."""
        spec = self.spec()
        if spec.kv_lens is None or spec.kind == "causal_lower_right":  # every query is known to see a key
            return lse
        return lse.masked_fill((spec.kv_lens <= 0).reshape(-1, 1, 1, 1), -torch.inf)


@dataclass(frozen=True)
class Dense(Visibility):
    """A mask [B or 1, 1, S, T], true where a key is hidden."""

    def refuse_own(self) -> None:
        """Refuse a mask, its `levels`, or a number of visible keys, of its own for each sequence."""
        shared = all(each is None or each.shape[0] == 1 for each in (self.shown(), self.levels))
        require(shared and self.kv_lens is None, _OWN)

    def shown(self) -> Tensor:
        """Return the mask [B or 1, 1, S, T]; refuse a visibility without one."""
        require(self.mask is not None, "mask: there is none; this call requires one")
        return self.mask

    def blind(self, last: bool = False) -> Tensor:
        """Return booleans, true for queries without a key: [B or 1, 1, S, 1], or [B or 1, S, 1, 1] for heads `last`."""
        blind = self.shown().all(-1, keepdim=True)
        return blind.transpose(1, 2) if last else blind

    def posed(self, queries: Queries, keys: Any) -> tuple[Queries, Dense]:
        """Return `queries` [B, N, S, D] and the mask, changed so that the operator gives the model's mean for rows
        without keys.

        Such queries are set to 0, and see all keys; with `levels`, those that are lowered least. Nothing changes if
        plain attention gives no mean there; `keys` is not read, as the mask has an entry for each.
        """
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
        """Return the mask as it is: it has an entry for each key."""
        return self

    def lengths_and_mask(self, source: Any, q: Tensor, keys: Any, latent: bool = False) -> tuple[Any, dict[str, Any]]:
        """Return the lengths of keys, and the mask as further arguments of the operator: the dense mask and its mode.

        They are for queries `q` [B, N, S, D] over `keys` keys of `source`. `latent` is True for attention over a
        latent, whose operator takes no sparse_mode beside the mask.
        """
        mask = source.widened(self.shown(), q.shape[0], keys)
        spec = source.spec(MaskSpec(), q.shape[2], keys, latent)
        mode = {} if latent else dict(sparse_mode=1)
        blind = {} if q.shape[2] == 1 else dict(inner_precise=2)  # 2: rows without a visible key give 0
        return source.lengths(spec, q), dict(**mode, atten_mask=mask, **blind)

    def restored(self, y: Tensor, last: bool = False, values: Tensor | None = None) -> Tensor:
        """Set rows of `y` without a visible key to NaN, or to the mean of `values` [B, M, T, E], as plain attention.

        `y` is [B, N, S, E], or [B, S, N, E] for `last`.
        """
        match self.fully_masked_row:
            case "zero":
                return y
            case "nan":
                return y.masked_fill(self.blind(last), torch.nan)
            case _:
                assert self.levels is None, (
                    "mask: queries without visible keys see those that are lowered least; this call requires "
                    "these queries to be posed without a mask tensor"
                )
                mean = _mean(values, y.shape[2 if last else 1])
                return torch.where(self.blind(last), mean.transpose(1, 2) if last else mean, y)

    def restored_lse(self, lse: Tensor) -> Tensor:
        """Set the log-sum-exp `lse` [B, N, S, 1] of queries without a visible key to -inf."""
        return lse.masked_fill(self.blind(), -torch.inf)


def _mean(values: Tensor | None, heads: Any) -> Tensor:
    """Average `values` [B, M, T, E] over the keys, repeated for `heads` query heads, as [B, N, 1, E]."""
    assert values is not None
    mean = values.mean(2, keepdim=True).unsqueeze(2).expand(-1, -1, heads // values.shape[1], -1, -1)
    return mean.flatten(1, 2)
