"""Packages of operators: planned for where they are named, refused elsewhere, keyed, and registered by themselves."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusion
from fusion import Library, Options, Package, testing
from fusion.caching.graph_cache import entry
from fusion.errors import OperatorError, OptionError, RuleError
from fusion.facts import Facts
from fusion.operators import OPERATORS, PACKAGES, package_of, provide
from fusion.operators.packages import import_failure
from fusion.operators.profiles import PROFILES
from fusion.operators.vendor_versions import PREFIX, versions
from fusion.planning.target import TARGETS, Target
from fusion.planning.usable_packages import Usable
from tests.support.child import child

from .third_party.own_kernels import PACKAGE, SQUARED_RELU, SquaredRelu

A3 = {"target": "ascend910_93", "plan_cache": "off"}
NAMED = {**A3, "packages": ["own_kernels"]}
FOLDER = Path(__file__).with_name("third_party")
NEEDS = "squared_relu: needs the package own_kernels, which"


def model(x: Tensor) -> Tensor:
    return x.relu().square()


def x() -> Tensor:
    return torch.randn(3, 64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def library() -> Library:
    return fusion.installed() + Library((SquaredRelu(),), (), (SQUARED_RELU,), (PACKAGE,))


def test_an_operator_is_planned_for_if_its_package_is_named(library: Library, tmp_path: Path):
    report = fusion.explain(model, x(), rules=library, options=NAMED)
    assert report.ops == {"own_kernels::squared_relu": 1}
    assert report.packages == {"own_kernels::squared_relu": "own_kernels"}
    assert json.loads(report.to_json())["packages"] == report.packages
    assert "own_kernels::squared_relu  (package own_kernels)" in str(report)
    report.to_html(tmp_path / "page.html")
    assert "own_kernels::squared_relu needs the package own_kernels" in (tmp_path / "page.html").read_text()


def test_it_is_refused_if_its_package_is_not_named(library: Library):
    report = fusion.explain(model, x(), rules=library, options=A3)
    assert not report.ops
    assert [each.reason for each in report.refusals] == [f"{NEEDS} was not named; name it in the option packages"]


def test_other_packages_than_those_named_stay_refused(library: Library):
    report = fusion.explain(model, x(), rules=library, options={**A3, "packages": ["custom_ops"]})
    assert not report.ops


def test_reports_name_no_package_of_torch_npu():
    report = fusion.explain(lambda x: x.rsqrt() * torch.nn.functional.silu(x), x(), options=A3)
    assert not report.packages


def test_names_are_part_of_the_keys_of_graphs(library: Library):
    captured = testing.captured(fusion.Example("", model, lambda dtype: (x().to(dtype),)), torch.bfloat16)
    options = Options(target="ascend910_93", plan_cache="memory")
    made = [
        entry(captured.graph.graph, Facts(), library, each)
        for each in (options, Options.of(options, packages=["own_kernels"]))
    ]
    assert len({each.digest for each in made if each}) == 2


# on an NPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_npu(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(Target, "detect", lambda: TARGETS["ascend910_93"])


@pytest.mark.usefixtures("on_npu")
@pytest.mark.parametrize(
    ("usable", "lack"),
    [
        (Usable.of([]), "was not named"),
        (Usable((), (), on_npu=True), "is not installed"),
        (Usable((), ("own_kernels",), on_npu=True), "is not installed"),
        (Usable(("own_kernels",), (), on_npu=True), None),
    ],
    ids=["unnamed", "missing", "imported and missing", "named"],
)
def test_a_package_that_is_missing_on_an_npu_is_said_to_be(usable: Usable, lack: str | None):
    refused = usable.refusal(SQUARED_RELU, (x(),), {})
    assert refused == (lack and f"{NEEDS} {lack}; name it in the option packages")


@pytest.mark.usefixtures("on_npu")
def test_a_named_package_is_imported_on_an_npu_and_its_failure_logged(caplog: pytest.LogCaptureFixture):
    assert Usable.of(["own_kernels"]).named == ("own_kernels",)
    assert "own_kernels, which the option packages names, is not installed: decompositions run" in caplog.text


def test_a_failing_import_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken_kernels.py").write_text("raise ZeroDivisionError('no driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    failure = import_failure(Package("broken_kernels", ("broken_kernels",), "", ""))
    assert failure == "is installed but does not import: ZeroDivisionError: no driver"


def test_a_profile_stands_for_a_version_of_torch_npu_and_for_packages():
    given = Options(packages="vllm_ascend-0.26")
    assert given == Options(packages=["torch_npu==2.10", "vllm_ascend"])
    usable = Usable.of(Options(packages=["vllm_ascend-0.12", "custom_ops"]).packages)
    assert (usable.version, usable.named) == ("2.8", ("custom_ops", "vllm_ascend"))
    with pytest.raises(
        OptionError, match=r"'vllm_ascend-0.27' is not a known package; did you mean 'vllm_ascend-0.26'"
    ):
        fusion.explain(model, x(), options={**A3, "packages": "vllm_ascend-0.27"})
    with pytest.raises(OptionError, match="name one version of torch_npu"):
        fusion.explain(model, x(), options={**A3, "packages": ["vllm_ascend-0.26", "torch_npu==2.8"]})


def test_profiles_name_packages_and_versions_that_are_known():
    named = {each for profile in PROFILES.values() for each in profile.packages}
    assert named <= {*PACKAGES, *(f"{PREFIX}{each}" for each in versions())}


# packages of others --------------------------------------------------------------------------------------------------


def test_a_package_with_a_namespace_of_another_is_refused():
    with pytest.raises(OperatorError, match="the package cann_ops_transformer has the same name or one of these"):
        provide((), [Package("mine", ("cann_ops_transformer",), "", "")])
    with pytest.raises(RuleError, match="the package 'own_kernels' is provided twice"):
        Library((), packages=(PACKAGE, PACKAGE))


def test_each_operator_has_a_package():
    ours = [each for each in OPERATORS.values() if each.compute.__module__.startswith("fusion.")]
    assert [each.name for each in ours if package_of(each.namespace) is None] == []
    assert sorted(PACKAGES)[:3] == ["cann_ops_transformer", "custom_ops", "custom_pypto"]


INSTALLED = """
import sys, torch, fusion
from fusion.operators import OPERATORS, PACKAGES, ensure
from fusion.operators.registration import absence

