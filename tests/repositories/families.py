"""What becomes of each piece, read from the texts that are kept: nothing is traced."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tests.goldens.outcome import kept

from .base import Piece

TARGET = "ascend910_93"
ATTENTIONS = ("attention", "latent_attention", "ring_mla", "sparse_attention")
"""Rules that put one operator in the place of a softmax attention."""


@dataclass(frozen=True)
class Told:
    """What a text says of one piece on the target.

    Attributes:
        before: launches of the plain code.
        after: launches of the fused code.
        rules: how often each rule was applied.
        refused: why others were not, by "rule: reason".
    """

    before: int
    after: int
    rules: Counter[str]
    refused: tuple[str, ...]

    @property
    def reasons(self) -> list[str]:
        """Why attention stays as it is written."""
        return [each for each in self.refused if each.partition(":")[0] in (*ATTENTIONS, "softmax_attention")]

    @property
    def attentions(self) -> int:
        """How many attentions became one operator each."""
        return sum(self.rules[rule] for rule in ATTENTIONS)


def told(piece: Piece) -> Told:
    """What is kept of a piece."""
    return of_case(piece.file, piece.name)


def of_case(file: str, name: str) -> Told:
    """What is kept of a case in a file."""
    lines = _of_target(kept(file)[name])
    before, after = (int(number) for number in re.findall(r"(\d+) -> (\d+) launches", lines[0])[0])
    rules = Counter[str]()
    for rule, count in re.findall(r"^  by (\w+) .*?(?: x(\d+))?$", "\n".join(lines), re.MULTILINE):
        rules[rule] += int(count or 1)
    refused = (
        re.sub(r" x\d+$", "", line.removeprefix("  refused: ")) for line in lines if line.startswith("  refused: ")
    )
    return Told(before, after, rules, tuple(dict.fromkeys(refused)))


def _of_target(text: str) -> list[str]:
    """The lines of the block whose head names the target."""
    blocks = re.split(r"\n(?=\S)", text)
    return next(each for each in blocks if TARGET in each.partition(":")[0]).split("\n")
