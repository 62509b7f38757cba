"""The sdist and the wheel: what is in them, and a fresh environment that has the wheel alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.rotates(24)

ROOT = Path(__file__).parents[2]
SOURCES = ("fusion", "patterns", "pyproject.toml", "README.md", "LICENSE")
GATE = Path(__file__).with_name("third_party") / "interleaved_gate"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel, built of a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        copied = shutil.copytree if source.is_dir() else shutil.copy
        copied(source, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy]
    subprocess.run(command, check=True, capture_output=True)
    return copy / "dist"


@pytest.mark.rotates(4)
def test_the_wheel_has_the_packages_their_data_and_entry_points(built: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"cann_fusion-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{info}/METADATA"))
        points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"fusion", "patterns", info}
    sources = {str(each.relative_to(ROOT)) for folder in SOURCES[:2] for each in (ROOT / folder).rglob("*.py")}
    page = {str(each.relative_to(ROOT)) for each in (ROOT / "fusion/report/page").glob("page.*")}
    assert sources | page | {"fusion/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    assert (metadata["Name"], metadata["Version"]) == (project["name"], project["version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert all(group in points for group in ("[torch_dynamo_backends]", "[fusion.patterns]", "cann-fusion = "))


def test_the_sdist_builds_the_same(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "fusion/py.typed", "patterns/__init__.py"} <= names
    assert not any(name.startswith("tests") for name in names)


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that has the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # A path in a .pth file is not searched for .pth files, so that the checkout itself stays out.
    (site(folder) / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder


def site(folder: Path) -> Path:
    """The folder of packages of an environment."""
    (found,) = folder.glob("lib/python3*/site-packages")
    return found


def run(folder: Path, *command: str | Path) -> str:
    """The output of a program of an environment, run where no sources lie."""
    program, *rest = command
    done = subprocess.run([folder / "bin" / program, *rest], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.rotates(12)
def test_the_first_example_of_the_readme_runs(fresh: Path):
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    where = run(fresh, "python", "-c", f"{example}\nprint(fusion.__file__)").splitlines()[-1]
    assert Path(where).is_relative_to(site(fresh))


@pytest.mark.rotates(6)
def test_the_command_runs(fresh: Path):
    assert "npu_rms_norm" in run(fresh, "cann-fusion", "rules", "rms_norm")


@pytest.mark.rotates(6)
def test_a_package_beside_it_is_found(fresh: Path):
    for each in GATE.parent.glob(f"{GATE.name}*"):
        shutil.copytree(each, site(fresh) / each.name, dirs_exist_ok=True)
    asked = "import fusion; print(*(rule.name for rule in fusion.installed().rules))"
    assert {"interleaved_swiglu", "attention"} <= set(run(fresh, "python", "-c", asked).split())
