"""Programs out of blocks: some composed, a few repeated as layers, and most of them changed slightly."""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Mapping, Sequence

import torch

from fusion.frontend.library import installed

from .blocks import DOMAINS, Block
from .mutate import assigned, mutated
from .program import Input, Program, changed
from .writer import Pick, Writer

DTYPES = ("bfloat16", "bfloat16", "float16", "float16", "float16", "float32", "float32", "float64")
LEVELS = (6e4, 4e3, 250.0, 1e-2, 1e-4, 1e-6, 2e-7)
"""What the largest number of an input is brought to, at most, where a program is tried at the ends of its range."""
SIZES = {"B": (1, 2, 3), "S": (1, 2, 3, 4, 6, 7), "T": (1, 2, 5, 16)}
CHANGES = (0, 0, 0, 1, 1, 1, 2, 2, 3)
SCALED = ("normal", "gain", "matrix", "rows", "apart")
"""Kinds of inputs that hold numbers of any size."""
RULES = tuple(sorted(each.name for each in installed().rules if not each.opt_in))
BLOCKS: tuple[Block, ...] = tuple(block for name in DOMAINS if name != "plumbing" for block in DOMAINS[name])


def blocks_of(names: Sequence[str]) -> tuple[Block, ...]:
    """Those of these names, of a domain or of their own; all of them without any.

    Raises:
        KeyError: nothing has such a name.
    """
    named = {name: DOMAINS[name] for name in DOMAINS} | {each.__name__: (each,) for each in BLOCKS}
    return tuple(block for name in names for block in named[name]) if names else BLOCKS


def case(seed: int, number: int, blocks: tuple[Block, ...] = BLOCKS) -> Program:
    """The case of this number, of these blocks."""
    chance = random.Random(f"{seed} {number}")
    return generated(chance.choice, blocks)


def generated(pick: Pick, blocks: tuple[Block, ...] = BLOCKS) -> Program:
    """A program, every choice made by `pick`."""
    built = composed(pick, blocks)
    if pick((True, *[False] * 9)):
        built = repeated(built, pick)
    count = pick(CHANGES)
    built = mutated(built, count, pick) if count else built
    if pick((True, *[False] * 7)):
        built = changed(built, disabled=(pick(RULES),), fusable=())
    return scaled(built, pick) if pick((True, False, False)) else built


def composed(pick: Pick, blocks: tuple[Block, ...] = BLOCKS) -> Program:
    """A program as people write it."""
    sizes = {name: pick(values) for name, values in SIZES.items()}
    w = Writer(pick, sizes, pick(DTYPES))
    if w.maybe(20):
        sizes[pick(tuple(SIZES))] = 0
    for _ in range(pick((1, 1, 2, 2, 3))):
        pick(blocks)(w)
        if w.maybe(5):
            pick(DOMAINS["plumbing"])(w)
    again = tuple((name, 4 if size > 4 else size + 2) for name, size in sizes.items()) if w.maybe(8) else ()
    built = w.program(again, autocast=w.maybe(10))
    built = built if all(sizes.values()) else changed(built, fusable=())
    built = built if not built.autocast or built.runs() else changed(built, autocast=False)
    return _laid_otherwise(built, pick) if w.maybe(5) else built


def scaled(program: Program, pick: Pick) -> Program:
    """Bring one input of `program`, some or all to an end of the range of float16 or to the midst of it.

    Most of them run in float16, which is where numbers leave their range. A least scale of int8 numbers stands for rows
    of zeros alone, so that none is brought near it; numbers that hide keys, such as -1e4, are taken to be lower than
    scores are, so that these are not brought up to them.
    """
    numbers = [number for number, each in enumerate(program.inputs) if each.values in SCALED]
    chosen = pick((numbers, [each for each in numbers if pick((True, False))], [pick(numbers or (0,))]))
    levels = LEVELS[:4] if any("1e-8" in line for line in program.lines) else LEVELS
    hides = any("-1e4" in line or "-1e9" in line for line in program.lines)
    levels = [each for each in levels if each < 1] if hides else levels
    level, inputs = pick(tuple(levels)), list(program.inputs)
    for number in chosen if numbers else ():
        top = program.largest(inputs[number])
        inputs[number] = changed(inputs[number], power=math.floor(math.log2(level / top)) if top else 0)
    made = changed(program, inputs=tuple(inputs), mutations=(*program.mutations, f"scaled up to {level}"))
    narrow = program.dtype == "bfloat16" and pick((True, True, False))
    return changed(made, dtype="float16", fusable=()) if narrow else made


def repeated(program: Program, pick: Pick) -> Program:
    """A program as several layers: with inputs of their own or shared ones, each reading the one before if it can.

    As it was where that does not run.
    """
    count = pick((4, 5, 6))
    own = [each for each in program.inputs if pick((True, True, False))]
    chained = pick((*(each.name for each in own), ""))
    chains = [(chained, result) for result in _alike(program, chained)] if chained else []
    found = (_layers(program, own, count, chain) for chain in (*chains, ("", "")))
    made = next((each for each in found if each.runs()), program)
    return made if pick((True, False)) or made is program else changed(made, results=made.results[-1:])


def _alike(program: Program, name: str) -> list[str]:
    """The results that have the shape of an input: torch's attention reads on behind values of fewer rows."""
    if not program.runs():
        return []
    found = list(program.results)
    for again in (False, True) if program.again else (False,):
        given = dict(zip((each.name for each in program.inputs), program.tensors(again), strict=True))
        with torch.no_grad():
            made = dict(zip(program.results, program.function()(*given.values()), strict=True))
        found = [each for each in found if made[each].shape == given[name].shape]
    return found


def _layers(program: Program, own: Sequence[Input], count: int, chain: tuple[str, str]) -> Program:
    """So many layers with inputs of their own, each reading a result of the one before as the input of that name."""
    named = {each.name for each in own} | {name for line in program.lines for name in assigned(line)}
    inputs, lines, results = [each for each in program.inputs if each not in own], list[str](), list[str]()
    for number in range(count):
        names = {name: f"{name}_{number}" for name in named}
        if number and chain[0]:
            names[chain[0]] = f"{chain[1]}_{number - 1}"
        inputs += [changed(each, name=names[each.name]) for each in own if not (number and each.name == chain[0])]
        lines += [_renamed(line, names) for line in program.lines]
        results += [names[each] for each in program.results if each in names]
    given = tuple(dict.fromkeys(results or program.results))
    return changed(program, inputs=tuple(inputs), lines=tuple(lines), results=given, fusable=())


def _renamed(line: str, names: Mapping[str, str]) -> str:
    tree = ast.parse(line)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
    return ast.unparse(tree)


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
