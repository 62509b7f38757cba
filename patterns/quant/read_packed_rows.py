"""Lines of bytes: whole numbers of 8 bits, numbers beside them, and the scales of runs of lanes, as one row of int8.

    bits(x)                                 the memory of x, read as another dtype
    byte_line(latent, rope, tile)           [int8(latent / scale) | bits(rope) | bits(scale)]

A scale, in float32, is the largest of `tile` lanes over 127; `rope` is in bfloat16.
"""

from __future__ import annotations

from math import prod

import torch

from fusion.cost import is_view
from fusion.graph import Algebra, Dim, Reading, Value
from fusion.stages.canonicalise.quantisation import Found, Misses, Places
from fusion.stages.canonicalise.translate import Out, Translated, translates

_ORDER = "a line of bytes holds {what}; that of the operator int8, bfloat16, and float32 for the scales"
_UNREAD = "whole numbers in a line of bytes are not those of runs of lanes by a scale that is the largest of each"
_SCALES = "the scales in a line of bytes are not those that its whole numbers were divided by"


@translates("aten.view.dtype")
def _bits(a: Algebra, out: Out, x: Value, dtype: torch.dtype) -> Translated:
    x = x.below("bits")
    if x.dtype == out.dtype:
        return a.reshape(x, out.shape)
    return a.make("bits", (x,), (), out.shape, out.dtype)


def readings(a: Algebra, places: Places, rows: Found, odd: Misses) -> tuple[Found, Misses]:
    """Readings of all lines of bytes; why others are none. `rows` are quantised numbers, and others that are `odd`."""
    found: Found = {}
    misses: Misses = {}
    for value in [each for each in places if each.op == "cat" and each.dtype == torch.int8]:
        made = None if is_view(places[value][0].target) else _line(a, places, value, rows, odd)
        if isinstance(made, str):
            misses[value] = ("byte_line", made)
        elif made is not None:
            found[value] = made
    return found, misses


def _line(a: Algebra, places: Places, value: Value, rows: Found, odd: Misses) -> Reading | str | None:
    parts = [_source(each) for each in value.args]
    what = [str(each.dtype).removeprefix("torch.") for each in parts]
    if value.attrs != (value.rank - 1,) or set(what) == {"int8"}:
        return None
    if what != ["int8", "bfloat16", "float32"]:
        return _ORDER.format(what=", ".join(what))
    whole, rope, scales = parts
    runs = next((rows[each] for each in rows if rows[each].op == "token_quantised" and _is(a, whole, each)), None)
    if runs is None:
        return next((why for each, (_, why) in odd.items() if _is(a, whole, each)), _UNREAD)
    latent, scale = (runs.captures[name] for name in ("x", "scale"))
    if not _is(a, scales, scale):
        return _SCALES
    latent, rope = (
        _with_lanes(a, places, each, width)
        for each, width in ((latent, whole.shape[-1]), (rope, value.args[1].shape[-1] // torch.bfloat16.itemsize))
    )
    return Reading("byte_line", {"latent": latent, "rope": rope, "tile": runs.captures["x"].shape[-1]})


def _source(piece: Value) -> Value:
    """What the bytes of a piece are; the piece itself where they are numbers."""
    below = piece.below("reshape")
    return below.arg if below.op == "bits" else piece


def _is(a: Algebra, value: Value, other: Value) -> bool:
    """Whether two values hold the same elements, perhaps with other dims."""
    alike = value.dtype == other.dtype and prod(value.shape) == prod(other.shape)
    return alike and a.reshape(value, other.shape) is other


def _with_lanes(a: Algebra, places: Places, value: Value, lanes: Dim) -> Value:
    """`value` with so many lanes in its last dim, as some node holds it if one does."""
    held = (each for each in places if each.shape[-1:] == (lanes,) and _is(a, each, value))
    return next(held, value)
