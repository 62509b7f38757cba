"""The command of the attack: `python -m tests.attack --cases 5000 --seed 7 --target ascend910_93 --lower eager`."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch._inductor import config

from .doors import SHARES, door_of
from .generate import blocks_of, case
from .oracle import TARGETS, Verdict, verdict
from .program import Program
from .shrink import shrunk

err = Console(stderr=True)


@dataclass
class Figures:
    """What a run came to.

    Attributes:
        statuses: how many cases came to what.
        doors: how many went through which door.
        fused: cases in which something was fused.
        parts: parts that were built to be fused.
        missed: those of them that were not, with the target and the reason.
        kinds: numbers of the cases that failed, by what they have in common.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    doors: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    parts: int = 0
    missed: Counter[tuple[str, ...]] = field(default_factory=Counter)
    kinds: dict[str, list[int]] = field(default_factory=dict)

    def add(self, number: int, door: str, found: Verdict) -> bool:
        """Count a case; whether it is the first that fails so."""
        self.doors[door or "backend"] += 1
        self.statuses[found.status] += 1
        self.fused += any(found.fused.values())
        self.parts += found.parts
        self.missed.update(found.missed)
        if found.bad:
            self.kinds.setdefault(found.kind, []).append(number)
        return found.bad and len(self.kinds[found.kind]) == 1

    def line(self) -> str:
        """All in one line."""
        cases = sum(self.statuses.values())
        share = 1 - sum(self.missed.values()) / self.parts if self.parts else 1.0
        others = ", ".join(f"{count} {name}" for name, count in sorted(self.statuses.items()) if name in OTHERS)
        return (
            f"{cases} cases, {self.fused} fused, {self.statuses['wrong']} wrong, {self.statuses['raised']} exceptions, "
            f"{share:.1%} of {self.parts} parts built to be fused"
            + (f" ({others})" if others else "")
            + "; doors: "
            + ", ".join(f"{count} {name}" for name, count in self.doors.most_common())
        )


OTHERS = ("invalid", "untraced", "unmeasured")


def main(
    cases: Annotated[int, typer.Option(help="how many programs")] = 1000,
    seed: Annotated[int, typer.Option(help="the same seed gives the same programs")] = 0,
    first: Annotated[int, typer.Option(help="number of the first one")] = 0,
    block: Annotated[list[str], typer.Option(help="a block or a domain of them; may be given again")] = [],  # noqa: B006
    target: Annotated[list[str], typer.Option(help="what to fuse for; may be given twice")] = list(TARGETS),  # noqa: B006
    lower: Annotated[str, typer.Option(help="who runs the fused graphs: eager or inductor")] = "eager",
    door: Annotated[list[str], typer.Option(help="guest, exported, ...; may be given again")] = [],  # noqa: B006
    kernels: Annotated[bool, typer.Option(help="Inductor builds kernels; without, it calls torch's: faster")] = True,
    missed: Annotated[bool, typer.Option(help="list what was not fused, and why")] = False,
) -> None:
    """Attack with generated programs; failures are printed small, ready for tests/attack/kept.txt.

    Where it is interrupted, it tells what it has found so far.
    """
    figures = Figures()
    with contextlib.suppress(KeyboardInterrupt), config.patch(fallback_by_default=not kernels):
        programs = ((number, case(seed, number, blocks_of(block))) for number in range(first, first + cases))
        _attack(figures, cases, programs, target, lower, door)
    for kind, numbers in sorted(figures.kinds.items(), key=lambda each: -len(each[1])):
        print(f"{len(numbers)} times: {kind} (cases {', '.join(map(str, numbers[:5]))})")
    for (part, where, why), count in figures.missed.most_common() if missed else ():
        print(f"{count} of {part} not fused on {where}: {why}")
    print(figures.line())
    raise typer.Exit(bool(figures.statuses["wrong"] + figures.statuses["raised"]))


def _attack(
    figures: Figures,
    cases: int,
    programs: Iterator[tuple[int, Program]],
    targets: list[str],
    lower: str,
    doors: list[str],
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as progress:
        task = progress.add_task("attacking", total=cases)
        for number, program in programs:
            door = doors[number % len(doors)] if doors else door_of(number)
            judge = partial(verdict, targets=_turn(targets, number) if door else targets, lowering=lower, door=door)
            found = judge(program)
            if figures.add(number, door, found):
                _tell(number, program, found, judge)
            progress.update(task, advance=1, description=f"{len(figures.kinds)} kinds of failures")
            if number % 100 == 99:
                gc.collect()
                if not err.is_terminal:
                    err.print(figures.line())


def _turn(targets: list[str], number: int) -> list[str]:
    """One of the targets, by turns: the other doors are slower."""
    return [targets[number // len(SHARES) % len(targets)]]


def _tell(number: int, program: Program, found: Verdict, judge: Callable[[Program], Verdict]) -> None:
    small = shrunk(program, lambda each: judge(each).kind == found.kind)
    print(f"# case {number}, {found.status}: {found.detail}\n{small!r}", flush=True)


if __name__ == "__main__":
    typer.run(main)
