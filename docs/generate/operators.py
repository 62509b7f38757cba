"""Pages of the operators: one for each, and an index by domain."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from docs.generate.markdown import DOMAINS, ROOT, code, escaped, item, link, prose, slug, source, table
from fusion.frontend.catalogue import OperatorEntry, operator_entries
from fusion.operators import CHIPS, HOST, OPERATORS

CHIP_NAMES = dict(zip((HOST, *CHIPS), ("every machine", "A2", "A3", "950"), strict=True))
"""Targets -> heads of columns."""
_HEAD = """# Operators

The fused operators that the pass can emit, by domain, as `cann-fusion ops` lists them. `cann-fusion ops NAME` shows the
schema of one, its arguments, its limits on each chip, and its sources.

A call that breaks a limit of the target is refused, and the report says which limit. Where there is no kernel, an
operator is computed by its decomposition: a call that the decomposition does not compute raises an `OperatorError` that
names the argument, for fake tensors too.
"""


def index(page: str = "operators.md") -> str:
    """Return the index at docs/`page`: the repository's links to the declarations, that of the site to the pages."""
    target = _declaration if page == "operators.md" else _page
    return _HEAD + "".join(_domain(domain, page, target) for domain in DOMAINS)


def pages() -> dict[str, str]:
    """Return the page of each operator, by its path below docs/."""
    return {uri(entry): page(entry) for entry in operator_entries()}


def uri(entry: OperatorEntry) -> str:
    """Return the path of the page of an operator below docs/."""
    return f"operators/{short(entry)}.md"


def short(entry: OperatorEntry) -> str:
    """Return the name of an operator without its namespace, the names of overloads joined by an underscore."""
    return entry.name.split("::")[1].replace(".", "_").strip("_")


def domain_of(entry: OperatorEntry) -> str:
    """Return the folder of `fusion/operators` that declares an operator."""
    return _module(entry).split(".")[2]


def page(entry: OperatorEntry) -> str:
    """Return the page of an operator."""
    here = uri(entry)
    title = DOMAINS[domain_of(entry)]
    chips = ", ".join(f"{CHIP_NAMES[chip]} (`{chip}`)" for chip in entry.targets)
    parts = [
        f"# {short(entry)}\n",
        f"`{entry.name}` on {chips or 'no chip yet'}. Domain: [{title}](index.md#{slug(title)}).\n",
        f"{prose(entry.summary)}\n",
        f"```text\n{_schema(entry.schema)}\n```\n",
        "## Arguments\n",
        _arguments(entry),
        *_raising(entry),
        *_limits(entry),
        "## Compilers\n",
        f"{_compilers(entry)}\n",
        "## Sources\n",
        f"Declared in {source(_module(entry), here)}. {_callers(entry, here)}Read in: {prose(entry.source)}.\n",
    ]
    return "\n".join(parts)


def _domain(domain: str, here: str, target: Callable[[OperatorEntry, str], str]) -> str:
    entries = [entry for entry in operator_entries() if domain_of(entry) == domain]
    lines = [item(f"{target(entry, here)} ({_chips(entry)}): {prose(entry.summary)}") for entry in entries]
    return f"\n## {DOMAINS[domain]}\n\n" + "\n".join(lines) + "\n"


def _declaration(entry: OperatorEntry, here: str) -> str:
    return link(code(entry.name), _module(entry).replace(".", "/") + ".py", here)


def _page(entry: OperatorEntry, here: str) -> str:
    return link(code(entry.name), f"docs/{uri(entry)}", here)


def _chips(entry: OperatorEntry) -> str:
    return ", ".join(CHIP_NAMES[chip] for chip in entry.targets) or "no chip"


def _module(entry: OperatorEntry) -> str:
    return str(OPERATORS[entry.name].compute.__module__)


def _schema(schema: str) -> str:
    """Return `schema` with an argument in each line where one line is too long."""
    if len(schema) <= 100:
        return schema
    name, _, rest = schema.partition("(")
    inside, _, results = rest.rpartition(") -> ")
    return f"{name}(\n    " + inside.replace(", ", ",\n    ") + f"\n) -> {results}"


