"""The table of other versions of torch_npu, of the schemas in their wheels, which need not import.

python -m tests.operators.wheel_versions --write FOLDER    # of the wheels in a folder, which are downloaded if need be
python -m tests.operators.wheel_versions --drift FOLDER    # what the newest wheel changes of the operators here
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion.operators import OPERATORS, Operator, vendor_versions
from fusion.operators.calling import parsed
from tests.operators.test_wheels import OURS, SCHEMA, UNSPELT

VERSIONS = ("2.7.1", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.0")
TABLE = Path(vendor_versions.__file__).with_suffix(".json")


def downloaded(version: str, folder: Path) -> Path:
    """The wheel of a version, "" for the newest one."""
    folder.mkdir(parents=True, exist_ok=True)
    if version and (found := sorted(folder.glob(f"torch_npu-{version}-*.whl"))):
        return found[0]
    wanted = f"torch_npu=={version}" if version else "torch_npu"
    more = ("download", "--quiet", "--no-deps", "--only-binary=:all:", wanted, "--dest", folder)
    subprocess.run([sys.executable, "-m", "pip", *more], check=True)
    return max(folder.glob("torch_npu-*.whl"), key=lambda each: each.stat().st_mtime)


def schemas(wheel: Path) -> dict[str, set[str]]:
    """Name -> schemas of that name, of whichever namespace."""
    found: dict[str, set[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if "/lib/" in name and name.endswith(".so"):
                for each in SCHEMA.findall(archive.read(name)):
                    text = each.decode(errors="replace")
                    found.setdefault(text.partition("(")[0], set()).add(text)
    return found


def theirs() -> list[Operator]:
    """The operators whose schemas a wheel spells."""
    vendors = (each for each in OPERATORS.values() if each.namespace in ("npu", "atb") and each.name not in UNSPELT)
    return [each for each in vendors if not OURS.search(each.name)]


def differences(spelt: Mapping[str, set[str]]) -> dict[str, dict[str, Any]]:
    """What a wheel has otherwise, by operator; results and further arguments of other numbers raise."""
    rows = {each.name: _difference(each, spelt.get(each.short, set())) for each in theirs()}
    return {name: row for name, row in sorted(rows.items()) if row}


def _difference(operator: Operator, texts: set[str]) -> dict[str, Any]:
    found = [parsed(f"{operator.namespace}::{text}") for text in texts]
    ours = parsed(operator.schema)
    if any(str(each) == str(ours) for each in found):
        return {}
    if not found:
        return {"is_absent": True}
    (schema,) = found
    there = {each.name: each for each in schema.arguments}
    here = {each.name: each for each in ours.arguments}
    assert len(schema.returns) == len(ours.returns), operator.name
    assert not set(there) - set(here), f"{operator.name}: {set(there) - set(here)}"
    both = [name for name in here if name in there]
    row = {
        "lacks": [name for name in here if name not in there],
        "requires": [name for name in both if _is_optional(here[name]) and _must_be_given(there[name])],
        "defaults": [name for name in both if _default(here[name]) != _default(there[name])],
    }
    return {key: value for key, value in row.items() if value}


def _is_optional(argument: Any) -> bool:
    return str(argument.type).startswith("Optional")


def _must_be_given(argument: Any) -> bool:
    return not _is_optional(argument) and not argument.has_default_value()


def _default(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else "none"


def table(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows of each version that differs, by its first two numbers."""
    rows = {vendor_versions.minor(each): differences(schemas(downloaded(each, folder))) for each in VERSIONS}
    assert not rows["2.13"], rows["2.13"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the table of all versions")
    parser.add_argument("--drift", action="store_true", help="name what the newest wheel changes; fails if anything")
    args = parser.parse_args()
    if args.write:
        TABLE.write_text(json.dumps(table(args.folder), indent=1) + "\n")
    if args.drift:
        wheel = downloaded("", args.folder)
        (version,) = re.findall(r"torch_npu-([\d.]+)", wheel.name)
        changed = differences(schemas(wheel))
        known = {name: row for name, row in changed.items() if row != _known(vendor_versions.minor(version)).get(name)}
        print(f"torch_npu {version}: " + (json.dumps(known, indent=1) if known else "as the table says"))
        sys.exit(bool(known))


def _known(version: str) -> dict[str, Any]:
    return json.loads(TABLE.read_text()).get(version, {})


if __name__ == "__main__":
    main()
