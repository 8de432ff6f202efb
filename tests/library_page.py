"""The code blocks of docs/library.md, which tests run."""

import re
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

_NEEDS_ENGINES = "## A run in Python\n"


def blocks(needs_engines: bool) -> str:
    """Return the Python blocks of the page as one program.

    If `needs_engines` is true, these are the blocks of the section that starts a run; otherwise
    they are the blocks of all other sections.
    """
    sections = re.split(r"^(?=## )", (ROOT / "docs/library.md").read_text(), flags=re.MULTILINE)
    wanted = [part for part in sections if part.startswith(_NEEDS_ENGINES) == needs_engines]
    return "\n".join(re.findall(r"```python\n(.*?)```", "".join(wanted), re.DOTALL))


def run_apart(
    program: str, folder: Path, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in a separate process.

    Args:
        program: The Python code.
        folder: The working folder.
        timeout_s: Seconds until the process is killed.
    """
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
