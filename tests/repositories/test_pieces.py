"""What repositories write keeps its numbers, is never more launches, and what stays as it is has a reason."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from torch import fx

from fusion import testing
from fusion.options import Options
from fusion.report.outcome import live_calls
from fusion.testing import DTYPES, LEVELS, Level, Trial

from .base import Piece
from .families import told
from .pieces import PIECES

pytestmark = pytest.mark.rotates(48)

HOST = Options(target="host", lower="eager")
NPU = Options(target="ascend910_93", lower="eager")
LAWS = (testing.means_what_it_says, testing.leaves_the_rest_alone, testing.emits_valid_calls)


def fused(piece: Piece, level: Level, dtype: torch.dtype) -> Trial:
    return testing.trial_of(piece.captured(dtype, level), HOST)


def launches(graph: fx.Graph) -> int:
    return sum(each.launches for each in live_calls(graph).values())


def calls_on_target(piece: Piece, level: Level, dtype: torch.dtype) -> tuple[int, int]:
    t = testing.trial_of(piece.captured(dtype, level), NPU)
    return launches(t.captured.graph.graph), launches(t.fused.graph)


def check(piece: Piece, level: Level, dtype: torch.dtype) -> None:
    t = fused(piece, level, dtype)
    assert launches(t.fused.graph) <= launches(t.captured.graph.graph)
    for law in LAWS:
        law(t)


LEAST = 175
"""How many attentions of all pieces become one operator each, at least."""
SETTINGS = [(piece, LEVELS[n % 3], DTYPES[n // 3 % 3]) for n, piece in enumerate(PIECES)]


def names(settings):
    for piece, level, dtype in settings:
        name = f"{piece.name.replace('/', '-')}-{level}-{str(dtype).removeprefix('torch.')}"
        yield pytest.param(piece, level, dtype, id=name)


@pytest.mark.parametrize(("piece", "level", "dtype"), names(SETTINGS))
def test_numbers_stay(piece: Piece, level: Level, dtype: torch.dtype):
    check(piece, level, dtype)


@pytest.mark.rotates
@pytest.mark.parametrize(("piece", "level", "dtype"), names(product(PIECES, LEVELS, DTYPES)))
def test_numbers_stay_in_every_setting(piece: Piece, level: Level, dtype: torch.dtype):
    check(piece, level, dtype)


@pytest.mark.rotates
@pytest.mark.parametrize(("piece", "level", "dtype"), names(product(PIECES, LEVELS, DTYPES)))
def test_no_more_calls_are_made_on_the_target(piece: Piece, level: Level, dtype: torch.dtype):
    counts = calls_on_target(piece, level, dtype)
    assert counts[1] <= counts[0]


@pytest.mark.rotates(3)
def test_complex_numbers_are_no_reason_to_make_more_calls():
    """Of two rotations of float32 by complex numbers one stays: its tables cost more calls than it makes."""
    (piece,) = (each for each in PIECES if each.name == "facebookresearch/sam2 attention to memories")
    for level in LEVELS:
        before, after = calls_on_target(piece, level, torch.float32)
        assert before == after


def test_what_keeps_attention_is_told_where_both_of_its_products_are_absorbed():
    (piece,) = (each for each in PIECES if each.name == "CompVis/latent-diffusion attention to words")
    outcome = testing.trial_of(piece.captured(torch.float32), NPU).outcome
    assert [each.match.rule.name for each in outcome.chosen] == ["absorbed_products"] * 2
    assert any(each.rule == "attention" and "query: it is float32" in each.reason for each in outcome.refusals)


def test_names_are_unique():
    assert [name for name, count in Counter(piece.name for piece in PIECES).items() if count > 1] == []


def test_attentions_become_one_operator_or_have_a_reason():
    """By the texts that are kept, which are tried beside the others."""
    found = {piece: told(piece) for piece in PIECES}
    assert [piece.name for piece, what in found.items() if what.after > what.before] == []
    assert [piece.name for piece, what in found.items() if what.attentions > piece.attentions] == []
    left = [piece for piece, what in found.items() if what.attentions < piece.attentions]
    silent = [piece.name for piece in left if not any(piece.why in reason for reason in found[piece].reasons)]
    assert silent == []
    assert sum(what.attentions for what in found.values()) >= LEAST
