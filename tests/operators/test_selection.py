"""What the laws of all operators do not say of the operator that keeps listed rows in a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS, decompositions, ensure, refusal
from fusion.operators.registration import run_by_default
from tests.operators.cases import flat
from tests.operators.selection_cases import EMPTY, NAMES, gathering, page, reference, sized
from tests.operators.test_meta import called, operators_in, traced

IN_PLACE, FUNCTIONAL = (OPERATORS[name] for name in NAMES)


BUFFERS = ("selection_k_rope", "selection_kv_cache")


def made(make: Any, dtype: torch.dtype = torch.float64, seed: int = 5) -> dict[str, Any]:
    torch.manual_seed(seed)
    return make(dtype)


def held(call: dict[str, Any], row: int) -> dict[int, Tensor]:
    """Token -> its row of both buffers, by what the status tells of one query."""
    size, k = call["selection_topk_block_size"], call["selection_topk_indices"].shape[-1]
    line = call["selection_kv_block_status"].reshape(-1, k + 1)[row].tolist()
    table, found = call["selection_kv_block_table"][row], {}
    for slot, block in enumerate(line[:k]):
        for t in range(min(size, line[k] - slot * size) if block >= 0 else 0):
            rows = [call[name][page(table, slot * size + t, call[name])] for name in BUFFERS]
            found[block * size + t] = torch.cat(rows)
    return found


def full(call: dict[str, Any], sequence: int, token: int) -> Tensor:
    """The row of a token in both caches."""
    caches = [call[name.replace("selection", "full")] for name in BUFFERS]
    return torch.cat([each[page(call["full_kv_block_table"][sequence], token, each)] for each in caches])


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_steps_hold_what_each_lists_and_copy_what_they_do_not_hold(block: int, packed: bool):
    """A decode of two sequences: keys are written at their end, some blocks are listed again, some are not."""
    k, batch, start = 6, 2, (17, 9)
    call = made(
        gathering(
            start, k=k, block=block, full_pages=9, packed=packed, lists=((-1,) * k,) * batch, held=(EMPTY,) * batch
        )
    )
    lists = call["selection_topk_indices"].reshape(batch, k)
    for step in range(8):
        call["full_kv_actual_seq"].add_(1)
        lengths = call["full_kv_actual_seq"].tolist()
        for row, length in enumerate(lengths):
            places = page(call["full_kv_block_table"][row], length - 1, call["full_kv_cache"])
            call["full_kv_cache"][places], call["full_k_rope"][places] = torch.randn(24), torch.randn(16)
            blocks = -(-length // block)
            chosen = torch.randperm(blocks)[: max(1, (k, 3, k)[step % 3])]
            again = [each for each in lists[row].tolist() if each >= 0][:3]
            ids = list(dict.fromkeys([*again, blocks - 1, *chosen.tolist()]))[:k]
            lists[row] = torch.tensor(ids + [-1] * (k - len(ids)))
        before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
        numbers = IN_PLACE.fallback(**call)
        for expected, got in zip(
            reference(**before), (numbers, *(call[name] for name in IN_PLACE.written)), strict=True
        ):
            assert torch.equal(expected, got)
        for row, length in enumerate(lengths):
            there = held(call, row)
            tokens = {each * block + t for each in lists[row].tolist() if each >= 0 for t in range(block)}
            assert set(there) == {each for each in tokens if each < length}
            assert len(there) == numbers[row]
            for token, stored in there.items():
                assert torch.equal(stored, full(call, row, token))


def test_a_hit_stays_though_the_cache_holds_another_row():
    call = made(gathering((20,), lists=((3, 0, 9, 7),), held=(([5, 9, 2, 3], 4),)))
    before = held(call, 0)
    IN_PLACE.fallback(**call)
    assert call["selection_kv_block_status"].flatten().tolist() == [0, 9, 7, 3, 4]
    after = held(call, 0)
    for token in (9, 3):
        assert torch.equal(after[token], before[token])
    for token in (0, 7):
        assert torch.equal(after[token], full(call, 0, token))


def test_a_hit_moves_to_a_lower_slot_where_fewer_are_listed():
    call = made(gathering((20,), lists=((3, 9, -1, -1),), held=(([5, 8, 2, 3], 4),)))
    before = held(call, 0)
    IN_PLACE.fallback(**call)
    assert call["selection_kv_block_status"].flatten().tolist() == [3, 9, -1, -1, 2]
    assert torch.equal(held(call, 0)[3], before[3])


def test_the_newest_keys_are_read_again():
    call = made(
        gathering((10,), queries=2, lists=((8, 7, 2, -1), (9, 8, 7, 2)), held=(([8, 7, 2], 3), ([9, 8, 7, 2], 4)))
    )
    before = [held(call, row) for row in range(2)]
    IN_PLACE.fallback(**call)
    for row, new in ((0, {8}), (1, {8, 9})):
        for token, stored in held(call, row).items():
            assert torch.equal(stored, full(call, 0, token) if token in new else before[row][token])


def test_other_rows_of_the_buffers_are_left_alone():
    call = made(gathering((11, 6), k=3, size=4, lists=((3, 0, -1), (2, 5, -1)), held=(EMPTY, EMPTY), spare=3))
    before = {name: call[name].clone() for name in IN_PLACE.written}
    IN_PLACE.fallback(**call)
    for name in BUFFERS:
        changed = (call[name] != before[name]).any(-1).nonzero().tolist()
        pages = call["selection_kv_block_table"].flatten().tolist()
        assert sorted(changed) == sorted([each, place] for each in pages for place in range(2))
    assert torch.equal(call["selection_kv_block_table"], before["selection_kv_block_table"])


def test_the_functional_form_shares_no_memory_with_its_arguments():
    call = made(gathering((11, 6)))
    before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
    results = FUNCTIONAL.fallback(**call)
    for name, value in before.items():
        assert torch.equal(call[name], value)
    given = {each.untyped_storage().data_ptr() for each in call.values() if isinstance(each, Tensor)}
    assert not given & {each.untyped_storage().data_ptr() for each in results}


def test_attention_over_the_buffer_is_attention_over_the_list():
    """By the status, that every order of the slots is as good: what a recipe hands to the operator behind it."""
    torch.manual_seed(3)
    call = made(gathering((40, 29), queries=2, k=8, size=4, full_pages=12, c=32, dr=16))
    query, rope = torch.randn(4, 3, 32).double(), torch.randn(4, 3, 16).double()
    call["selection_kv_block_status"].fill_(-1)
    lists = call["selection_topk_indices"].flatten(0, 2)
    for _ in range(2):
        numbers = IN_PLACE.fallback(**call)
        where = torch.arange(8).expand(4, -1)
        got = OPERATORS["npu::npu_sparse_flash_attention"].fallback(
            query, *(call["selection_kv_cache"].unsqueeze(2),) * 2,
            torch.where(where < numbers[:, None], where, -1).unsqueeze(1), 0.25, query_rope=rope,
            key_rope=call["selection_k_rope"].unsqueeze(2), block_table=call["selection_kv_block_table"],
            actual_seq_lengths_query=torch.arange(1, 5), actual_seq_lengths_kv=numbers, layout_query="TND",
            layout_kv="PA_BSND", attention_mode=2,
        )[0]  # fmt: skip
        for row in range(4):
            seen = int(call["full_kv_actual_seq"][row // 2]) - 1 + row % 2
            keys = torch.stack([full(call, row // 2, each) for each in lists[row].tolist() if 0 <= each < seen])
            scores = torch.cat((rope[row], query[row]), -1) @ keys.T * 0.25
            torch.testing.assert_close(got[row], scores.softmax(-1) @ keys[:, 16:])
        lists.copy_(lists.roll(1, 0))


@pytest.mark.rotates(4)
def test_one_symbolic_graph_serves_other_sizes():
    ensure()
    op = OPERATORS[NAMES[1]]
    growing = lambda b, s: gathering(tuple(range(s, s + b)), queries=2, k=s, size=4, full_pages=6)  # noqa: E731
    small, large = (made(growing(*sizes)) for sizes in ((2, 5), (3, 7)))
    kept = traced(op.overload(), small)
    inlined = traced(op.overload(), small, decomposition_table=decompositions())
    assert "custom" in operators_in(kept)
    assert not operators_in(inlined) & {"custom", "npu"}
    expected = flat(op.fallback(**large))
    for graph in (kept, inlined):
        for got, wanted in zip(flat(called(graph, large)), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


def test_the_decomposition_runs_where_the_package_is_not_there():
    call = made(gathering((11, 6)))
    expected = FUNCTIONAL.fallback(**call)
    got = (run_by_default(IN_PLACE, **call), *(call[name] for name in IN_PLACE.written))
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_ge_would_write_into_copies():
    call = sized()
    assert "cannot be lowered by torchair" in str(refusal(IN_PLACE, "ascend910_93", (), call, "torchair"))
    for lowering in ("eager", "npugraph_ex"):
        assert refusal(IN_PLACE, "ascend910_93", (), call, lowering) is None
    assert "does not exist on ascend910b" in str(refusal(IN_PLACE, "ascend910b", (), call, "eager"))


def test_what_no_list_names_is_not_read():
    call = made(gathering((11, 6), k=4, full_pages=6), torch.bfloat16)
    rows = (14 * 4 - 2 * 4) * (24 + 16)
    assert IN_PLACE.skipped((), call) == 2 * rows
