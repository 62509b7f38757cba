"""The page of a report: one file, text of the model escaped, lines and launches with the entries about them."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

import fusion
from fusion.frontend.cli import app
from fusion.report.page.drawing import HEIGHT, drawn
from fusion.report.page.source import files
from fusion.report.page.write import to_html
from fusion.report.trace import Call, Line

from .models import NPU, Norm, inputs, layered
from .test_document import lines_of

INJECTED = "</script><script>alert('of the model')</script>"


@pytest.fixture(scope="module")
def report() -> fusion.Report:
    return layered(3, 1)


@pytest.fixture(scope="module")
def page(report: fusion.Report) -> str:
    return to_html(report.document())


class Elements(HTMLParser):
    """Elements of a page that are linked to entries, and the numbers of its lines."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.linked: list[dict[str, str]] = []
        self.numbers: dict[int, list[str]] = {}
        self._ids: list[str] = []
        self._in_number = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "data-ids" in given:
            self.linked.append({"tag": tag, **given})
        if given.get("class", "").split()[:1] == ["line"]:
            self._ids = given.get("data-ids", "").split()
        self._in_number = given.get("class") == "number"

    def handle_data(self, data: str) -> None:
        if self._in_number:
            self.numbers[int(data)] = self._ids
            self._in_number = False


def test_the_lines_that_became_a_call_lead_to_it(page: str):
    numbers = Elements(page).numbers
    own = lines_of(Norm.forward, "x.float()", "y.pow", "torch.rsqrt", "self.weight *")
    assert {number for number, ids in numbers.items() if "r0" in ids} >= own
    assert {number for number, ids in numbers.items() if "c0" in ids} <= own


def test_every_link_leads_to_an_entry_and_every_entry_has_one(page: str):
    linked = Elements(page).linked
    entries = {each["id"] for each in linked if each["tag"] == "article"}
    used = {each for one in linked if one["tag"] != "article" for each in one["data-ids"].split()}
    assert used == entries != set()
    for tag in ("g", "div", "span"):
        assert any(each["data-ids"] for each in linked if each["tag"] == tag), tag


def test_the_title_has_the_name_of_the_model(page: str):
    assert re.search(r"<title>Model: \d+ launches to \d+ on ascend910_93 - cann-fusion</title>", page)


def test_nothing_is_fetched(page: str):
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
    assert page.count("<script") == page.count("<style") == 1


def test_text_of_the_model_is_escaped(report: fusion.Report, tmp_path: Path):
    source = tmp_path / "model.py"
    source.write_text(f"def forward(x):\n    return x.sin()  # {INJECTED}\n")
    line = Line(INJECTED, 2, f"return x.sin()  # {INJECTED}", str(source))
    document = report.document()
    left = replace(document.left[0], op=INJECTED, module=INJECTED, reason=INJECTED, rule=INJECTED, line=line)
    scope = replace(document.scopes[0], after=tuple(replace(each, op=INJECTED) for each in document.scopes[0].after))
    modules = tuple(replace(each, name=INJECTED, path=INJECTED) for each in document.modules)
    page = to_html(replace(document, left=(left,), scopes=(scope,), modules=modules, notes=(INJECTED,)))
    assert "alert(" in page
    assert "<script>alert" not in page
    assert page.count("</script") == 1


def test_equal_layers_are_drawn_once():
    four, eight = (len(to_html(layered(depth).document())) for depth in (4, 8))
    assert eight < 1.02 * four


def test_a_file_that_has_changed_is_shown_by_the_known_lines_alone(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text("def forward(x):\n    y = x + 1\n    return y\n")
    (file,) = files([Line("model.py", 2, "y = x + 1", str(path))])
    assert [(each.name, each.first, len(each.lines)) for each in file.blocks] == [("forward", 1, 3)]
    path.write_text("\n\n\n")
    (file,) = files([Line("model.py", 2, "y = x + 1", str(path)), Line("model.py", 3, "return y", str(path))])
    assert [(each.name, each.first, len(each.lines)) for each in file.blocks] == [("", 2, 1), ("", 3, 1)]
    assert "return" in file.blocks[1].lines[0]


def call(name: str, *reads: str, is_launch: bool = True) -> Call:
    return Call(name, name, "", None, "", reads, is_launch, False, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_launches_lie_below_what_they_read_and_apart(seed: int):
    made = random.Random(seed)
    names = [f"n{number}" for number in range(40)]
    calls = [
        call(name, *made.sample(names[:place], min(place, made.randint(0, 3))), is_launch=made.random() < 0.8)
        for place, name in enumerate(names)
    ]
    drawing = drawn(calls)
    boxes = {each.call.name: each for each in drawing.boxes}
    assert boxes.keys() == {each.name for each in calls if each.is_launch}
    for each in boxes.values():
        assert all(boxes[read].y + HEIGHT < each.y for read in each.call.reads if read in boxes)
        assert 0 <= each.x <= each.x + each.width <= drawing.width
        assert each.y + HEIGHT <= drawing.height
    for row in {each.y for each in boxes.values()}:
        in_row = sorted((each for each in boxes.values() if each.y == row), key=lambda each: each.x)
        assert all(one.x + one.width <= other.x for one, other in pairwise(in_row))


def test_nothing_is_drawn_of_nothing():
    assert drawn([]).boxes == drawn([]).edges == ()

    def view(x: Tensor) -> Tensor:
        return x.view(-1)

    assert "nothing was refused" in to_html(fusion.explain(view, *inputs()[:1], options=NPU).document())


@pytest.mark.usefixtures("fresh")
def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "paged_model.py").write_text("import torch\n\n\ndef build():\n    return torch.sin, (torch.ones(8),)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["explain", "paged_model:build", "--html", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(app, ["explain", "paged_model:build", "--html", str(tmp_path / "absent" / "report.html")])
    assert done.exit_code == 2
    assert "--html" in done.stderr
