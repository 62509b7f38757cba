"""Programs out of blocks: two or three of them, composed, and most of them changed slightly afterwards."""

from __future__ import annotations

import random

from .blocks import DOMAINS, Block
from .mutate import mutated
from .program import Program, changed
from .writer import Pick, Writer

DTYPES = ("bfloat16", "float16", "float32")
SIZES = {"B": (1, 2, 3), "S": (1, 2, 3, 4, 6, 7), "T": (1, 2, 5, 16)}
CHANGES = (0, 0, 0, 1, 1, 1, 2, 2, 3)
BLOCKS: tuple[Block, ...] = tuple(block for name in DOMAINS if name != "plumbing" for block in DOMAINS[name])


def case(seed: int, number: int) -> Program:
    """The case of this number."""
    chance = random.Random(f"{seed} {number}")
    return generated(chance.choice)


def generated(pick: Pick) -> Program:
    """A program, every choice made by `pick`."""
    built = composed(pick)
    count = pick(CHANGES)
    return mutated(built, count, pick) if count else built


def composed(pick: Pick) -> Program:
    """A program as people write it."""
    sizes = {name: pick(values) for name, values in SIZES.items()}
    w = Writer(pick, sizes, pick(DTYPES))
    if w.maybe(20):
        sizes[pick(tuple(SIZES))] = 0
    for _ in range(pick((1, 1, 2, 2, 3))):
        pick(BLOCKS)(w)
        if w.maybe(5):
            pick(DOMAINS["plumbing"])(w)
    again = tuple((name, 4 if size > 4 else size + 2) for name, size in sizes.items()) if w.maybe(8) else ()
    built = w.program(again, autocast=w.maybe(10))
    built = built if all(sizes.values()) else changed(built, fusable=())
    built = built if not built.autocast or built.runs() else changed(built, autocast=False)
    return _laid_otherwise(built, pick) if w.maybe(5) else built


def _laid_otherwise(program: Program, pick: Pick) -> Program:
    """One input lies in memory in another way: the fused program must not mind."""
    numbers = [number for number, each in enumerate(program.inputs) if each.values == "normal" and each.dims]
    if not numbers:
        return program
    number = pick(numbers)
    inputs = list(program.inputs)
    layout = pick(("transposed", "reversed", "offset", "strided"))
    inputs[number] = changed(inputs[number], layout=layout)
    return changed(program, inputs=tuple(inputs), fusable=())
