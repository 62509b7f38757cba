"""The prologue of latent attention by its parts: how layers are computed, where rows go, and what multiplies latents.

`cell(layers, store, factors)` puts one model together; what the operator allows is said in `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from torch import Tensor

from fusion import Example
from tests.examples import latent_model as mla
from tests.examples.caches import copied, in_nz, shapes
from tests.examples.latent_model import B, Factors, Setting, fresh, model, paged
from tests.examples.mla_prolog_int8 import by_channel, by_tensor, by_tile, rows_of_bytes

C, DR, T = 64, 32, 32
INT8 = {"float": (), "int8 heads": ("uq",), "int8": mla.LAYERS}
"""Layers -> those in W8A8."""
MODES = {"float": (0,), "int8 heads": (0, 2, 3), "int8": (0, 1, 3)}
"""Layers -> the modes of the caches that the operator takes with them."""


@dataclass(frozen=True)
class Stored:
    """The mode of the caches, the inputs, what is written and read, and what attends to it."""

    mode: int
    setting: Setting
    store: mla.Store
    attend: mla.Attention = mla.expanded


PAGES = Setting(1, shapes(C, DR), c=C, dr=DR)
CHANNEL = replace(PAGES, int8_caches=(True, True))
TENSOR = replace(PAGES, int8_caches=(True, False), one_scale=True)
STORES = {
    "fresh": Stored(0, replace(PAGES, queries=2, shapes=()), fresh),
    "rows": Stored(0, replace(PAGES, shapes=((B, T, C), (B, T, DR)), at=5), mla.in_rows(copied)),
    "pages": Stored(0, PAGES, paged()),
    "NZ": Stored(0, replace(PAGES, shapes=shapes(C, DR, 16)), paged(in_nz)),
    "int8 by channel": Stored(2, CHANNEL, paged(encoding=by_channel())),
    "int8 by channel, NZ": Stored(2, replace(CHANNEL, shapes=shapes(C, DR, 32)), paged(in_nz, by_channel())),
    "int8 by tensor": Stored(1, TENSOR, paged(encoding=by_tensor()), mla.over_int8),
    "int8 by tensor, NZ": Stored(
        1, replace(TENSOR, shapes=shapes(C, DR, 32, 16)), paged(in_nz, by_tensor()), mla.over_int8
    ),
    "packed": Stored(3, replace(PAGES, c=256, made=rows_of_bytes(256, DR)), paged(encoding=by_tile())),
}
"""Where rows go, and the mode of the caches."""


def cell(
    layers: str,
    store: str,
    factors: Factors = Factors(),
    refusal: str = "",
    instead: str = "",
    also: Callable[[Tensor], Tensor] | None = None,
    orders: tuple[str, str] = ("interleaved", "half"),
    joint: bool = False,
) -> Example:
    """The example of one cell, of a token in a cache or of two without one."""
    said = "".join(f", {name} x {by}" for name, by in vars(factors).items() if by != 1)
    said += f", {orders[0]} to {orders[1]}" * (orders != ("interleaved", "half")) + ", joined" * joint
    kind, turn = STORES[store], partial(mla.turned, source=orders[0], result=orders[1])
    rotate = partial(mla.rope_last, factors=factors, turn=turn)
    function = model(kind.store, kind.attend, rotate, factors, turn=turn, joint=joint, also=also)
    setting = replace(kind.setting, int8=INT8[layers])
    return Example(f"{layers} layers, {store}{said}", function, setting, refusal, instead)


ORDERS = tuple(product(("half", "interleaved"), repeat=2))
"""How pairs lie, in the lanes that are rotated and in the result."""
IN_PAIRS = "its lanes are in pairs (interleaved order)"
JOINTLY = (("float", "rows"), ("int8 heads", "pages"), ("int8", "fresh"), ("int8", "packed"))
"""Cells of which both layers of x are one."""


def legal() -> Iterator[tuple[str, str]]:
    """The cells that the operator takes."""
    return ((layers, store) for layers, store in product(INT8, STORES) if STORES[store].mode in MODES[layers])


def illegal() -> Iterator[tuple[str, str]]:
    """All others."""
    return (each for each in product(INT8, STORES) if each not in legal())


EXAMPLES = (
    cell("float", "rows", Factors(latent=2.0)),
    cell("int8 heads", "rows", Factors(latent=2.0, row=0.5)),
    cell("int8 heads", "pages", Factors(parts=2.0, row=0.5)),
    cell("int8", "fresh", Factors(heads=2.0, row=0.5)),
    cell("int8", "NZ", Factors(parts=2.0, row=0.5)),
    cell("int8 heads", "int8 by channel", Factors(parts=2.0)),
    cell("int8", "int8 by tensor, NZ", Factors(parts=2.0)),
    cell("int8 heads", "packed", Factors(latent=2.0, row=0.5)),
    *(
        cell(*each, refusal="quantise weights, cache and queries in one of these ways", instead="Fresh")
        for each in illegal()
        if "NZ" not in each[1]
    ),
    cell("float", "rows", orders=("half", "half")),
    cell("float", "fresh", orders=("interleaved", "interleaved")),
    cell("float", "rows", orders=("half", "interleaved"), refusal=IN_PAIRS, instead="Fresh"),
    cell("float", "rows", joint=True),
    cell("int8", "fresh", joint=True),
    *(cell(layers, "rows", Factors(nope=2.0), "the rotated lanes are multiplied by") for layers in INT8),
)

TRIED = {"mla_prolog": EXAMPLES}
