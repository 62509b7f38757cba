"""The page in a browser: no errors, one click lights all panes, filters work."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fusion.report.page.write import to_html

from .models import layered

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")

WATCH = """<script>
window.errors = [];
addEventListener("error", (event) => errors.push(event.message));
console.error = console.warn = (...words) => errors.push(words.join(" "));
</script>"""
STEPS = """<script>
const results = {};
const lit = (selector) => [...document.querySelectorAll(selector)].filter((each) => each.classList.contains("lit"));
const shown = (kind) => [...document.querySelectorAll(".entry." + kind)].filter((each) => each.getClientRects().length);
const panes = () => ({
  entries: lit(".entry").map((each) => each.id),
  lines: lit(".line").length,
  rows: lit(".row").map((each) => each.title),
  before: lit(".before .call").filter((each) => each.getClientRects().length).length,
  after: lit(".after .call").filter((each) => each.getClientRects().length).length,
});
const set = (id, value) => {
  document.getElementById(id).value = value;
  document.getElementById("filters").dispatchEvent(new Event("input", {bubbles: true}));
  return {passed: shown("passed").length, missed: shown("missed").length, stays: shown("stays").length};
};
const press = (element) => element.dispatchEvent(new MouseEvent("click", {bubbles: true}));

try {
  results.start = panes();
  press(document.getElementById("r0"));
  results.entry = panes();
  press(document.querySelector(".line.missed"));
  results.line = panes();
  press(document.querySelector(".before .call.missed"));
  results.call = panes();
  press(document.querySelector(".row[title='layers.0,2.norm']"));
  results.row = panes();
  document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
  results.escape = panes();
  results.all = set("rule", "");
  results.rule = set("rule", "rms_norm");
  results.faded = document.querySelectorAll(".call.off").length > 0;
  set("rule", "");
  const layers = [...document.getElementById("layer").options];
  results.layer = set("layer", layers.find((each) => each.text === "layers.1").value);
  results.scope = document.querySelector(".scope:not([hidden]) h2 small").textContent;
  set("layer", "");
  results.least = set("least", "1000000");
  set("least", "");
  results.reset = set("rule", "");
  const theme = document.documentElement.dataset.theme;
  press(document.getElementById("theme"));
  results.themes = [theme, document.documentElement.dataset.theme].sort();
  results.wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
} catch (error) {
  errors.push(error.stack);
}
results.errors = errors;
const text = document.createElement("pre");
text.id = "results";
text.textContent = JSON.stringify(results);
document.body.append(text);
</script>"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Open the page of a model with a layer that is refused, click through it, and collect what is lit and shown."""
    page = (
        to_html(layered(3, 1).document())
        .replace("<head>", f"<head>{WATCH}", 1)
        .replace("</body>", f"{STEPS}</body>", 1)
    )
    folder = tmp_path_factory.mktemp("page")
    return opened(page, folder)


def opened(page: str, folder: Path) -> dict[str, Any]:
    (folder / "page.html").write_text(page)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1440,900", f"--user-data-dir={folder}/user")
    done = subprocess.run(
        [str(BROWSER), *flags, "--dump-dom", f"file://{folder}/page.html"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    written = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.DOTALL)
    assert written, done.stderr[-2000:]
    return json.loads(html.unescape(written[1]))


@pytest.mark.rotates(6)
def test_the_console_has_no_errors(results: dict[str, Any]):
    assert results["errors"] == []
    assert not results["wide"], "nothing is wider than the window"


def test_nothing_is_lit_before_a_click_and_after_escape(results: dict[str, Any]):
    nothing = {"entries": [], "lines": 0, "rows": [], "before": 0, "after": 0}
    assert results["start"] == results["escape"] == nothing


def test_a_click_on_an_entry_lights_lines_modules_and_graphs(results: dict[str, Any]):
    entry = results["entry"]
    assert entry["entries"] == ["r0"]
    assert entry["lines"] == 5
    assert entry["rows"] == ["layers.0,2.norm"]
    assert (entry["before"], entry["after"]) == (9, 1)


@pytest.mark.parametrize("clicked", ["line", "call"])
def test_a_click_on_a_line_or_a_launch_lights_its_entry(results: dict[str, Any], clicked: str):
    assert "c0" in results[clicked]["entries"]
    assert "layers.1.norm" in results[clicked]["rows"]
    assert results[clicked]["lines"] > 0
    assert results[clicked]["before"] > 0
    assert results[clicked]["after"] > 0


def test_a_click_on_a_module_lights_its_entries(results: dict[str, Any]):
    assert "r0" in results["row"]["entries"]
    assert "c0" not in results["row"]["entries"]
    assert results["row"]["after"] > 0


def test_filters_by_rule_layer_and_saving(results: dict[str, Any]):
    every = results["all"]
    assert every["passed"] == every["missed"] == 1
    assert (results["rule"]["passed"], results["rule"]["missed"]) == (0, 1)
    assert 0 < results["rule"]["stays"] < every["stays"]
    assert results["faded"]
    assert (results["layer"]["passed"], results["layer"]["missed"]) == (0, 1)
    assert results["scope"] == "layers.1"
    assert results["least"] == {"passed": 0, "missed": 0, "stays": 0}
    assert results["reset"] == every


def test_the_theme_can_be_switched(results: dict[str, Any]):
    assert results["themes"] == ["dark", "light"]
