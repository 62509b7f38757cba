"""Packed rows of a cache that the model unpacks: latents from int8 numbers by the scale of each tile, rotated keys.

    row = [int8(latent / scale) | bits(rope) | bits(scale)]     latent = round(int8 · scale)     rope = its bits

Both forms are proven by building them from the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusion import reader, word
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.proof import must, proof, proven

_ATTENDING = ("latent_keys", "latent_values", "listed_attention")
_ORDER = "packed rows hold {what}; the operator reads int8 numbers, then rotated keys, then scales in float32"

UNPACKED_LATENT = word(
    "unpacked_latent",
    "int8(row) · scale of the tile, a scale in float32, rounded to the dtype of the value [*B, C]",
    rows="[*B, Row] in int8: numbers, bits of rotated keys, bits of scales", tile="lanes that share a scale",
)  # fmt: skip
UNPACKED_ROPE = word("unpacked_rope", "the rotated keys of such rows [*B, Dr]", rows="[*B, Row] in int8")


@dataclass(frozen=True)
class Latent:
    """A latent of so many lanes that is unpacked from `rows`, with the lanes of a scale, and where scales begin."""

    rows: Value
    width: int
    tile: int
    scales: int


@proof
def latent(a: Algebra, value: Value) -> Latent | None:
    """`value` [*B, C] as what rows hold, perhaps with other dims."""
    product = value.below("cast", "reshape")
    must(product.op == "mul" and isinstance(value.shape[-1], int))
    bits = proven(next((e for e in (arg.below("reshape", "expand") for arg in product.args) if e.op == "bits"), None))
    must(bits.dtype == torch.float32 and bits.arg.op == "slice" and bits.arg.attrs[0] == bits.arg.rank - 1)
    rows, tiles, width = bits.arg.arg, bits.shape[-1], value.shape[-1]
    must(rows.dtype == torch.int8 and isinstance(tiles, int) and width % tiles == 0)
    must(bits.arg.attrs[2] == rows.shape[-1])
    start = bits.arg.attrs[1]
    built = unpacked_latent(a, rows, width, width // tiles, value.dtype)
    must(a.reshape(built, value.shape) is value)
    return Latent(rows, width, width // tiles, start)


def unpacked_latent(a: Algebra, rows: Value, width: int, tile: int, dtype: torch.dtype | None) -> Value:
    """The first `width` lanes of rows, each by the scale of its tile, which stand at the end."""
    lead, tiles, end = rows.shape[:-1], width // tile, int(rows.shape[-1])
    of_scales = a.cut(rows, -1, end - tiles * torch.float32.itemsize, end)
    scales = a.make("bits", (of_scales,), (), (*lead, tiles), torch.float32)
    whole = a.cast(a.reshape(a.cut(rows, -1, 0, width), (*lead, tiles, tile)), torch.float32)
    product = proven(a.mul(whole, a.reshape(scales, (*lead, tiles, 1))))
    return a.cast(a.reshape(product, (*lead, width)), dtype)


@proof
def rope(a: Algebra, value: Value) -> tuple[Value, int, int] | None:
    """Rows of which `value` [*B, Dr] is the bits of some bytes; the first of them, and the one behind the last."""
    bits = value.below("reshape")
    must(bits.op == "bits" and bits.arg.op == "slice" and bits.arg.attrs[0] == bits.arg.rank - 1)
    must(bits.arg.arg.dtype == torch.int8 and bits.shape[-1] == value.shape[-1])
    return bits.arg.arg, bits.arg.attrs[1], bits.arg.attrs[2]


@reader(gives=(UNPACKED_LATENT, UNPACKED_ROPE), needs=_ATTENDING)
def unpacked_rows(graph: Graph) -> Iterator[Found]:
    """Latents and rotated keys of attention that are unpacked from the rows of one cache; why others are not."""
    a = graph.algebra
    for _, attended in graph.readings.all("latent_keys"):
        of_latent, of_rope = attended.captures["latent"], attended.captures.get("rope")
        found, turned = latent(a, of_latent), None if of_rope is None else rope(a, of_rope)
        if found is None or turned is None or turned[0] is not found.rows:
            continue
        if (of_latent.shape[-1], found.scales) != turned[1:]:
            yield of_latent, Miss("sparse_attention", _ORDER.format(what="their parts in another order"))
            continue
        yield of_latent, Reading("unpacked_latent", {"rows": found.rows, "tile": found.tile})
        yield of_rope, Reading("unpacked_rope", {"rows": found.rows})