def model(x):
    return x.relu().square()

x = torch.randn(3, 64, dtype=torch.bfloat16)
options = {"target": "ascend910_93", "plan_cache": "off"}
assert not fusion.explain(model, x, options=options).ops
assert fusion.explain(model, x, options=options | {"packages": "own_kernels"}).ops == {"own_kernels::squared_relu": 1}
operator, ours = OPERATORS["own_kernels::squared_relu"], torch.ops.own_kernels.squared_relu.default
expected = ours(x)
assert torch.equal(expected, model(x))
assert not absence(operator, PACKAGES["own_kernels"])
assert "own_kernels.library" in sys.modules
theirs = torch.ops.own_kernels.squared_relu.default
assert theirs is not ours
assert all(torch.equal(run(x), expected) for run in (ours, theirs))
assert fusion.explain(model, x, options=options | {"packages": "own_kernels"}).ops == {"own_kernels::squared_relu": 1}
from typer.testing import CliRunner
from fusion.frontend.cli import app
shown = CliRunner().invoke(app, ["ops"]).stdout
assert "own_kernels" in shown, shown
assert "is imported" in shown
"""


@pytest.mark.rotates(6)
def test_an_installed_package_brings_an_operator_and_takes_over_its_registration(tmp_path: Path):
    for folder in FOLDER.glob("own_kernels*"):
        shutil.copytree(folder, tmp_path / folder.name)
    path = os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])))
    child(INSTALLED, PYTHONPATH=path)
