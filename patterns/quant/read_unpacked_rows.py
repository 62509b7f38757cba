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
_ORDER = "packed rows hold their parts in another order: the operator reads int8 numbers, rotated keys, then scales"

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
    must(product.op == "mul")
    bits = proven(next((e for e in (arg.below("reshape", "expand") for arg in product.args) if e.op == "bits"), None))
    must(bits.dtype == torch.float32 and bits.arg.op == "slice" and bits.arg.attrs[0] == bits.arg.rank - 1)
    rows, tiles, width = bits.arg.arg, bits.shape[-1], value.shape[-1]
    must(rows.dtype == torch.int8 and isinstance(tiles, int) and isinstance(width, int))
    assert isinstance(tiles, int)
    assert isinstance(width, int)
    must(tiles and width % tiles == 0)
    found = Latent(rows, width, width // tiles, bits.arg.attrs[1])
    forms = (form(a, found, rows, value.dtype) for form in (unpacked, _by_lane))
    must(any(a.reshape(form, value.shape) is value for form in forms))
    return found


def unpacked(a: Algebra, like: Latent, rows: Value, dtype: torch.dtype | None) -> Value:
    """The latent of rows that are packed as those of another, each tile by its scale."""
    lead, tiles = rows.shape[:-1], like.width // like.tile
    whole = a.reshape(a.cut(rows, -1, 0, like.width), (*lead, tiles, like.tile))
    product = proven(a.mul(a.cast(whole, torch.float32), _scales(a, like, rows)))
    return a.cast(a.reshape(product, (*lead, like.width)), dtype)


def _by_lane(a: Algebra, like: Latent, rows: Value, dtype: torch.dtype | None) -> Value:
    """The same where the model repeats scales for every lane."""
    scales = _scales(a, like, rows)
    lanes = a.reshape(a.expand(scales, (*scales.shape[:-1], like.tile)), (*rows.shape[:-1], like.width))
    return a.cast(proven(a.mul(a.cast(a.cut(rows, -1, 0, like.width), torch.float32), lanes)), dtype)


def _scales(a: Algebra, like: Latent, rows: Value) -> Value:
    """The numbers [.., tiles, 1] in float32 whose bits rows hold."""
    tiles = like.width // like.tile
    part = a.cut(rows, -1, like.scales, like.scales + tiles * torch.float32.itemsize)
    scales = a.make("bits", (part,), (), (*rows.shape[:-1], tiles), torch.float32)
    return a.reshape(scales, (*scales.shape, 1))


@proof
def rope(value: Value) -> tuple[Value, int, int] | None:
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
        of_latent, of_rope = attended.captures["latent"], attended.captures["rope"]
        found, turned = latent(a, of_latent), rope(of_rope)
        if found is None or turned is None or turned[0] is not found.rows:
            continue
        end = found.scales + found.width // found.tile * torch.float32.itemsize
        if (found.width, found.scales, found.rows.shape[-1]) != (*turned[1:], end):
            yield of_latent, Miss("sparse_attention", _ORDER)
            continue
        yield of_latent, Reading("unpacked_latent", {"rows": found.rows, "tile": found.tile})
        yield of_rope, Reading("unpacked_rope", {"rows": found.rows})
