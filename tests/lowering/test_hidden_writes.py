"""A call that hides its writes from GE is handed over where data alone keeps it in order, else expanded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusion.operators import OPERATORS, ensure
from fusion.routes import hidden_writes
from fusion.routes.expand import expand
from fusion.routes.hidden_writes import handed_over
from tests.operators.pypto_cases import LAYER, layer
from tests.operators.test_meta import traced

CALL = layer((5,))


def graph(function: Callable[..., Any]) -> fx.GraphModule:
    torch.manual_seed(0)
    return traced(function, CALL(torch.float32))


def call(given: dict[str, Tensor]) -> Tensor:
    return torch.ops.custom_pypto.npu_sparse_attention_pto.in_place(**given)


def alone(**given: Tensor) -> Any:
    return call(given)


def before_in_order(**given: Tensor) -> Any:
    return call(given | {"x": given["x"] + given["kv_cache"].sum()})


def behind_in_order(**given: Tensor) -> Any:
    y = call(given)
    return given["kv_cache"].view(-1) * y.sum()


def before(**given: Tensor) -> Any:
    old = given["kv_cache"].sum()
    return call(given), old


def behind(**given: Tensor) -> Any:
    y = call(given)
    return y, given["kr_cache"].view(-1) + 1


def written_behind(**given: Tensor) -> Any:
    y = call(given)
    given["index_k_cache"].flatten()[:1].zero_()
    return y


def is_handed_over(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the package's own overload takes the place of ours, if that package is there."""
    ensure()
    monkeypatch.setattr(hidden_writes, "has_default", lambda operator: True)
    operator = OPERATORS[LAYER[0]]
    return handed_over(graph(function).graph)[operator.overload()] is not operator.fallback


@pytest.mark.parametrize("function", [alone, before_in_order, behind_in_order], ids=lambda each: each.__name__)
def test_the_vendors_own_overload_is_handed_over(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    assert is_handed_over(function, monkeypatch)


@pytest.mark.parametrize("function", [before, behind, written_behind], ids=lambda each: each.__name__)
def test_what_ge_could_put_in_another_order_is_expanded(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    assert not is_handed_over(function, monkeypatch)


@pytest.mark.rotates(6)
def test_it_is_expanded_where_the_package_is_not_there():
    ensure()
    gm = graph(alone)
    expanded = expand(gm, handed_over(gm.graph))
    assert not [node for node in expanded.graph.nodes if "custom_pypto" in str(node.target)]
    torch.manual_seed(0)
    ours = CALL(torch.float32)
    theirs = {name: each.clone() for name, each in ours.items()}
    torch.testing.assert_close(expanded(*ours.values()), OPERATORS[LAYER[0]].fallback(**theirs))
    for name in ("kv_cache", "kr_cache", "index_k_cache"):
        assert torch.equal(ours[name], theirs[name])
