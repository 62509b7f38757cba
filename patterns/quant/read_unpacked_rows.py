"""Unpacked rows of a cache: latents that are dequantised by the scale of each tile, and rotated keys.

    row = [int8(latent / scale) | bits(rope) | bits(scale)]     latent = round(int8 · scale)     rope = its bits

Latents and rotated keys are proven by building them from the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusion import reader, word
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.proof_steps import must, proof, proven

_ATTENDING = ("latent_keys", "latent_values", "listed_attention")
_ORDER = (
    "packed row: its parts are in another order; npu_kv_quant_sparse_flash_attention requires int8 of "
    "the latent, the rotated key, then scales; store them so"
)

UNPACKED_LATENT = word(
    "unpacked_latent",
    "int8 lanes of a packed row times the scale of their tile, in float32, rounded to the dtype of the value [*B, C]",
    rows="[*B, Row] in int8: the latent, the bits of the rotated key, the bits of scales",
    tile="lanes that share a scale",
)  # fmt: skip
UNPACKED_ROPE = word("unpacked_rope", "the rotated keys [*B, Dr] of packed rows", rows="[*B, Row] in int8")


@dataclass(frozen=True)
class Latent:
    """A latent of `width` lanes that is unpacked from `rows`.

    Attributes:
        tile: lanes that share a scale.
        scales: the byte of a row at which its scales begin.
    """

    rows: Value
    width: int
    tile: int
    scales: int


@proof
def latent(a: Algebra, value: Value) -> Latent | None:
    """Read `value` [*B, C], up to a reshape, as the latent that is unpacked from rows."""
    product = value.below("cast", "reshape")
    must(product.op == "mul")
    bits = proven(next((e for e in (arg.below("reshape", "expand") for arg in product.args) if e.op == "bits"), None))
    must(bits.dtype == torch.float32 and bits.arg.op == "slice" and bits.arg.attrs[0] == bits.arg.rank - 1)
    rows, tiles, width = bits.arg.arg, bits.shape[-1], value.shape[-1]
    must(rows.dtype == torch.int8 and isinstance(tiles, int) and isinstance(width, int))
    assert isinstance(tiles, int)
    assert isinstance(width, int)
    must(tiles and width % tiles == 0)
    layout = Latent(rows, width, width // tiles, bits.arg.attrs[1])
    forms = (expected(a, layout, rows, value.dtype) for expected in (unpacked, _by_lane))
    must(any(a.reshape(expected, value.shape) is value for expected in forms))
    return layout


def unpacked(a: Algebra, like: Latent, rows: Value, dtype: torch.dtype | None) -> Value:
    """Build the latent [.., C] in `dtype` of `rows` with the layout of `like`, tile by tile."""
    lead, tiles = rows.shape[:-1], like.width // like.tile
    int8 = a.reshape(a.cut(rows, -1, 0, like.width), (*lead, tiles, like.tile))
    product = proven(a.mul(a.cast(int8, torch.float32), _scales(a, like, rows)))
    return a.cast(a.reshape(product, (*lead, like.width)), dtype)


def _by_lane(a: Algebra, like: Latent, rows: Value, dtype: torch.dtype | None) -> Value:
    """Build the latent [.., C] in `dtype` of `rows` with the layout of `like`, with scales expanded to every lane."""
    scales = _scales(a, like, rows)
    lanes = a.reshape(a.expand(scales, (*scales.shape[:-1], like.tile)), (*rows.shape[:-1], like.width))
    return a.cast(proven(a.mul(a.cast(a.cut(rows, -1, 0, like.width), torch.float32), lanes)), dtype)


def _scales(a: Algebra, like: Latent, rows: Value) -> Value:
    """Build the scales [.., tiles, 1] in float32 from the bits in `rows`."""
    tiles = like.width // like.tile
    part = a.cut(rows, -1, like.scales, like.scales + tiles * torch.float32.itemsize)
    scales = a.make("bits", (part,), (), (*rows.shape[:-1], tiles), torch.float32)
    return a.reshape(scales, (*scales.shape, 1))


@proof
def rope(value: Value) -> tuple[Value, int, int] | None:
    """Return the rows of which `value` [*B, Dr] is the bits of some bytes, with the first byte and the end."""
    bits = value.below("reshape")
    must(bits.op == "bits" and bits.arg.op == "slice" and bits.arg.attrs[0] == bits.arg.rank - 1)
    must(bits.arg.arg.dtype == torch.int8 and bits.shape[-1] == value.shape[-1])
    return bits.arg.arg, bits.arg.attrs[1], bits.arg.attrs[2]


@reader(gives=(UNPACKED_LATENT, UNPACKED_ROPE), needs=_ATTENDING)
def unpacked_rows(graph: Graph) -> Iterator[Annotation]:
    """Read every latent and rotated key of an attention that is unpacked from the rows of one cache.

    Rows whose parts have another order are reported.
    """
    a = graph.algebra
    for _, attended in graph.readings.all("latent_keys"):
        nope, rotated = attended.captures["latent"], attended.captures["rope"]
        layout, keys = latent(a, nope), rope(rotated)
        if layout is None or keys is None or keys[0] is not layout.rows:
            continue
        end = layout.scales + layout.width // layout.tile * torch.float32.itemsize
        if (layout.width, layout.scales, layout.rows.shape[-1]) != (*keys[1:], end):
            yield nope, Miss("sparse_attention", _ORDER)
            continue
        yield nope, Reading("unpacked_latent", {"rows": layout.rows, "tile": layout.tile})
        yield rotated, Reading("unpacked_rope", {"rows": layout.rows})
