"""Masks of several segments, described to one call by one causal order and one window.

Prompts, chunks behind a cache and single decoding steps may be mixed. The operator counts from the last key of a
segment, which for a single query, or for as many queries as keys, is also the key of the last query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusion.analysis.constant_folding import Folder
from fusion.graph import Algebra

ROWS = 2
"""The dim of queries [B, N, S, D]."""
Captures = Mapping[str, Any]
"""The captures of the attention of a segment."""

_LAST = ("none", "causal_lower_right")
"""Orders in which a single query sees every key; masks of data may hide some."""


def kind_of(every: Sequence[Captures]) -> str | None:
    """Return the one mask kind of the segments `every`, "none" or "causal_lower_right"; None if no single kind fits.

    A segment of one query fits both; upper-left over as many keys as queries is lower-right. No kind fits if kinds
    differ, if queries outnumber keys in a causal order, or if the kind is "none" under a window.
    """
    sizes = [(each["q"].shape[ROWS], each["k"].shape[ROWS]) for each in every]
    orders = [_from_last(each["mask_kind"], size) for each, size in zip(every, sizes, strict=True)]
    windowed = every[0]["window"] is not None
    kinds = {order for order, (queries, _) in zip(orders, sizes, strict=True) if order not in _LAST or queries != 1}
    kind, *others = kinds or {"causal_lower_right" if windowed else "none"}
    in_order = kind == "causal_lower_right" and all(queries <= keys for queries, keys in sizes)
    return kind if not others and (in_order or (kind == "none" and not windowed)) else None


def _from_last(order: str, size: tuple[Any, Any]) -> str:
    """Return the causal `order` of a segment of `size` (queries, keys), as lower-right if it has as many keys as
    queries.

    An upper-left order is the same mask then; any other `order` is returned as it is.
    """
    return "causal_lower_right" if order == "causal_upper_left" and size[0] == size[1] else order


def in_one_window(folder: Folder, every: Sequence[Captures]) -> list[Captures]:
    """Return the captures of all segments `every` with one window: the only one that any of them has.

    Unchanged if there is none, if there are several, or if in a segment without it the window hides other keys than the
    segment's mask does.
    """
    own = [_window(folder, each) for each in every]
    windows = {each for each in own if each is not None}
    if len(windows) != 1:
        return [*every]
    (window,) = windows
    return [
        each if each["window"] is not None else _within(each, has, window) for each, has in zip(every, own, strict=True)
    ]


def _window(folder: Folder, captures: Captures) -> int | None:
    """Return how many keys before its own a query sees, by the window in `captures`.

    For one query, also by a constant dense mask that hides the first keys alone. None if there is neither.
    """
    if captures["window"] is not None or captures["mask_kind"] != "dense" or captures["q"].shape[ROWS] != 1:
        return captures["window"]
    keys, hidden = captures["k"].shape[ROWS], folder.fold(captures["mask"])
    if hidden is None or hidden.size != keys or hidden.all():
        return None
    before = int(hidden.sum())
    return keys - before - 1 if (hidden.reshape(-1) == (np.arange(keys) < before)).all() else None


def _within(captures: Captures, has: int | None, window: int) -> Captures:
    """Return `captures` of a segment with the `window` of another, if the mask of the segment stays the same.

    It does if the segment `has` a window, which is then `window`, or if the window hides none of its keys. Else
    `captures` as they are.
    """
    keys = captures["k"].shape[ROWS]
    if has is not None:
        return {**captures, "mask_kind": "none", "window": window, "fully_masked_row": "zero"}
    short = captures["mask_kind"] != "dense" and isinstance(keys, int) and keys <= window + 1
    return {**captures, "window": window} if short else captures


def visible_rows(a: Algebra, captures: Captures) -> Captures:
    """Slice keys and values to the `kv_len` that are visible.

    Captures with a dense mask stay as they are, since it has an entry for each key.
    """
    keys = captures.get("kv_len")
    if not isinstance(keys, int) or captures["mask_kind"] == "dense":
        return captures
    visible = {name: a.cut(captures[name], ROWS, 0, keys) for name in ("k", "v")}
    return {**captures, **visible, "kv_len": None, "mask": None}
