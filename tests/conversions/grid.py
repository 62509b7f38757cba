"""Cases converted in a child process behind the stubs of CANN."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support import torch_npu_host

MARK = "CONVERTED "
FOLDER = Path(__file__).parent / "expected"


def converted(numbers: Sequence[int]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield number, text and broken laws of each case of `numbers`, as soon as it is converted.

    Raises:
        RuntimeError: the child process ended before all were converted.
    """
    source = f"from tests.conversions import child\nchild.main({list(numbers)})"
    with subprocess.Popen(
        [sys.executable, "-c", source],
        cwd=torch_npu_host.REPO,
        env=torch_npu_host.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        last: list[str] = []
        for line in process.stdout:
            last = [*last[-40:], line]
            if line.startswith(MARK):
                number, text, broken = json.loads(line.removeprefix(MARK))
                yield number, text, broken
    if process.returncode:
        raise RuntimeError(f"converting cases {list(numbers)}: the child process failed:\n{''.join(last)}")
