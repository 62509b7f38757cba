"""Folding: equal layers under one name, `model.layers.1-59.mlp` for the modules of 59 layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, order=True)
class Layer:
    """A numbered module and its number: `model.layers` and 3."""

    stem: str
    number: int

    def __str__(self) -> str:
        return f"{self.stem}.{self.number}".lstrip(".")


def template(path: str) -> str:
    """Replace the numbers in the module `path` by stars: equal for the same module of every layer."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def folded(paths: Iterable[str]) -> str:
    """Name the modules `paths` in one text, with ranges for their numbers: `layers.0,2-5.mlp`."""
    kinds: dict[str, list[list[int]]] = {}
    for path in dict.fromkeys(paths):
        kinds.setdefault(template(path), []).append([int(part) for part in path.split(".") if part.isdigit()])
    return ", ".join(_named(kind, numbers) for kind, numbers in kinds.items())


def _named(kind: str, numbers: Collection[Collection[int]]) -> str:
    """Replace the stars of a template `kind` by ranges of the `numbers` that stand there."""
    columns = map(ranges, zip(*numbers, strict=True))
    return ".".join(next(columns) if part == "*" else part for part in kind.split("."))


def ranges(numbers: Iterable[int]) -> str:
    """Format `numbers` as ranges: "0,2-5"."""
    ordered = enumerate(sorted(set(numbers)))
    runs = ([number for _, number in run] for _, run in groupby(ordered, lambda each: each[1] - each[0]))
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def layers_of(paths: Iterable[str]) -> dict[str, Layer]:
    """Map each of `paths` that is inside a numbered module, one of several with that stem, to the outermost such."""
    split = {path: _levels(path) for path in dict.fromkeys(paths)}
    siblings = Counter(each.stem for each in {each for inside in split.values() for each in inside})
    own = ((path, [each for each in inside if siblings[each.stem] > 1]) for path, inside in split.items())
    return {path: several[0] for path, several in own if several}


def nesting(path: str) -> list[str]:
    """Split the `path` of a module into the names around it, outermost first; a number stays with the name before."""
    return re.findall(r"[^.]+(?:\.\d+(?=\.|$))*", path) or [""]


def _levels(path: str) -> list[Layer]:
    """List the numbered modules around `path`, outermost first."""
    parts = path.split(".") if path else []
    return [Layer(".".join(parts[:place]), int(part)) for place, part in enumerate(parts) if part.isdigit()]


def inside(path: str, layer: Layer) -> str:
    """Return the `path` of a module relative to `layer`: "self_attn.q_proj"."""
    return path.removeprefix(str(layer)).lstrip(".")


def alike(signatures: Mapping[Layer, object]) -> list[list[Layer]]:
    """Group layers of one stem with equal `signatures`, in the order of the first of each group."""
    groups: dict[tuple[str, object], list[Layer]] = {}
    for layer, signature in sorted(signatures.items(), key=lambda each: each[0]):
        groups.setdefault((layer.stem, signature), []).append(layer)
    return list(groups.values())
