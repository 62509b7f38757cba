"""Operators that an older package has by another name are run by it where torch_npu does not have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.errors import OperatorError
from fusion.operators import OPERATORS
from fusion.operators.registration import run_by_older
from tests.operators.sparse_cases import Sparse, attention, indexer, quant_attention, quant_indexer

LENGTHS = "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_{}=None"
LAYOUTS = "str layout_query='BSND', str layout_{}='BSND'"
SCHEMAS = (
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, "
    f"int sparse_block_size, *, Tensor? block_table=None, {LENGTHS.format('kv')}, Tensor? query_rope=None, "
    f"Tensor? key_rope=None, {LAYOUTS.format('kv')}, int sparse_mode=3) -> Tensor",
    f"npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, {LENGTHS.format('key')}, "
    f"Tensor? block_table=None, {LAYOUTS.format('key')}, int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    f"Tensor key_dequant_scale, *, {LENGTHS.format('key')}, Tensor? block_table=None, int query_quant_mode=0, "
    f"int key_quant_mode=0, {LAYOUTS.format('key')}, int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_sparse_flash_attention_antiquant(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, int sparse_block_size, int key_quant_mode, int value_quant_mode, *, "
    "Tensor? key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? block_table=None, "
    f"{LENGTHS.format('kv')}, {LAYOUTS.format('kv')}, int sparse_mode=3, int attention_mode=0, "
    "int quant_scale_repo_mode=0, int tile_size=0, int rope_head_dim=0) -> Tensor",
)
"""As ops_def_registration.cpp of older cann-recipes-infer."""
DECODE = Sparse(("TND", "PA_BSND"), rows=(1, 1), keys=(11, 6))
CALLS = {
    "npu::npu_sparse_flash_attention": attention(DECODE),
    "npu::npu_lightning_indexer": indexer(DECODE),
    "npu::npu_quant_lightning_indexer": quant_indexer(DECODE),
    "npu::npu_kv_quant_sparse_flash_attention": quant_attention(DECODE),
}


@pytest.fixture
def package() -> Iterator[None]:
    """The older package, whose operators are computed by the decompositions of those that took their place."""
    by_older = {op.older: op for op in OPERATORS.values() if op.older}
    library = torch.library.Library("custom", "FRAGMENT")

    def computed(name: str) -> Any:
        operator = by_older[f"custom::{name}"]

        def run(*args: Tensor, **kwargs: Any) -> Tensor:
            declared = getattr(torch.ops.custom, name).default._schema.arguments
            given = {each.name: each.default_value for each in declared}  # the dispatcher leaves these out
            given |= dict(zip(given, args, strict=False)) | kwargs
            result = operator.fallback(**{**given, **operator.older_means})
            return result[0] if isinstance(result, tuple) else result

        return run

    for schema in SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, computed(name), "CPU")
    yield
    library._destroy()


def made(name: str, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return CALLS[name](torch.bfloat16) | more


@pytest.mark.parametrize("name", CALLS)
def test_the_older_spelling_gives_the_same(package: None, name: str):
    op = OPERATORS[name]
    got, wanted = run_by_older(op, **made(name)), op.fallback(**made(name))
    assert isinstance(got, tuple) == isinstance(wanted, tuple)
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_what_it_does_not_have_is_told(package: None):
    name = "npu::npu_sparse_flash_attention"
    with pytest.raises(OperatorError, match="it has no sinks; install a torch_npu"):
        run_by_older(OPERATORS[name], **made(name, sinks=torch.ones(8)))
    name = "npu::npu_lightning_indexer"
    with pytest.raises(OperatorError, match="it has no return_value, result 1"):
        run_by_older(OPERATORS[name], **made(name, return_value=True))


def test_without_its_package_it_says_what_to_do():
    op = OPERATORS["npu::npu_mla_prolog_v3"]
    assert op.older == "custom::npu_mla_prolog_v3"
    with pytest.raises(OperatorError, match="no package that is loaded has the older custom::npu_mla_prolog_v3"):
        run_by_older(op)


def test_copies_are_given_by_no_older_spelling():
    assert not OPERATORS["npu::npu_mla_prolog_v3_functional"].older