def _arguments(entry: OperatorEntry) -> str:
    names = dict.fromkeys((*entry.computed, *entry.without_effect, *entry.uncomputed))
    return table(
        ("argument", "dims", "dtypes", "in the decomposition"),
        (
            (
                code(name),
                _dims(entry.dims.get(name, "")),
                ", ".join(entry.dtypes.get(name, ())),
                _answer(entry, name),
            )
            for name in names
        ),
    )


def _dims(alternatives: str) -> str:
    """Return the dims of an argument: each alternative once, with the values of the attribute that it belongs to."""
    modes: dict[str, list[str]] = {}
    for each in filter(None, alternatives.split(" / ")):
        mode, _, dims = each.rpartition(":")
        values = modes.setdefault(dims.strip(), [])
        values += [mode] * (bool(mode) and mode not in values)
    return "<br>".join(f"{code(f'[{dims}]')}{_condition(values)}" for dims, values in modes.items())


def _condition(modes: list[str]) -> str:
    """Return the modes `attribute=value` of some dims in words, "" for dims of any mode."""
    names = dict.fromkeys(mode.partition("=")[0] for mode in modes)
    values = ", ".join(mode.partition("=")[2] for mode in modes)
    return f" {' '.join(map(code, names))} {values}" if modes else ""


def _answer(entry: OperatorEntry, name: str) -> str:
    if name in entry.computed:
        return "computed"
    return "without effect" if name in entry.without_effect else "raises unless it is the default"


def _raising(entry: OperatorEntry) -> list[str]:
    """Return the arguments that raise unless they have their defaults, by the reason."""
    because: dict[str, list[str]] = {}
    for name, reason in entry.uncomputed.items():
        because.setdefault(reason, []).append(code(name))
    lines = [item(f"{', '.join(names)}: {prose(reason)}") for reason, names in because.items()]
    return ["\n## Raises\n", "Unless they have their defaults:\n", "\n".join(lines) + "\n"] if lines else []


def _limits(entry: OperatorEntry) -> list[str]:
    """Return the limits: a table for each group of targets that share some."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for limit in dict.fromkeys(limit for target in CHIP_NAMES for limit in entry.limits.get(target, ())):
        shared = tuple(target for target in CHIP_NAMES if limit in entry.limits.get(target, ()))
        groups.setdefault(shared, []).append(limit)
    tables = [_limits_on(targets, limits) for targets, limits in groups.items()]
    return ["\n## Limits\n", "A call must keep to:\n", *tables] if tables else []


def _limits_on(targets: tuple[str, ...], limits: list[str]) -> str:
    rows = [_limit(each) for each in limits]
    columns = ("limit", "of calls with", "because")
    kept = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    body = table([columns[at] for at in kept], ([row[at] for at in kept] for row in rows))
    return f"### On {', '.join(CHIP_NAMES[each] for each in targets)}\n\n{body}"


def _limit(text: str) -> tuple[str, str, str]:
    """Return the predicate of a limit, the calls that have to keep to it, and the reason."""
    predicate, _, because = text.partition(": ")
    wanted, _, calls = predicate.partition(" where ")
    return code(wanted), code(calls) if calls else "", escaped(because)


def _compilers(entry: OperatorEntry) -> str:
    if not entry.lowerings:
        text = "No compiler of a chip takes this form: it stands in graphs until the in-place form replaces it"
        return f"{text}, and runs by its decomposition."
    older = f" In older packages it is called `{entry.older}`." if entry.older else ""
    return f"Runs on a chip by {', '.join(code(each) for each in entry.lowerings)}.{older}"


def _callers(entry: OperatorEntry, here: str) -> str:
    """Name the modules of the library that call an operator."""
    namespace, name = entry.name.split("::")
    called = re.compile(rf"ops\.{namespace}\.{re.escape(name.partition('.')[0])}\b")
    found = [path for path, text in _library().items() if called.search(text)]
    return f"Emitted by {', '.join(link(code(path), path, here) for path in found)}. " if found else ""


@cache
def _library() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "patterns").rglob("*.py"))}
