"""The blocks of docs/library.md, which tests run."""

import re
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

_NEEDS_ENGINES = "## A run in Python\n"


def blocks(needs_engines: bool) -> str:
    """The page's Python, of the section that makes a run or of all others, as one program."""
    sections = re.split(r"^(?=## )", (ROOT / "docs/library.md").read_text(), flags=re.MULTILINE)
    wanted = [part for part in sections if part.startswith(_NEEDS_ENGINES) == needs_engines]
    return "\n".join(re.findall(r"```python\n(.*?)```", "".join(wanted), re.DOTALL))


def run_apart(
    program: str, folder: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, in a folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
