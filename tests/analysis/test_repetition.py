"""What is repeated in a row along a dim is found once; what is repeated otherwise is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.analysis.repeated_entries import unrepeated
from fusion.graph import Value
from fusion.testing import capture
from tests.engine.graphs import read_graph

B, T, M, G, D = 2, 5, 3, 4, 6
KV = torch.arange(B * T * M * D, dtype=torch.float64).reshape(B, T, M, D)


def held(form: Callable[[Tensor], Tensor], given: Tensor, dynamic: bool = False) -> tuple[Any, Value]:
    captured = capture(form, (given,), dynamic=dynamic)
    graph = read_graph(captured.graph.graph, captured.facts)
    output: Any = captured.graph.graph.output_node().args[0]
    value = graph.value_of[output[0]]
    assert isinstance(value, Value)
    return graph.algebra, value


def grouped(x: Tensor) -> Tensor:
    return x[:, :, :, None].expand(-1, -1, -1, G, -1).reshape(B, -1, M * G, D)


REPEATED: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "interleaved": (lambda x: x.repeat_interleave(G, 2), 2, G),
    "grouped": (grouped, 2, G),
    "turned": (lambda x: grouped(x).transpose(1, 2), 1, G),
    "turned, its lanes first": (lambda x: grouped(x).permute(0, 2, 3, 1), 1, G),
    "cast": (lambda x: grouped(x).transpose(1, 2).float(), 1, G),
    "cut": (lambda x: grouped(x).transpose(1, 2)[..., 1:4], 1, G),
    "joined": (lambda x: torch.cat([grouped(x), x.repeat_interleave(G, 2) * 2], -1), 2, G),
    "joined with what all share": (lambda x: torch.cat([grouped(x), x[:, :, :1].expand(-1, -1, M * G, -1)], -1), 2, G),
    "twice": (lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 2), 2, 4),
    "sequences and heads in one": (lambda x: grouped(x).transpose(1, 2).reshape(B * M * G, -1, D), 0, G),
    "one of many": (lambda x: x[:, :, :1].expand(-1, -1, 7, -1), 2, 7),
    "a joined dim, of which the first of two parts is repeated": (
        lambda x: grouped(x)[..., None, :].expand(-1, -1, -1, 2, -1).reshape(B, -1, 2 * M * G, D),
        2,
        2 * G,
    ),
    "equal entries, split in two dims, the last": (lambda x: x[..., :1].expand(KV.shape).reshape(B, T, M, 2, 3), 4, 3),
    "equal entries, split in two dims, the first": (lambda x: x[..., :1].expand(KV.shape).reshape(B, T, M, 2, 3), 3, 2),
}

OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "tiled": (lambda x: x.repeat(1, 1, G, 1), 2),
    "tiled and turned": (lambda x: x.repeat(1, 1, G, 1).transpose(1, 2), 1),
    "once": (lambda x: x.transpose(1, 2), 1),
    "along another dim": (lambda x: x.repeat_interleave(G, 2), 1),
    "cut along the dim": (lambda x: grouped(x)[:, :, 1:5], 2),
    "joined along the dim": (lambda x: torch.cat([grouped(x), grouped(x) * 2], 2), 2),
    "joined with others": (lambda x: torch.cat([grouped(x), x.repeat(1, 1, G, 1)], -1), 2),
    "read in another order": (lambda x: x[:, :, :, None].expand(-1, -1, -1, G, -1).reshape(B, -1, D, M * G), 3),
    "other entries, split in two dims": (lambda x: x.reshape(B, T, M, 2, 3), 4),
    "nothing": (lambda x: x[:0].repeat_interleave(G, 2), 2),
    "a joined dim, of which the first part is repeated": (
        lambda x: x[:, :, :, None].expand(-1, -1, -1, G, -1).reshape(B, -1, M * G * D), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.rotates(3)
def test_what_is_repeated_in_a_row_is_found_once(name: str):
    form, axis, often = REPEATED[name]
    a, value = held(form, KV)
    found, times = unrepeated(a, value, axis)
    assert times == often
    assert found.shape[axis] * times == value.shape[axis]
    opened = a.reshape(found, (*found.shape[: axis + 1], 1, *found.shape[axis + 1 :]))
    wide = a.expand(opened, (*found.shape[: axis + 1], times, *found.shape[axis + 1 :]))
    numbers = built(a.reshape(wide, value.shape))
    assert torch.equal(numbers, form(KV).to(numbers.dtype))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_repeated_otherwise_is_left_as_it_is(name: str):
    form, axis = OTHERS[name]
    a, value = held(form, KV)
    assert unrepeated(a, value, axis) == (value, 1)


def test_heads_of_a_symbolic_number_are_found_once():
    a, value = held(lambda x: x.repeat_interleave(G, 2).transpose(1, 2), KV, dynamic=True)
    found, times = unrepeated(a, value, 1)
    assert times == G
    assert found.shape[1] * G == value.shape[1]


def built(value: Value) -> Tensor:
    """The numbers of a value that is arranged from the one input."""
    if value.op == "input":
        return KV
    args = [built(each) for each in value.args]
    match value.op:
        case "cat":
            return torch.cat(args, value.attrs[0])
        case "slice":
            return torch.ops.aten.slice.Tensor(args[0], *value.attrs)
        case "permute":
            return args[0].permute(value.attrs)
        case "scale":
            return args[0] * value.attrs[0]
        case "cast":
            return args[0].to(value.dtype)
        case _:
            shape: Any = value.shape
            return args[0].expand(shape) if value.op == "expand" else args[0].reshape(shape)
