"""Storage formats: what holds the same bytes in FRACTAL_NZ, what an NPU says of one, and what a graph relies on."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fusion import operators
from fusion.errors import FormatError
from fusion.inputs.nz_format import holds_lines, is_fractal, supposed_fractal
from fusion.stages.verify import verify_formats
from fusion.testing import capture


@pytest.mark.parametrize(
    ("shape", "dtype", "holds"),
    [
        ((3, 64, 128, 16), torch.bfloat16, True),
        ((3, 8, 8, 128, 16), torch.float16, True),
        ((3, 32, 128, 32), torch.int8, True),
        ((3, 64, 128, 32), torch.bfloat16, False),
        ((3, 64, 8, 16), torch.bfloat16, False),  # in FRACTAL_NZ the rows would be filled up to 16
        ((64, 128, 16), torch.bfloat16, False),
        ((3, 64, 128, 16), None, False),
    ],
)
def test_lines_of_32_bytes_are_the_same_in_either(shape: tuple[int, ...], dtype: torch.dtype | None, holds: bool):
    assert holds_lines(shape, dtype) is holds


class OnNpu(Tensor):
    @property
    def device(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return SimpleNamespace(type="npu")


def test_only_an_npu_tells(monkeypatch: pytest.MonkeyPatch):
    here, there = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16).as_subclass(OnNpu)
    for number, is_so in ((29, True), (2, False)):
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda x, number=number: number))
        assert (is_fractal(there), supposed_fractal(there)) == (is_so, is_so)
        assert (is_fractal(here), supposed_fractal(here)) == (None, True)


LINES, ROWS = (3, 4, 16, 16), (3, 16, 2, 32)


@pytest.mark.parametrize(
    ("shape", "copied", "fractal", "wrong"),
    [
        (LINES, False, True, None),
        (LINES, False, False, "reads key_cache in FRACTAL_NZ"),
        (LINES, False, None, "reads key_cache in FRACTAL_NZ"),
        (LINES, True, True, "reads key_cache in FRACTAL_NZ"),  # a copy is made without blocks
        (ROWS, False, None, None),
        (ROWS, True, None, None),
    ],
)
def test_what_a_call_reads_lies_as_it_expects(shape, copied: bool, fractal: bool | None, wrong: str | None):
    operators.ensure()

    def gathered(keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, rows: Tensor):
        keys, values = (keys + 1, values + 1) if copied else (keys, values)
        call = torch.ops.npu.npu_gather_pa_kv_cache_functional
        return call(keys.view(shape), values, table, lengths, rows, rows)

    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    pages = torch.zeros(shape, dtype=torch.bfloat16)
    rows = torch.zeros(2, 2, 32, dtype=torch.bfloat16)
    graph = capture(gathered, (pages, pages.clone(), table, lengths, rows)).graph.graph
    names = [node.name for node in graph.find_nodes(op="placeholder")[:2]]
    facts = {} if fractal is None else dict.fromkeys(names, fractal)
    verify_formats(graph, facts)  # calls of the user's own are his
    for node in graph.nodes:
        node.meta["fusion"] = "page_gather"
    if wrong is None:
        verify_formats(graph, facts)
    else:
        with pytest.raises(FormatError, match=wrong):
            verify_formats(graph, facts)
