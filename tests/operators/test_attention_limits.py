"""Both sides of the limits of attention, on every chip that has it, for both versions and both kinds of lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.operators import HOST, OPERATORS, refusal
from tests.operators.attention_cases import FIRST
from tests.operators.attention_limits_cases import (
    CACHE_EDGES,
    CACHE_HOST_EDGES,
    FLOAT8_EDGES,
    HOST_EDGES,
    KERNEL_EDGES,
    WHOLE_EDGES,
    WHOLE_HOST_EDGES,
    WHOLE_HOST_ONLY,
    WIDTH_EDGES,
    Edge,
    bsnd,
)
from tests.operators.first_attention_limits_cases import (
    COMPUTED_EDGES,
    FIRST_CALL,
    FIRST_HOST_EDGES,
    FIRST_KERNEL_EDGES,
)

V2 = "npu::npu_fused_infer_attention_score_v2"
V1 = "npu::npu_fused_infer_attention_score"
CHIPS = ("ascend910b", "ascend910_93")


def renamed(call: dict[str, Any]) -> dict[str, Any]:
    return {FIRST.get(name, name): value for name, value in call.items()}


def in_tensors(call: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.tensor(value) if name.startswith("actual_seq") and value is not None else value
        for name, value in call.items()
    }


def said_in_first(text: str) -> str:
    for name, first in FIRST.items():
        text = text.replace(name, first)
    return text


def judged(name: str, chip: str, edge: Edge) -> None:
    legal, illegal, text = edge
    op = OPERATORS[name]
    assert refusal(op, chip, (), legal) is None
    said = refusal(op, chip, (), illegal)
    assert said is not None
    assert text in said


def judged_in_first(chip: str, edge: Edge) -> None:
    legal, illegal, text = edge
    judged(V1, chip, (renamed(legal), renamed(illegal), said_in_first(text)))
    lengths = renamed(in_tensors(legal)), renamed(in_tensors(illegal))
    judged(f"{V1}.tensor_lengths", chip, (*lengths, said_in_first(text)))


def in_both(edge: Edge) -> bool:
    """Whether the first version has every argument of the call."""
    arguments = OPERATORS[V1].arguments
    return all(FIRST.get(name, name) in arguments for name in (*edge[0], *edge[1]))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("chip", [HOST, *CHIPS])
@pytest.mark.parametrize("edge", [*HOST_EDGES, *WHOLE_HOST_EDGES, *CACHE_HOST_EDGES], ids=lambda edge: edge[2])
def test_both_sides_of_what_every_machine_asks_for(edge: Edge, chip: str):
    legal, illegal, text = edge
    judged(V2, chip, edge)
    judged(f"{V2}.tensor_lengths", chip, (in_tensors(legal), in_tensors(illegal), text))
    by_dtype = chip != HOST and text == "dtype(query) != 'int8'"  # the first version has no such queries on any chip
    if in_both(edge) and not by_dtype:
        judged_in_first(chip, edge)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("edge", [*KERNEL_EDGES, *WHOLE_EDGES, *CACHE_EDGES], ids=lambda edge: edge[2])
def test_both_sides_of_what_the_kernel_asks_for(edge: Edge, chip: str):
    legal, illegal, text = edge
    judged(V2, chip, edge)
    judged(f"{V2}.tensor_lengths", chip, (in_tensors(legal), in_tensors(illegal), text))
    if in_both(edge):
        judged_in_first(chip, edge)


@pytest.mark.parametrize("edge", FLOAT8_EDGES, ids=lambda edge: edge[2])
def test_both_sides_of_what_ascend_950_asks_of_a_float8_cache(edge: Edge):
    judged(V2, "ascend950", edge)


@pytest.mark.parametrize("edge", WIDTH_EDGES, ids=lambda edge: edge[2])
def test_both_sides_of_the_widths_of_heads(edge: Edge):
    judged(V2, HOST, edge)
    judged_in_first(HOST, edge)


@pytest.mark.parametrize("edge", WHOLE_HOST_ONLY, ids=lambda edge: edge[2])
def test_both_sides_of_what_a_host_asks_for_in_layouts_that_no_chip_takes(edge: Edge):
    judged(V2, HOST, edge)
    judged(f"{V2}.tensor_lengths", HOST, edge)
    assert refusal(OPERATORS[V2], CHIPS[0], (), edge[0])


@pytest.mark.parametrize("edge", COMPUTED_EDGES, ids=lambda edge: edge[2])
def test_both_sides_of_what_decompositions_ask_for_where_no_chip_takes_the_call(edge: Edge):
    legal, illegal, text = edge
    judged(V2, HOST, edge)
    judged(f"{V2}.tensor_lengths", HOST, (in_tensors(legal), in_tensors(illegal), text))
    judged_in_first(HOST, edge)
    assert refusal(OPERATORS[V2], CHIPS[0], (), legal)


@pytest.mark.parametrize("chip", [HOST, *CHIPS])
@pytest.mark.parametrize("edge", FIRST_HOST_EDGES, ids=lambda edge: edge[2])
@pytest.mark.rotates(6)
def test_both_sides_of_what_the_first_version_alone_asks_for(edge: Edge, chip: str):
    legal, illegal, text = edge
    lengths = in_tensors(legal), in_tensors(illegal), text
    for name, call in ((V1, edge), (f"{V1}.tensor_lengths", lengths)):
        op = OPERATORS[name]
        assert text in str(refusal(op, chip, (), call[1]))
        assert (refusal(op, chip, (), call[0]) is None) is (chip == HOST or call[0].keys() == FIRST_CALL.keys())


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("edge", FIRST_KERNEL_EDGES, ids=lambda edge: edge[2])
def test_no_chip_takes_what_no_rule_gives(edge: Edge, chip: str):
    judged(V1, chip, edge)


@pytest.mark.parametrize("version", [V1, V2])
def test_every_limit_has_an_edge(version: str):
    op = OPERATORS[version]
    edges = [*HOST_EDGES, *KERNEL_EDGES, *WHOLE_HOST_EDGES, *WHOLE_HOST_ONLY, *WHOLE_EDGES]
    edges += [*CACHE_HOST_EDGES, *CACHE_EDGES, *COMPUTED_EDGES, *WIDTH_EDGES]
    calls = [edge[1] for edge in edges]
    if version == V1:
        calls = [renamed(edge[1]) for edge in edges if in_both(edge)]
        calls += [edge[1] for edge in (*FIRST_HOST_EDGES, *FIRST_KERNEL_EDGES)]
    said = [refusal(op, CHIPS[0], (), call) or "" for call in calls]
    texts = [each if isinstance(each, str) else each.text for each in (*op.limits[HOST], *op.limits[CHIPS[0]])]
    assert not [text for text in texts if not any(text in each for each in said)]


@pytest.mark.parametrize("chip", CHIPS)
def test_only_torchair_takes_lengths_in_tensors(chip: str):
    op = OPERATORS[f"{V2}.tensor_lengths"]
    call = bsnd() | {"actual_seq_kvlen": torch.tensor([3, 7])}
    assert refusal(op, chip, (), call, "torchair") is None
    for lowering in ("eager", "npugraph_ex"):
        said = refusal(op, chip, (), call, lowering)
        assert said is not None
        assert f"cannot be lowered by {lowering}" in said
