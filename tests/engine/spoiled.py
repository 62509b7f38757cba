"""Rewrites that are made wrong on purpose, in one place of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusion.frontend.backend
from fusion.graph.origin import module_path

Change = Callable[[fx.Node], None]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def spoil(monkeypatch: pytest.MonkeyPatch, target: str, change: Change, module: str = "") -> None:
    """Change each call of an operator that the pass makes, in modules whose path has `module` in it."""
    fuse_graph = fusion.frontend.backend.fuse_graph

    def spoiling(source: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        outcome = fuse_graph(source, *args, **kwargs)
        for node in list(source.nodes):
            if "fusion" in node.meta and str(node.target) == target and module in module_path(node):
                change(node)
        return outcome

    monkeypatch.setattr(fusion.frontend.backend, "fuse_graph", spoiling)


def argument(place: int, value: Any) -> Change:
    """Give a call another argument."""

    def change(node: fx.Node) -> None:
        node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return change


def scaled(name: str, factor: float) -> Change:
    """Multiply a number that a call is given by name."""

    def change(node: fx.Node) -> None:
        node.kwargs = {**node.kwargs, name: node.kwargs[name] * factor}

    return change


def swapped(one: int, other: int) -> Change:
    """Exchange two arguments of a call."""

    def change(node: fx.Node) -> None:
        args = list(node.args)
        args[one], args[other] = args[other], args[one]
        node.args = tuple(args)

    return change


def moved(place: int) -> Change:
    """Subtract 1 from a tensor that a call is given."""

    def change(node: fx.Node) -> None:
        given = node.args[place]
        with node.graph.inserting_before(node):
            less = node.graph.call_function(torch.ops.aten.sub.Tensor, (given, 1))
        less.meta = dict(given.meta)
        argument(place, less)(node)

    return change


def result(function: Callable[[Tensor], Tensor], item: int | None = 0) -> Change:
    """Pass a result of a call, or its only one (item None), through a function of this module."""

    def change(node: fx.Node) -> None:
        made = node if item is None else next(each for each in node.users if each.args == (node, item))
        users = list(made.users)
        with node.graph.inserting_after(made):
            other = node.graph.call_function(function, (made,))
        other.meta = dict(made.meta)
        for user in users:
            user.replace_input_with(made, other)

    return change


def late_rows_larger(x: Tensor) -> Tensor:
    """x [B, S, ..] with 1.5 of what it has from the eighth token on."""
    return torch.cat([x[:, :7], 1.5 * x[:, 7:]], 1)


def tied_otherwise(experts: Tensor) -> Tensor:
    """Experts with 4 for 0 and 0 for 4."""
    return torch.where(experts % 4 == 0, 4 - experts, experts)


def one_listed_twice(ids: Tensor) -> Tensor:
    """A list whose last entry is its first."""
    return torch.cat([ids[..., :-1], ids[..., :1]], -1)


def held_in(dtype: torch.dtype) -> Change:
    """Hold the first result of a call in a dtype that the model does not round to."""

    def change(node: fx.Node) -> None:
        made = next(each for each in node.users if each.args == (node, 0))
        users = list(made.users)
        with node.graph.inserting_after(made):
            narrow = node.graph.call_function(torch.ops.aten._to_copy.default, (made,), {"dtype": dtype})
        with node.graph.inserting_after(narrow):
            back = node.graph.call_function(
                torch.ops.aten._to_copy.default, (narrow,), {"dtype": made.meta["val"].dtype}
            )
        narrow.meta, back.meta = dict(made.meta), dict(made.meta)
        for user in users:
            user.replace_input_with(made, back)

    return change


def in_float32(node: fx.Node) -> None:
    """Let a call read its first argument in float32."""
    given = node.args[0]
    with node.graph.inserting_before(node):
        narrow = node.graph.call_function(narrowed, (given,))
    narrow.meta = dict(given.meta)
    argument(0, narrow)(node)


def narrowed(x: Tensor) -> Tensor:
    """Numbers as float32 holds them."""
    return x.float().to(x.dtype)
