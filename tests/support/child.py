"""Python in a child process, on this repository: for what one process can do only once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def child(source: str, *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `source` in the repository's root; `env` comes on top of the environment."""
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done
