"""The prologue of latent attention: every combination of layers, store and factors fuses, or is refused as it must."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from fusion import Example, testing
from patterns.latent.prolog.prolog import MlaProlog
from tests.examples import latent_model as mla
from tests.examples.latent_model import Factors
from tests.examples.quantisation import quantised

from .prolog_cells import IN_PAIRS, INT8, JOINTLY, MODES, ORDERS, STORES, cell, illegal, legal

pytestmark = pytest.mark.rotates(8)

DTYPE = torch.bfloat16
LAYERS = tuple(INT8)
"""In the order of the modes of the weights."""


def called(t: testing.Trial) -> fx.Node:
    """The one call of the prolog."""
    (call,) = [node for node in t.fused.graph.nodes if "mla_prolog" in str(node.target)]
    return call


def told(t: testing.Trial, name: str) -> Any:
    """What it is told; what is left out is the default."""
    defaults = {each.name: each.default_value for each in called(t).target._schema.arguments}
    return called(t).kwargs.get(name, defaults[name])


def held(t: testing.Trial) -> None:
    """Every law but those that the examples are tried by."""
    for law in (testing.recognises, testing.means_what_it_says, testing.emits_valid_calls):
        law(t)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("layers", "store"), legal())
def test_what_the_operator_takes_is_one_call_in_its_modes(layers: str, store: str):
    t = testing.trial(MlaProlog(), cell(layers, store), DTYPE)
    held(t)
    mode = STORES[store].mode
    modes = tuple(told(t, f"{name}_quant_mode") for name in ("weight", "kv_cache", "query"))
    assert modes == (LAYERS.index(layers), mode, int(mode == 1))
    assert told(t, "cache_mode") == {"fresh": "BSND"}.get(store, "PA_NZ" if "NZ" in store else "PA_BSND")
    assert (told(t, "qc_qr_scale"), told(t, "kc_scale")) == (1, 1)


@pytest.mark.parametrize(("layers", "store"), illegal())
def test_what_the_operator_does_not_take_is_refused_in_its_words(layers: str, store: str):
    mode = STORES[store].mode
    modes = (
        f"weight_quant_mode: {LAYERS.index(layers)}; kv_cache_quant_mode: {mode}; query_quant_mode: {int(mode == 1)}"
    )
    testing.check(MlaProlog(), cell(layers, store, refusal=f"{modes}; npu_mla_prolog_v3", instead="Fresh"), DTYPE)


def multiplied() -> Iterator[Any]:
    """Numbers in every place of the queries, and of the row in every store."""
    for layers in LAYERS:
        for store in ("fresh", "rows", "pages"):
            for name in ("latent", "heads", "parts"):
                yield pytest.param(layers, store, Factors(**{name: 1.5}), id=f"{layers}, {store}, {name}")
    for layers, store in legal():
        yield pytest.param(layers, store, Factors(row=0.75), id=f"{layers}, {store}, row")


@pytest.mark.rotates(18)
@pytest.mark.parametrize(("layers", "store", "factors"), multiplied())
def test_a_number_behind_a_norm_is_the_operators(layers: str, store: str, factors: Factors):
    t = testing.trial(MlaProlog(), cell(layers, store, factors), DTYPE)
    held(t)
    assert told(t, "qc_qr_scale") == pytest.approx(factors.latent * factors.heads * factors.parts)
    assert told(t, "kc_scale") == (1 if store == "fresh" else factors.row)  # the model multiplies what it keeps itself


@pytest.mark.rotates
@pytest.mark.parametrize("orders", ORDERS, ids=" to ".join)
@pytest.mark.parametrize(("layers", "store"), legal())
def test_lanes_come_and_go_in_either_order(layers: str, store: str, orders: tuple[str, str]):
    """What is rotated is put in pairs by the rows of its layer; only rows of the model's own may be kept in pairs."""
    if orders[1] == "half" or store == "fresh":
        held(testing.trial(MlaProlog(), cell(layers, store, orders=orders), DTYPE))
    else:
        testing.check(MlaProlog(), cell(layers, store, orders=orders, refusal=IN_PAIRS, instead="Fresh"), DTYPE)


@pytest.mark.parametrize("orders", [("half", "half"), ("interleaved", "half")], ids=" to ".join)
@pytest.mark.parametrize(
    ("layers", "store"), [JOINTLY[0], *(pytest.param(*e, marks=pytest.mark.rotates) for e in JOINTLY[1:])]
)
def test_layers_of_one_input_may_be_one(layers: str, store: str, orders: tuple[str, str]):
    held(testing.trial(MlaProlog(), cell(layers, store, orders=orders, joint=True), DTYPE))


def test_every_mode_that_goes_together_is_a_cell():
    triples = {(LAYERS.index(layers), mode, int(mode == 1)) for layers, modes in MODES.items() for mode in modes}
    assert triples == {(0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 0)}


def restored(low: Tensor) -> Tensor:
    """What the int8 latent of the queries stands for."""
    rows, scale = quantised(low)
    return rows.float() * scale


@pytest.mark.parametrize("factors", [Factors(), Factors(latent=1.5), Factors(heads=1.5), Factors(parts=1.5)], ids=str)
def test_the_int8_latent_that_others_read_keeps_its_own_scale(factors: Factors):
    t = testing.trial(MlaProlog(), cell("int8 heads", "rows", factors, also=restored), DTYPE)
    held(t)
    latent, scale = (
        next(node for node in called(t).users if node.target is operator.getitem and node.args[1] == n) for n in (3, 4)
    )
    assert latent.users
    assert scale.users


def test_queries_in_pairs_beside_keys_in_halves_are_no_prolog():
    """Their tables lie otherwise: each side stays as the model has it."""
    kind, pairs = STORES["fresh"], partial(mla.turned, result="interleaved")
    function = mla.model(kind.store, kind.attend, partial(mla.rope_last, turn=pairs))
    t = testing.trial(MlaProlog(), Example("queries in pairs", function, kind.setting), DTYPE)
    assert "mla_prolog" not in {each.match.rule.name for each in t.outcome.chosen}
    testing.means_what_it_says(t)
