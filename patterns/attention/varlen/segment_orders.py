"""What queries of several segments see, as one call is told of all of them: an order towards the last key, a window.

A prompt, a chunk behind a cache and a single step may stand beside each other: the operator counts from the last key,
which is that of a query alone, and in a prompt of as many queries as keys that of the last query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusion.analysis.constant_folding import Folder

ROWS = 2
"""The dim of queries [B, N, S, D]."""
Said = Mapping[str, Any]
"""What is said of the attention of a segment."""

_LAST = ("none", "causal_lower_right")
"""Orders in which a single query sees every key; masks of data may hide some."""


def kind_of(every: Sequence[Said]) -> str | None:
    """What is seen in every segment; None where that differs, or a query may see nothing."""
    sizes = [(each["q"].shape[ROWS], each["k"].shape[ROWS]) for each in every]
    orders = [_from_last(each["mask_kind"], size) for each, size in zip(every, sizes, strict=True)]
    windowed = every[0]["window"] is not None
    kinds = {order for order, (queries, _) in zip(orders, sizes, strict=True) if order not in _LAST or queries != 1}
    kind, *others = kinds or {"causal_lower_right" if windowed else "none"}
    in_order = kind == "causal_lower_right" and all(queries <= keys for queries, keys in sizes)
    return kind if not others and (in_order or (kind == "none" and not windowed)) else None


def _from_last(order: str, size: tuple[Any, Any]) -> str:
    """The same order counted from the last key, where there are as many queries as keys."""
    return "causal_lower_right" if order == "causal_upper_left" and size[0] == size[1] else order


def in_one_window(folder: Folder, every: Sequence[Said]) -> list[Said]:
    """The same, where one window is that of all: it hides nothing of a short segment, or all but the last keys."""
    own = [_window(folder, each) for each in every]
    windows = {each for each in own if each is not None}
    if len(windows) != 1:
        return [*every]
    (window,) = windows
    return [
        each if each["window"] is not None else _within(each, has, window) for each, has in zip(every, own, strict=True)
    ]


def _window(folder: Folder, said: Said) -> int | None:
    """How many keys before its own a query sees: as it is said, or as the mask of a single query shows it."""
    if said["window"] is not None or said["mask_kind"] != "dense" or said["q"].shape[ROWS] != 1:
        return said["window"]
    keys, hidden = said["k"].shape[ROWS], folder.fold(said["mask"])
    if hidden is None or hidden.size != keys or hidden.all():
        return None
    before = int(hidden.sum())
    return keys - before - 1 if (hidden.reshape(-1) == (np.arange(keys) < before)).all() else None


def _within(said: Said, has: int | None, window: int) -> Said:
    """What is said of a segment that has no window in words."""
    keys = said["k"].shape[ROWS]
    if has is not None:
        return {**said, "mask_kind": "none", "window": window, "fully_masked_row": "zero"}
    short = said["mask_kind"] != "dense" and isinstance(keys, int) and keys <= window + 1
    return {**said, "window": window} if short else said
