"""Every push: shares of 120 programs by a fixed seed and of 1,440 by one that changes; every night all of them.

The seed that changes is printed at the top of a run; `CANN_FUSION_SEED=<it>` gives the same programs again. So does
`python -m tests.attack --seed <it>`, which goes on for as long as is wished.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .doors import DOORS, door_of
from .generate import blocks_of, case, composed, generated
from .kept import KEPT, Kept
from .oracle import TARGETS, Verdict, at_the_door, verdict
from .program import Input, Program, changed
from .shrink import shrunk
from .writer import Writer

pytestmark = pytest.mark.rotates(12)

FIXED = 2026
CHANGING = int(os.environ.get("CANN_FUSION_SEED", "0"))
CHUNK = 10
FUSED = ("guest", "exported", "injected")
"""Doors that say what was fused."""
SHARE = 0.8
"""Of the parts that are built to be fused, so many must be."""


def held(program: Program, number: int, door: str = "") -> Verdict:
    """The verdict of a program that must be right, for one target or the other by turns, by a door.

    Raises:
        AssertionError: it is not; the message has the smallest program found that goes wrong so.
    """
    judge = partial(verdict, targets=TARGETS[number % 2 :][:1], door=door)
    found = judge(program)
    if found.bad:
        pytest.fail(described(program, found, judge), pytrace=False)
    return found


def described(program: Program, found: Verdict, judge: Callable[[Program], Verdict]) -> str:
    """Describe a case that fails, with the smallest program that does."""
    small = shrunk(program, lambda each: judge(each).kind == found.kind)
    return f"{found.status}: {found.detail}\nSmallest program that goes wrong so, for tests/attack/kept.txt:\n{small!r}"


def run(first: int, number: int, doors: bool = False) -> None:
    """Try some cases of one seed, by the backend or by each one's door."""
    for each in range(first, first + CHUNK):
        held(case(number, each), each, door_of(each) if doors else "")


@pytest.mark.parametrize("first", range(0, 120, CHUNK))
def test_programs_are_what_they_were(first):
    run(first, FIXED)


@pytest.mark.parametrize("first", [pytest.param(n, marks=pytest.mark.rotates) for n in range(0, 1440, CHUNK)])
def test_many_programs_are_what_they_were(first):
    run(first, CHANGING, doors=True)


@st.composite
def programs(draw: Callable[..., object]) -> Program:
    return generated(lambda options: draw(st.sampled_from(options)))


@pytest.mark.rotates
@seed(CHANGING)
@settings(
    max_examples=40, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(program=programs())
def test_programs_that_change_are_what_they_were(program):
    held(program, len(program.lines))


@pytest.mark.rotates(12)
def test_what_is_built_to_be_fused_is_fused():
    chance = random.Random(FIXED)
    parts, missed = 0, Counter[tuple[str, ...]]()
    for number in range(40):
        found = held(changed(composed(chance.choice), autocast=False), number)
        parts += found.parts
        missed.update(found.missed)
    lines = "\n".join(f"{count} of {part} on {target}: {why}" for (part, target, why), count in missed.most_common())
    assert sum(missed.values()) <= (1 - SHARE) * parts, f"of {parts} parts these were not fused:\n{lines}"


@pytest.mark.parametrize("door", DOORS)
def test_each_door_gives_what_plain_python_does(door):
    found = held(composed(random.Random(FIXED).choice, blocks_of(["add_rms_norm"])), 0, door)
    assert found.status == "right"
    assert door not in FUSED or found.fused["host"]


@pytest.mark.parametrize("kept", [pytest.param(each, id=each.name) for each in KEPT])
def test_what_went_wrong_once_is_right(kept: Kept):
    found = verdict(kept.program, door=kept.door)
    assert found.status == "right", found.detail


@pytest.mark.parametrize(
    ("number", "lowering"), [*((n, "eager") for n in range(4)), *((n, "inductor") for n in range(4, 6))]
)
def test_the_backend_itself_does_what_plain_python_does(number, lowering):
    program = composed(random.Random(number).choice)
    different = at_the_door(program, TARGETS[number % 2], lowering)
    assert not different, f"{different[0]}\n{program!r}"


def test_a_program_prints_as_what_is_read():
    for number in range(20):
        program = case(FIXED, number)
        assert Program.of(repr(program)) == program


def test_a_case_depends_on_its_number_alone():
    assert case(3, 7) == case(3, 7)
    assert case(3, 7) != case(3, 8)


def test_blocks_can_be_chosen():
    assert {each.__name__ for each in blocks_of(["segments"])} == {"packed_segments", "paged_segments"}
    assert [each.__name__ for each in blocks_of(["int8_step"])] == ["int8_step"]
    assert case(3, 7, blocks_of(["int8_step"])) != case(3, 7)
    with pytest.raises(KeyError):
        blocks_of(["no such block"])


@pytest.mark.parametrize(("ends", "status"), [("1, 1, 4", "right"), ("1, 1, 3", "invalid"), ("2, 1, 4", "invalid")])
def test_products_of_groups_are_measured_where_the_groups_are_all_rows(ends, status):
    """Other rows hold what lay in memory before."""
    lines = (f"a, b = torch._grouped_mm(x, w, offs=torch.tensor([{ends}]).int()).chunk(2, -1)", "z = F.silu(a) * b")
    inputs = (Input("x", (4, 64)), Input("w", (3, 64, 64), "matrix"))
    found = verdict(Program(inputs, lines, ("z",), dtype="bfloat16"))
    assert found.status == status
    assert any(found.fused.values()) == (status == "right")


def test_a_fault_is_found_and_made_small():
    """A rule that forgets its epsilon, were there one."""
    w = Writer(random.Random(1).choice, {"B": 2, "S": 3, "T": 2}, "float32")
    x = w.take(("B", "S", 64))
    w.give(w.let(f"{x} * 2"), ("B", "S", 64))
    w.give(w.let(f"{x} + 1"), ("B", "S", 64))
    program = w.program((), False)
    small = shrunk(program, lambda each: any("* 2" in line for line in each.lines))
    assert len(small.lines) == len(small.results) == 1
