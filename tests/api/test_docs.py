"""The documentation is true: its code runs, its generated parts are current, its links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import typer

from docs import build, site
from docs.generate.markdown import DOMAINS, slug
from fusion.frontend.cli import app

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"", "text", "sh", "py", "python", "toml", "json"}
BY_DAY = "README.md"
LONGEST = 400


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of code of a language."""
    return [dedent(code) for _, found, code in BLOCK.findall(text) if found == language]


def plain(text: str) -> str:
    """Return a page without its blocks of code and its code within lines."""
    return re.sub(r"`[^`\n]*`", "code", BLOCK.sub("", text))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Yield path and anchor of each link of a page to another one, or to itself."""
    for target in re.findall(r"\]\(([^)\s]+)\)", plain(text)):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, and those that it sets."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    named = {re.sub(r"\\(.)|`", r"\1", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each)) for each in headings}
    return {slug(each) for each in named} | set(re.findall(r'<a id="([^"]+)"', text))


RUN = sorted(page for page, text in PAGES.items() if blocks(text, "python"))


@pytest.mark.parametrize(
    "page", [page if page == BY_DAY else pytest.param(page, marks=pytest.mark.rotates) for page in RUN]
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = f"blocks_of_{re.sub(r'[^a-z]', '_', Path(page).stem.lower())}"  # Dynamo reads the source of what it compiles
    (tmp_path / f"{name}.py").write_text("\n".join(blocks(PAGES[page], "python")))
    monkeypatch.syspath_prepend(tmp_path)
    torch._dynamo.reset()
    importlib.import_module(name)


def test_blocks_are_run_or_are_named_as_fragments():
    for page, text in PAGES.items():
        assert {language for _, language, _ in BLOCK.findall(text)} <= LANGUAGES, page
        for fragment in blocks(text, "py"):
            ast.parse(fragment)


def test_commands_exist():
    commands = typer.main.get_command(app).commands
    lines = [line for text in PAGES.values() for line in re.findall(r"^ *cann-fusion (\w+.*?)(?:  .*)?$", text, re.M)]
    assert len(lines) > 5
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        commands[name].make_context(name, arguments, resilient_parsing=True)  # raises if an option does not exist


@pytest.mark.rotates(4)
def test_generated_parts_are_current():
    for path, text in build.generated().items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date: run `make docs`"


def test_every_domain_has_a_title():
    folders = {
        each.parent.name for top in ("patterns", "fusion/operators") for each in (ROOT / top).glob("*/__init__.py")
    }
    assert folders - {"kit"} <= DOMAINS.keys()


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for path, anchor in links(text):
            target = ROOT / posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else ROOT / page
            assert target.exists(), f"{page} links to {path}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text()), f"{page} links to {path}#{anchor}"


def test_lines_can_be_read():
    for page, text in PAGES.items():
        for number, line in enumerate(text.splitlines(), 1):
            assert len(line) <= LONGEST, f"{page}:{number} has {len(line)} characters"


@pytest.mark.rotates(12)
def test_the_site_is_complete():
    """Each link of the assembled pages leads to a page and an anchor, and the navigation has all but sources."""
    pages = site.pages()
    named = set(_named(site.navigation()))
    assert named == {page for page in pages if not page.startswith("source/")}
    found = {page: anchors(pages[page]) for page in named}
    for page in named:
        for path, anchor in links(pages[page]):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
            assert target in pages or (ROOT / "docs" / "assets" / Path(target).name).exists(), f"{page} links to {path}"
            assert not anchor or anchor in found[target], f"{page} links to {path}#{anchor}"


def _named(navigation: object) -> Iterator[str]:
    match navigation:
        case str():
            yield navigation
        case dict():
            yield from _named(list(navigation.values()))
        case list():
            for each in navigation:
                yield from _named(each)
        case _:
            raise AssertionError(navigation)


@pytest.mark.rotates
def test_the_site_is_built_and_asks_for_no_network(tmp_path: Path):
    site.assemble(tmp_path)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\s>\"]+)|<link[^>]*rel=.?stylesheet[^>]*(https?:\S+)"
    )
    for page in ("index.html", "families.html", "operators/npu_rms_norm.html"):
        assert not loaded.findall((tmp_path / "site" / page).read_text()), page


@pytest.mark.parametrize("name", ["first_fusion", pytest.param("decorator", marks=pytest.mark.rotates)])
def test_examples_run(name: str):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
