"""Expectations of a report, and their text as a TOML file: sorted, with equal layers folded to one pattern."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from fusion.frontend.expectations.compare import counts_of, modules_of
from fusion.frontend.expectations.contract import Expectations
from fusion.frontend.expectations.path_patterns import folded, layer_part
from fusion.report.report import Report

_COMMENT = (
    "# at_most: greatest allowed counts. fusions: fusions in all, at least. modules: fusions in each module of a path,",
    "# at least; * is any name, 0-2,5 one of these numbers. Rules are those that `cann-fusion rules` lists.",
)


def expectations_of(report: Report) -> Expectations:
    """Return expectations that hold a model to its `report`: fusions in all and by part of a layer, counts at most."""
    by_module: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in report.matches:
        if each.module:
            by_module[layer_part(each.module)][each.rule] += 1
    counted = {path: dict(sorted(counts.items())) for path, counts in by_module.items()}
    modules = dict(folded(counted, modules_of(report)))
    fusions = Counter(each.rule for each in report.matches)
    return Expectations("", report.target, counts_of(report), dict(sorted(fusions.items())), modules)


def written(expected: Expectations, notes: Iterable[str]) -> str:
    """Write `expected` as TOML, below the lines of `notes` as comments."""
    lines = [*(f"# {note}" for note in notes), *_COMMENT]
    lines += [f"target = {json.dumps(expected.target)}"] if expected.target else []
    tables = {"[at_most]": expected.at_most, "[fusions]": expected.fusions}
    tables |= {f"[modules.{json.dumps(path, ensure_ascii=False)}]": each for path, each in expected.modules.items()}
    return "\n".join([*lines, *(line for head, each in tables.items() if each for line in _table(head, each))]) + "\n"


def _table(head: str, counts: Mapping[str, int]) -> list[str]:
    return ["", head, *(f"{name} = {count}" for name, count in counts.items())]
