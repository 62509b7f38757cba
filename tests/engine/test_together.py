"""Which rewrites are priced together: those with which all that reads a node goes, and with neither alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx as fx

from fusion.stages.plan.joint_rewrites import sharing_pairs

from .graphs import Build

aten = torch.ops.aten


def candidate(*dying: fx.Node, needs: Any = None) -> Any:
    """A rewrite of the first of these nodes, with which the others go."""
    return SimpleNamespace(dying=frozenset(dying), needs=needs, match=SimpleNamespace(makers=dying[:1]))


def readers() -> tuple[fx.Node, fx.Node]:
    build = Build()
    source = build(aten.exp.default, build.input(4))
    return build(aten.cos.default, source), build(aten.sin.default, source)


def test_two_that_read_one_node_are_a_pair():
    cos, sin = readers()
    one, other = candidate(cos), candidate(sin)
    assert list(sharing_pairs([one, other])) == [(one, other)]


@pytest.mark.parametrize("kind", ["needs", "takes"])
def test_one_that_needs_another_or_takes_what_the_other_replaces_is_in_none(kind: str):
    cos, sin = readers()
    one = candidate(cos)
    other = candidate(sin, needs=candidate(sin)) if kind == "needs" else candidate(sin, cos)
    assert not list(sharing_pairs([one, other]))
