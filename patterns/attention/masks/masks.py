"""All masks of the scores of one attention, described by arguments of an operator: kind, window, lengths, or dense.

Single masks, and the numbers by which they hide keys, are read in `mask_terms` and `visible`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, conjuncts
from fusion.analysis.mask_formulas import Positions
from fusion.analysis.rounding import is_float
from fusion.analysis.stacked_entries import lists_all
from fusion.graph import Algebra, Value
from fusion.graph.comparisons import either
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.assume_true import assume_true
from patterns.attention.masks.bounds import Limits, bound, is_counted, per_sequence, sees_some
from patterns.attention.masks.mask_terms import (
    LOST,
    Term,
    addends,
    hidden_by,
    hides_below,
    is_finite,
    lowered,
    mask_on,
    numbers_of,
    unexpanded,
    unseen,
    visible,
)
from patterns.attention.masks.visible import MASKED, list_in, names_keys

Sizes = tuple[Any, Any, Any, Any]
MOVED = (
    "mask: it is applied before the scores are permuted or reshaped; npu_fused_infer_attention_score requires "
    "a mask of the scores [B, N, S, T]; mask them behind the permute"
)
OF_HEADS = "mask: it differs from head to head"
_ONE = "npu_fused_infer_attention_score requires one mask for all heads"
_OF_EACH = OF_HEADS + (
    f"; {_ONE}; if its heads are queries that gather keys of their own, write keys[list] with a list [S, K] of each "
    "query, which npu_sparse_flash_attention takes"
)
_OF_LISTS = OF_HEADS + (
    ", as each head, or group of heads, has its own list of {what}; npu_sparse_flash_attention requires one list "
    "of keys for all heads"
)
NOT_LOST = (
    "mask: a query that sees no key would see those that are lowered least; "
    "npu_fused_infer_attention_score requires keys to be hidden for good; mask with -inf, replace the "
    "scores, lower them by 1e30 at least, or show each query a key"
)
UNSHARED = (
    "softmax: a query that sees no key gives neither 0, NaN nor the mean of all values, as what is "
    "subtracted from its scores loses the logarithm of their number; npu_fused_infer_attention_score "
    "requires one of these; write scores.softmax(-1), hide keys by -inf, or let each query see a key"
)
_OF_PADDING = (
    "; a mask that is assumed to be padding may hide every key: pass booleans, as sdpa takes them, or "
    "assume a causal order where nothing is padded"
)


@dataclass(frozen=True)
class Masks:
    """All masks of the scores of one attention, or of one top-k choice of keys.

    Attributes:
        a: the algebra of the graph.
        positions: the evaluation of masks at the positions of the scores [*rows, T].
        terms: the masks, the outermost first.
        sizes: B, N, S and T.
        begins: the positions at which the model writes as many keys as there are queries, all of them within the keys.
        lowered: true if an assumed mask may hide every key of a query, by finite numbers or by -inf.
        shows_some: true if a mask is assumed to be [B, T] with a visible key in each sequence.
    """

    a: Algebra
    positions: Positions
    terms: Sequence[Term]
    sizes: Sizes
    begins: Collection[Affine] = ()
    lowered: Callable[[Value], bool] = lambda mask: False
    shows_some: Callable[[Value], bool] = lambda mask: False

    def visible(self) -> Formula | str:
        """Return the formula of the positions that all masks show, or the reason why it is unknown."""
        return visible(self.positions, self.terms)

    def limits(self, formula: Formula) -> Limits:
        """Read bounds on the key out of `formula` over the positions of the scores; none if a side has several."""
        rank = len(self.positions.shape)
        query, key = rank - 2, rank - 1
        highs: list[tuple[Affine, int]] = []
        lows: list[tuple[Affine, int]] = []
        rest: list[Formula] = []
        for part in self.positions.tightest(conjuncts(formula)):
            side = bound(part, query, key)
            if side is None:
                rest.append(part)
            else:
                (highs if side[0] == "high" else lows).append(side[1:])
        moving = {move for _, move in (*highs, *lows)}
        if len(highs) > 1 or len(lows) > 1 or len(moving) > 1:
            return Limits(None, None, False, conjuncts(formula))
        return Limits(highs[0][0] if highs else None, lows[0][0] if lows else None, moving == {1}, tuple(rest))

    def bounded(self, bounds: Limits) -> dict[str, Any]:
        """Describe the keys within `bounds` by captures: causal order, window, length or lengths [B]; else {}.

        A length describes several queries only if the last of them is proven to be within the keys: an operator counts
        from the last key, so that a length clamped to the keys would shift all queries.
        """
        batch, _, queries, keys = self.sizes
        high, low, moving = bounds.high, bounds.low, bounds.moving
        if bounds.rest or high is None or (low is not None and (queries == 1 or not moving)):
            return {}
        window: Any = None
        if low is not None:
            span = high + low.times(-1)
            if span.terms or not isinstance(span.constant, int):
                return {}
            window = span.constant
        order = {"mask_kind": "causal_lower_right" if moving and queries != 1 else "none", "window": window}
        if moving and not high.terms and high.constant == 0 and window is None:
            return {"mask_kind": "causal_upper_left"}
        seen = high.plus(queries if moving or queries == 1 else 1)
        if not seen.terms:
            if seen.constant == keys:
                return order
            within = isinstance(seen.constant, int) and isinstance(keys, int) and 0 < seen.constant <= keys
            return {**order, "kv_len": seen.constant} if within else {}
        inside = queries == 1 or not moving or high in self.begins or all(map(is_counted, high.terms))
        length = per_sequence(self.a, seen, batch) if inside else None
        if length is None:
            return {}
        at_most = self.a.make("at_most", (length,), (keys,), length.shape, length.dtype)  # which the operator reads
        return {**order, "kv_lens": at_most}

    def spec(
        self, empty: Empty, biased: bool = False, over: bool = False, floor: float = -math.inf
    ) -> dict[str, Any] | str:
        """Describe the masks by captures: kind, window, lengths and the dense mask; or return the reason why not.

        Args:
            empty: the results of the softmax for rows without a key.
            biased: True if a bias is added to the scores.
            over: True if the bias is added to scores that a mask has replaced.
            floor: the number to which lower scores are clamped behind the masks.
        """
        captures: dict[str, Any] = {"mask_kind": "none", "window": None, "kv_len": None, "fully_masked_row": "zero"}
        formula = self.visible()
        if isinstance(formula, str):
            return formula
        if formula is True:
            return captures | (self._explicit() if self.positions.lists_all else {})
        bounds = self.limits(formula)
        some = sees_some(bounds, *self.sizes[2:], self.positions.lengths) or self._lists_some(bounds)
        alike = "zero" if some else self._unseen(empty, over, floor)
        alike = "zero" if alike != "zero" and self._shows_some(bounds) else alike
        levels = {} if alike or empty.sunk or biased or floor > -math.inf else self._lowered(empty)
        if not (alike or levels):
            return NOT_LOST + (_OF_PADDING if self.positions.relied else "") if self.are_shared(empty) else UNSHARED
        bounded = self.bounded(bounds)
        mask = self._explicit(drop_full_lists=not bounded)
        captures |= {"mask_kind": "dense", "fully_masked_row": alike, **mask, **levels}
        if bounded and (some or (alike == "zero" and not bounds.moving)):
            return captures | bounded
        if not mask:
            return _OF_EACH if self._joined()[1][-2] == 1 != self.sizes[2] else self._per_head_reason()
        counts = not levels and "kv_lens" in bounded and not bounds.moving and bounds.low is None
        return captures | {"count": bounded["kv_lens"]} if counts else captures

    def _unseen(self, empty: Empty, over: bool, floor: float) -> str:
        """Name the result of a query that sees no key, by `unseen` with the same arguments.

        "" as well if a mask is assumed that may hide keys by -inf or by finite numbers, and the two give different
        results.
        """
        if not any(map(self._may_be_finite, self.positions.relied)):
            return unseen(self.positions, self.terms, empty, over, floor)
        results = {empty.of(number) for number in (-math.inf, LOST)}
        return results.pop() if len(results) == 1 else ""

    def _may_be_finite(self, mask: Value) -> bool:
        """Return True if the assumed `mask` may hide keys by finite numbers from a query that sees none.

        A mask of floats that shows the query a key has such numbers as well; another mask may hide that key.
        """
        has_others = sum(1 for each in self.terms for _ in addends(each)) > 1
        return self.lowered(mask) or (has_others and is_float(mask) and not self.positions.holds_ones(mask))

    def _per_head_reason(self) -> str:
        """Return the reason to refuse a mask that differs between heads: a list of keys or of blocks for each head, or
        any other.
        """
        listed = list_in(self.terms[-1].mask)
        if listed is None:
            return f"{OF_HEADS}; {_ONE}"
        return _OF_LISTS.format(what="keys" if names_keys(listed, self.sizes[3]) else "blocks of keys")

    def _shows_some(self, bounds: Limits) -> bool:
        """Return True if `bounds` are a mask [B, T] alone, of which a key is assumed to be visible in each sequence.

        The mask is recorded as relied on.
        """
        kind, leaf = bounds.rest[0] if len(bounds.rest) == 1 and not isinstance(bounds.rest[0], bool) else ("", None)
        keys = self.positions.origin[-1:]
        if kind != "is" or bounds.high is not None or bounds.low is not None or tuple(leaf.index[-1:]) != tuple(keys):
            return False
        if leaf.value.shape[-1] != self.sizes[3] or not self.shows_some(leaf.value):
            return False
        self.positions.relied.add(leaf.value)
        return True

    def _lists_some(self, bounds: Limits) -> bool:
        """Return True if each query is proven to see a key within `bounds`, whose `rest` is one condition.

        The condition, or one side of an "or", must show a listed key, the first key or the last keys within the other
        bounds.
        """
        inside = replace(bounds, rest=())
        if len(bounds.rest) != 1 or not sees_some(inside, *self.sizes[2:], self.positions.lengths):
            return False
        part = bounds.rest[0]
        choices = part[1] if not isinstance(part, bool) and part[0] == "or" else (part,)
        return any(self._lists_one(each, inside) or self._is_at_end(each, inside) for each in choices)

    def _is_at_end(self, part: Formula, inside: Limits) -> bool:
        """Return True if the condition `part` shows the first key, or the last keys, within the bounds `inside`."""
        rank = len(self.positions.shape)
        side, at, move = bound(part, rank - 2, rank - 1) or ("", None, 0)
        if at is None or inside.high is None or inside.low is not None:
            return False
        if side == "high":
            return not move and not at.terms and isinstance(at.constant, int) and at.constant >= 0
        span = inside.high + at.times(-1)
        return bool(move) == inside.moving and not span.terms and isinstance(span.constant, int) and span.constant >= 0

    def _lists_one(self, part: Formula, inside: Limits) -> bool:
        """Return True if the condition `part` is a top-k list of scores that a mask restricts to the bounds `inside`.

        As each query sees a key within `inside`, its list then has such a key.
        """
        kind, leaf = part if not isinstance(part, bool) else ("", None)
        if kind != "is" or leaf.value.op != "chosen" or leaf.index[-2:] != self.positions.origin[-2:]:
            return False
        places = leaf.value.arg.below("cast", "reshape")
        masked = places.arg.below("cast") if places.op == "largest_index" and places.attrs[0] != 0 else places
        scores = self.behind(masked)
        return scores is not None and scores.limits(scores.visible()) == inside

    def behind(self, masked: Value) -> Masks | None:
        """Return the masks of the scores that a top-k takes from `masked` [B, S, T]: only the outermost mask on them.

        None if there is none, or if a score that the mask hides may be above one that it shows.
        """
        positions = self.positions.over(masked.shape)
        for scores in masked.args[-2:] if masked.op in ("add", "where") else ():
            term = mask_on(masked, scores)
            formula = visible(positions, (term,)) if isinstance(term, Term) else term
            if isinstance(term, Term) and not isinstance(formula, str) and hides_below(positions, term):
                self.positions.relied.update(positions.relied)
                return replace(self, positions=positions, terms=(term,))
        return None

    def _explicit(self, drop_full_lists: bool = False) -> dict[str, Value]:
        """Return the dense mask [B or 1, 1, S, T], true where hidden, as a capture; {} if it differs between heads.

        `drop_full_lists` takes lists of all keys as True, so that no list is computed for the mask alone.
        """
        wide, lead = self._joined()
        if drop_full_lists:
            wide = assume_true(self.a, wide, lambda truth: truth.op == "chosen" and lists_all(truth))
        return {} if any(size != 1 for size in lead[1:-2]) else {"mask": self._without_heads(wide, lead)}

    def _without_heads(self, wide: Value, lead: Sequence[Any]) -> Value:
        """View `wide`, the same for all heads, as [B or 1, 1, S, T]; `lead` are its dims, padded with 1 in front."""
        batch, _, queries, keys = self.sizes
        flat = self.a.reshape(wide, (lead[0], 1, *lead[-2:]))
        return self.a.expand(flat, (batch if lead[0] != 1 else 1, 1, queries, keys))

    def _lowered(self, softmax: Empty) -> dict[str, Any]:
        """Return the captures "levels" and "fully_masked_row" for masks that hide by finite numbers; {} if not proven.

        If all keys of a query are hidden, the softmax weighs those that are lowered least; "levels" is the sum of the
        masks. The masks must absorb the scores, and the softmax must give equal weights to a row of one finite number,
        and 0 or NaN for a row of -inf.
        """
        total = lowered(self.a, self.terms) if self.weakest() <= LOST and self.are_shared(softmax) else None
        wide, lead = self._led(total) if total is not None else (None, ())
        infinite = softmax.of(-math.inf)
        empty = "lowest" if self._lowers_some() else f"lowest_or_{infinite}" if infinite in ("nan", "zero") else ""
        if wide is None or not empty or any(size != 1 for size in lead[1:-2]):
            return {}
        return {"fully_masked_row": empty, "levels": self._without_heads(wide, lead)}

    def _lowers_some(self) -> bool:
        """Return True if each query is proven to have a key that no mask hides by -inf.

        It is proven by one mask that may hide by -inf and shows each query a key, if there is at most one other mask,
        which hides by finite numbers.
        """
        parts = [part for each in self.terms for part in addends(each)]
        for part in parts:
            others = [each for each in parts if each is not part]
            formula = visible(self.positions, (part,))
            if len(others) < 2 and not isinstance(formula, str) and all(is_finite(self.positions, e) for e in others):
                bounds = self.limits(formula)
                if sees_some(bounds, *self.sizes[2:], self.positions.lengths):
                    return True
        return False

    def weakest(self) -> float:
        """Return the largest number by which a mask hides a key; -inf where all masks hide by -inf."""
        return max(numbers_of(self.positions, self.terms), default=-torch.inf)

    def are_shared(self, empty: Empty) -> bool:
        """Return True if the softmax gives all keys equal weights in a row of any finite number by which a mask hides a
        key.

        `empty` has the results of the softmax for rows of one number.
        """
        finite = [each for each in numbers_of(self.positions, self.terms) if each > -math.inf]
        return all(empty.of(number) == "mean" for number in finite or [MASKED])

    def blamed(self) -> Term:
        """Return the first mask whose visible positions are not known, else the last mask."""
        return next((each for each in self.terms if isinstance(visible(self.positions, (each,)), str)), self.terms[-1])

    def hidden_entries(self, lists: int) -> Value | None:
        """Return bool [*rows, T], True where the masks hide an entry of a list, where rows are the first `lists` dims.

        None if the masks differ along the other dims of the scores, those of heads.
        """
        wide, lead = self._joined()
        if any(size != 1 for size in lead[lists:-1]):
            return None
        shape = self.positions.shape
        return self.a.expand(self.a.reshape(wide, (*lead[:lists], lead[-1])), (*shape[:lists], shape[-1]))

    def _joined(self) -> tuple[Value, tuple[Any, ...]]:
        """Combine the masks that may hide a key by "or": return booleans, true where hidden, and their dims, see
        `_led`.
        """
        terms = [each for each in self.terms if not self._shows_all(each)]
        first, *others = hidden_by(self.a, terms or self.terms, self.positions.holds_ones)
        joined: Value | None = first
        for each in others:
            joined = joined and either(self.a, joined, each)
        assert joined is not None  # masks of the same scores broadcast to each other
        return self._led(joined)

    def _shows_all(self, term: Term) -> bool:
        """Return True if `term` is proven to hide no key, other than by a list that has all keys."""
        positions = self.positions.over(self.positions.shape)
        shows = visible(positions, (term,)) is True and not positions.lists_all
        self.positions.relied.update(positions.relied)
        return shows

    def _led(self, x: Value) -> tuple[Value, tuple[Any, ...]]:
        """Return `x` without an expand at its top, and its dims, preceded by 1s up to the rank of the scores."""
        wide = unexpanded(x)
        return wide, (*(1,) * (len(self.positions.shape) - wide.rank), *wide.shape)
