"""The real torch_npu without CANN: every symbol that its libraries miss becomes a C function that returns 0."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache" / "torch_npu_host"
WRITTEN_STUBS = Path(__file__).with_name("cann_stubs.c")

# C++ thread-local init functions are weak and their callers test them for null: defined, they make tracing segfault.
NEVER_STUBBED = "_ZTH"


def wheel() -> Path:
    """The folder with the unpacked wheel: `CANN_FUSION_TORCH_NPU`, else `.torch_npu` in the repository."""
    return Path(os.environ.get("CANN_FUSION_TORCH_NPU") or REPO / ".torch_npu").resolve()


def available() -> bool:
    """Whether a wheel for this Python is there, and a C compiler, with `nm` and `readelf`, to build the stubs."""
    tools = all(shutil.which(tool) for tool in ("gcc", "nm", "readelf"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return sys.platform == "linux" and tools and (wheel() / "torch_npu" / f"_C{suffix}").is_file()


requires_torch_npu = pytest.mark.skipif(
    not available(),
    reason=f"needs gcc and the torch_npu wheel for this Python in {wheel()}: run `make setup`, "
    "or let CANN_FUSION_TORCH_NPU name a folder filled by `pip install --no-deps --target`",
)


def environment() -> dict[str, str]:
    """Environment of a child process in which `import torch_npu` succeeds; the first call builds the stubs."""
    return {
        **os.environ,
        "PYTHONPATH": _joined(str(REPO), str(wheel()), os.environ.get("PYTHONPATH")),
        "LD_LIBRARY_PATH": _joined(str(stubs()), os.environ.get("LD_LIBRARY_PATH")),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }


def run(source: str, *, timeout: int = 300, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python `source` in a child process behind the stubs, in the repository's root; `env` comes on top."""
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=REPO,
        env=environment() | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def answer(source: str) -> Any:
    """Run Python `source` like `run`, and return what it prints last, as JSON."""
    done = run(source)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def stubs() -> Path:
    """Folder of the stub libraries, built unless there is one for this wheel, this torch and this generator."""
    folder = CACHE / _key()
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=CACHE))
    _build(building)
    try:
        building.rename(folder)
    except OSError:  # another process was faster, and its result is the same
        shutil.rmtree(building)
    return folder


def missing_symbols() -> list[str]:
    """Symbols that the wheel's libraries use and that neither they, nor torch, nor this process define."""
    libraries = _wheel_libraries()
    defined = _symbols("--defined-only", [*libraries, *_torch_libraries()])
    process = ctypes.CDLL(None)  # the interpreter's own and the C library's
    undefined = {name for name in _symbols("--undefined-only", libraries) if "@" not in name}
    return sorted(
        name for name in undefined - defined if not name.startswith(NEVER_STUBBED) and not hasattr(process, name)
    )


def missing_libraries() -> list[str]:
    """Libraries that the wheel asks for by name and that are nowhere on this machine."""
    present = {library.name for library in [*_wheel_libraries(), *_torch_libraries()]}
    lines = _output("readelf", "-d", *_wheel_libraries()).splitlines()
    needed = {line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line}
    return sorted(name for name in needed - present if not _loads(name))


def _build(folder: Path) -> None:
    generated = folder / "generated.c"
    # Weak, so that a function written by hand takes the place of the generated one.
    generated.write_text(
        "".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}\n" for name in missing_symbols())
    )
    library = folder / "libcann_stubs.so"
    _output("gcc", "-shared", "-fPIC", "-O1", "-o", library, WRITTEN_STUBS, generated)
    for name in missing_libraries():  # one file under every name: the loader maps it once
        (folder / name).symlink_to(library.name)


def _key() -> str:
    record = next(wheel().glob("torch_npu-*.dist-info")) / "RECORD"  # holds the hash of every file of the wheel
    parts = [record, WRITTEN_STUBS, Path(__file__), _torch_folder() / "version.py"]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()[:16]


def _wheel_libraries() -> list[Path]:
    return sorted((wheel() / "torch_npu").rglob("*.so"))


def _torch_libraries() -> list[Path]:
    return sorted((_torch_folder() / "lib").glob("*.so*"))


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _symbols(which: str, libraries: Iterable[Path]) -> set[str]:
    lines = _output("nm", "-D", which, *libraries).splitlines()
    names = {line.split()[-1] for line in lines if line and not line.endswith(":")}
    return names | {name.split("@")[0] for name in names if which == "--defined-only"}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _joined(*folders: str | None) -> str:
    return os.pathsep.join(folder for folder in folders if folder)


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"building the CANN stubs: `{command[0]}` failed:\n{done.stderr[-2000:]}")
    return done.stdout
