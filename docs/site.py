"""Assemble the pages of the site, with those that only the site has, in build/pages.

python -m docs.site                # then: mkdocs build --strict --config-file build/mkdocs.yml, as `make site` does

The pages of the repository name files beside docs/ as GitHub shows them (`../patterns/norm/rms_norm.py`). The site has
a page for each file that is named, so that it is complete without a network.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate import operators, reasons, rules
from docs.generate.markdown import DOMAINS, ROOT, slug
from fusion.frontend.catalogue import operator_entries, rule_entries

DOCS = ROOT / "docs"
BESIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Files beside docs/ that are pages of the site under another name."""
SECTIONS = {"options.md": "Options", "support.md": "What works today, and what does not"}
"""Pages that are a section of README.md -> its heading."""
FOLDED = {"operators.md": "operators/index.md", "rules.md": "rules/index.md"}
"""Pages of the repository -> the index of the pages that the site has in their place."""
START = ["index.md", "first-fusion.md", "support.md", "families.md", "comparison.md"]
GUIDES = [
    "integration.md", "compiled.md", "generate.md", "guests.md", "inductor.md", "torchair.md", "npugraph-ex.md",
    "vllm.md", "export.md", "prepared.md", "verification.md", "troubleshooting.md",
]  # fmt: skip
REFERENCE = [
    "options.md", "glossary.md", "vendor-operators.md", "how-it-works.md", "performance.md", "forms.md", "words.md",
    "contributing.md", "changes.md",
]  # fmt: skip
RANKS = {"troubleshooting.md": 3, "glossary.md": 3, "forms.md": 0.3, "words.md": 0.2}
"""Pages -> their weight in the search, where that is not 1."""
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
_LINK = re.compile(r"(\]\()([^)\s#:]+)?(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^ *(?P<fence>```+).*?^ *(?P=fence)$", re.DOTALL | re.MULTILINE)
_Navigation = list[Any]


@cache
def pages() -> dict[str, str]:
    """Return the text of every page of the site, by its path."""
    texts = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name not in FOLDED}
    texts |= _from_readme() | {
        "operators/index.md": operators.index("operators/index.md"),
        "rules/index.md": rules.index(),
        "reasons/index.md": reasons.index(),
        **operators.pages(),
        **rules.pages(),
        **reasons.pages(),
    }
    named = {target for page, text in texts.items() for target in _sources(text, page)}
    found = {page: _linked(_ranked(text, page), page) for page, text in texts.items()}
    return found | {page: _source_page(page.removeprefix("source/").removesuffix(".md")) for page in sorted(named)}


def navigation() -> _Navigation:
    """Return the navigation; a page of docs/ that no list names stands at the end of the guides."""
    listed = {*START, *GUIDES, *REFERENCE, *FOLDED}
    others = sorted(path.name for path in DOCS.glob("*.md") if path.name not in listed)
    by_domain: _Navigation = [{title: _operators(domain)} for domain, title in DOMAINS.items()]
    return [
        {"Start": START},
        {"Guides": [*GUIDES, *others]},
        {"Operators": ["operators/index.md", *by_domain]},
        {"Rules": ["rules/index.md", *(f"rules/{each.name}.md" for each in rule_entries())]},
        {"Reasons": ["reasons/index.md", *({title: f"reasons/{page}.md"} for page, title in reasons.TITLES.items())]},
        {"Reference": REFERENCE},
    ]


def assemble(build: Path) -> None:
    """Write the pages, the assets and the settings of mkdocs into the folder `build`."""
    folder = build / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS / "assets", folder / "assets")
    for page, text in pages().items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text)
    settings = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": "pages", "site_dir": "site", "nav": navigation()}
    (build / "mkdocs.yml").write_text(json.dumps(settings, indent=2))


def _ranked(text: str, page: str) -> str:
    """Return the text of a page with its weight in the search."""
    return f"---\nsearch:\n  boost: {RANKS[page]}\n---\n\n{text}" if page in RANKS else text


def _operators(domain: str) -> list[str]:
    return [operators.uri(each) for each in operator_entries() if operators.domain_of(each) == domain]


def _from_readme() -> dict[str, str]:
    """Return the pages whose text stands beside docs/, with links as pages in docs/ have them."""
    readme = (ROOT / "README.md").read_text()
    texts = {page: _section(readme, heading) for page, heading in SECTIONS.items()}
    texts |= {page: (ROOT / path).read_text() for path, page in BESIDE.items() if page != "index.md"}
    return {page: _outside_code(text, lambda part: _LINK.sub(_from_docs, part)) for page, text in texts.items()}


def _section(text: str, heading: str) -> str:
    """Return the section of `text` under `heading`, as a page."""
    body = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return f"# {heading}\n{body}"


def _from_docs(found: re.Match[str]) -> str:
    before, target, anchor, after = found.groups()
    return f"{before}{posixpath.relpath(target, 'docs') if target else ''}{anchor or ''}{after}"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return `text` with `change` applied to all but its fenced blocks of code."""
    parts: list[str] = []
    at = 0
    for block in _FENCE.finditer(text):
        parts += [change(text[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(text[at:])])


def _linked(text: str, here: str) -> str:
    """Return the text of the page `here` with links to the pages of the site."""
    return _outside_code(text, lambda part: _LINK.sub(lambda found: _link(found, here), part))


def _link(found: re.Match[str], here: str) -> str:
    before, target, anchor, after = found.groups()
    if target is None:
        return found[0]
    page, anchor = _target(target, here, anchor or "")
    return f"{before}{posixpath.relpath(page, posixpath.dirname(here) or '.')}{anchor}{after}"


def _target(target: str, here: str, anchor: str) -> tuple[str, str]:
    """Return the page, and the anchor in it, that a link from the page `here` leads to."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(here), target))
    if path.startswith("docs/") and not path.endswith(".py"):
        page = path.removeprefix("docs/")
        return FOLDED.get(page, page), anchor
    if path == "README.md":
        section = next((page for page, heading in SECTIONS.items() if slug(heading) == anchor[1:]), "")
        return section or BESIDE[path], ""
    return (BESIDE[path], anchor) if path in BESIDE else (f"source/{path}.md", "")


def _sources(text: str, page: str) -> Iterator[str]:
    """Yield the pages of files beside docs/ that the links of a page ask for."""
    for _, target, _, _ in _LINK.findall(_FENCE.sub("", text)):
        found = _target(target, page, "")[0] if target else ""
        if found.startswith("source/"):
            yield found


def _source_page(path: str) -> str:
    """Return the page of a file, or of a folder, of the repository."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {Path(path).name}\n\n`{path}`\n\n"
    place = ROOT / path
    if place.is_dir():
        inside = (each.relative_to(place) for each in sorted(place.rglob("*.*")))
        return head + "".join(f"* `{each.as_posix()}`\n" for each in inside if each.suffix != ".pyc")
    fence = "`" * 4
    return f"{head}{fence}{LANGUAGES.get(place.suffix, 'text')}\n{place.read_text()}\n{fence}\n"


if __name__ == "__main__":
    assemble(ROOT / "build")
