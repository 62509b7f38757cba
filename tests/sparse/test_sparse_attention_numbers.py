"""Fused sparse attention keeps its numbers over a prompt longer than the list, and the steps that follow it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.runtime.verification import relative_error
from fusion.testing import DTYPES
from tests.corpus.base import activations

from . import sparse_attention, sparse_attention_blocks, sparse_attention_lists
from .sparse_attention_base import HIDDEN, B, C, Entry, R, T, X, tables
from .test_sparse_attention import usual_error

pytestmark = pytest.mark.rotates(6)

HOST = {"target": "host", "lower": "eager"}
CAP = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROMPT, STEPS = 6, 8
FILES = (sparse_attention, sparse_attention_lists, sparse_attention_blocks)
ENTRIES = {each.name: each for file in FILES for each in file.SPELLINGS}
CHOSEN = ("plain", "written_one_head", "positions_first", "hidden_then_lowest", "eager_lowest", "absorbed")


def sequence(block: Any, entry: Entry, mode: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What a prompt and some steps give, and what is kept of them."""
    widths, outs = (C, R, X), []
    kept = [torch.zeros(B, 0 if mode == "grow" else T, width, dtype=dtype) for width in widths]
    kept = kept if mode == "grow" else [entry.parts.cache(each).contiguous() for each in kept]
    for number in range(STEPS + 1):
        first, tokens = (0, PROMPT) if number == 0 else (PROMPT + number - 1, 1)
        x = activations(60 + number, B, tokens, HIDDEN)
        given = [each.to(dtype) for each in (x, *tables(B, first, tokens))]
        with torch.no_grad():
            found = block(*given, *kept, *(() if mode == "grow" else (entry.start(first),)))
        outs.append(found[0] if mode == "grow" else found)
        kept = list(found[1:]) if mode == "grow" else kept
    return outs, kept


def settings() -> Any:
    """Return every spelling, way of keeping and dtype."""
    every = [(name, mode, dtype) for name in CHOSEN for mode in ("chunk", "grow") for dtype in DTYPES]
    return [each for each in every if each[1] in ENTRIES[each[0]].modes]


@pytest.mark.rotates(20)
@pytest.mark.parametrize(("name", "mode", "dtype"), settings(), ids=str)
def test_a_prompt_and_steps(name: str, mode: str, dtype: torch.dtype):
    entry = ENTRIES[name]
    torch.compiler.reset()
    block = entry.make(mode, dtype)
    exact: nn.Module = copy.deepcopy(block).double()
    dynamic = None if mode == "grow" else False
    fused = torch.compile(block, backend="cann_fusion", options=HOST, fullgraph=True, dynamic=dynamic)
    truth, eager, ours = (
        sequence(each, entry, mode, kind) for each, kind in ((exact, torch.float64), (block, dtype), (fused, dtype))
    )
    for want, own, have in zip(truth[1], eager[1], ours[1], strict=True):
        assert have.shape == want.shape
        assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(dtype).eps
    want, own, have = (torch.cat(outs, 1) for outs, _ in (truth, eager, ours))
    assert not have.isnan().any()
    assert usual_error(have, want) <= 1.5 * usual_error(own, want) + torch.finfo(dtype).eps
    assert usual_error(have, want) <= CAP[dtype]


@pytest.mark.rotates(4)
def test_both_steps_are_fused():
    entry = ENTRIES["plain"]
    for mode in ("chunk", "step"):
        report = fusion.explain(entry.make(mode, torch.bfloat16), *entry.inputs(mode, torch.bfloat16), options=HOST)
        names = ("npu::npu_mla_prolog_v3", "npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention")
        assert [report.ops[each] for each in names] == [1, 1, 1]
