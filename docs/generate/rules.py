"""Pages of the rules: all on one page for the repository, one page each and an index for the site."""

from __future__ import annotations

from docs.generate.markdown import DOMAINS, code, item, link, prose, source, table, wrapped
from fusion.frontend.catalogue import RuleEntry, rule_entries
from fusion.frontend.library import installed

_HEAD = """# Rules

The rules that this package installs, as `cann-fusion rules` lists them: what each means, the forms in which it is
recognised in any spelling, what looks alike but is refused, and what it becomes: the lowering that is legal and
cheapest on the target. The names are those that the options `rules`, `disable`, `opt_in` and `unsafe` take.
"""


def all_rules() -> str:
    """Return the page of all rules, docs/rules.md."""
    return _HEAD + "".join(f"\n## {each.name}\n\n" + _body(each, "") for each in rule_entries())


def index() -> str:
    """Return the index of the site, docs/rules/index.md: a table for each domain."""
    parts = [_HEAD]
    for domain, title in DOMAINS.items():
        rows = [
            (f"[{code(each.name)}]({each.name}.md)", prose(each.meaning), "opt-in" if each.opt_in else "")
            for each in rule_entries()
            if _domain(each) == domain
        ]
        parts += [f"\n## {title}\n\n", table(("rule", "recognises", ""), rows)] if rows else []
    return "".join(parts)


def pages() -> dict[str, str]:
    """Return the page of each rule, by its path below docs/."""
    return {f"rules/{each.name}.md": _page(each) for each in rule_entries()}


def _page(entry: RuleEntry) -> str:
    here = f"rules/{entry.name}.md"
    texts = link("reasons", f"docs/reasons/{_domain(entry)}.md", here)
    tail = f"Declared in {source(_module(entry), here)}. What its refusals say, with code that gets them: {texts}.\n"
    return f"# {entry.name}\n\n{_body(entry, '#')}\n{tail}"


def _body(entry: RuleEntry, level: str) -> str:
    """Return the description of a rule; its lists are headings where `level` is "#", else lines."""
    uses = f" Made of {', '.join(code(each) for each in entry.uses)}." if entry.uses else ""
    off = " Opt-in: off unless the option `opt_in` names it." if entry.opt_in else ""
    parts = [wrapped(f"{prose(entry.meaning)}{off}{uses}"), wrapped(prose(entry.formula), indent="> ", first="> ")]
    for title, described in _lists(entry):
        parts.append(f"{level}# {title}" if level else f"{title}:")
        parts.append("\n".join(item(f"{names}: {prose(text)}") for text, names in _by_text(described).items()))
    return "\n\n".join(parts) + "\n"


def _by_text(described: dict[str, str]) -> dict[str, str]:
    """Return the texts that describe something, each with all names that it describes."""
    names: dict[str, list[str]] = {}
    for name, text in described.items():
        names.setdefault(text, []).append(code(name))
    return {text: ", ".join(those) for text, those in names.items()}


def _lists(entry: RuleEntry) -> list[tuple[str, dict[str, str]]]:
    lists = ("Written forms", entry.patterns), ("Lowerings", entry.lowerings), ("Refused", entry.refuses)
    return [(title, described) for title, described in lists if described]


def _module(entry: RuleEntry) -> str:
    return next(type(each).__module__ for each in installed().rules if each.name == entry.name)


def _domain(entry: RuleEntry) -> str:
    """Return the folder of `patterns` that declares a rule."""
    return _module(entry).split(".")[1]
