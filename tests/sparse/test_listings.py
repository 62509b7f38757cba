"""What the facets say to operators: queries that see nothing of their list, and how many keys there are."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from patterns.sparse.attention.list_sources import GatheredRows
from patterns.sparse.indexer.indexer import Seen


@pytest.mark.parametrize(("empty", "posed"), [("mean", [0.0, 1.0]), ("nan", [1.0, 1.0]), ("zero", [1.0, 1.0])])
def test_queries_without_keys_are_posed_as_0_where_they_give_the_mean(empty: str, posed: list[float]):
    places, hidden = torch.tensor([[[4, 5], [6, 7]]]), torch.tensor([[[True, True], [True, False]]])
    rows = GatheredRows(places=places, hidden=hidden, distinct=False, ends=False, fully_masked_row=empty)
    for query in rows.posed(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 2)):
        assert [each.unique().item() for each in query[0]] == posed


def test_a_length_that_is_not_known_is_told_although_it_is_the_whole_room_now():
    shapes = ShapeEnv()
    source = ConstantSource("keys")
    length = shapes.create_symintnode(shapes.create_symbol(16, source), hint=16, source=source)
    with FakeTensorMode(shape_env=shapes):
        seen = Seen(mask_kind="none", kv_len=length, kv_lens=None, row_lens=None, every_row_nonempty=True)
        mode, lengths = seen.lengths(torch.empty(2, 1, 4, 8), 16, 16)
        assert (mode, lengths is not None and lengths.shape) == (0, (2,))
        known = Seen(mask_kind="none", kv_len=16, kv_lens=None, row_lens=None, every_row_nonempty=True)
        assert known.lengths(torch.empty(2, 1, 4, 8), 16, 16) == (0, None)
