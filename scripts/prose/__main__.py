"""Print each place in the repository's prose that the style refuses. `make lint` runs this.

python -m scripts.prose [FILE or FOLDER ...] [--count]
"""

import argparse
import re
import subprocess
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import proselint.checks
from proselint.registry.checks import Check

from scripts.prose.style import OF_PROSELINT, WORDS_OF_A_PAGE, WORDS_OF_CODE, our_checks
from scripts.prose.text import prose_of

SUFFIXES = (".py", ".md", ".sh", ".yaml", ".yml", ".tpl", ".toml")
NAMES = ("Dockerfile", "Makefile", "NOTES.txt")
EXCLUDED = re.compile(
    r"^(tests/data/|requirements/|scripts/prose/|tests/unit/test_prose.py|operators/stubs/)"
)
"""Fixtures, generated files, typing stubs, and modules that quote what the style refuses."""


def files_of(arguments: list[str]) -> list[Path]:
    """Return the repository's files that contain prose, or only those under the given paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [
        Path(name)
        for name in listed
        if (name.endswith(SUFFIXES) or Path(name).name in NAMES)
        and not EXCLUDED.match(name)
        and Path(name).exists()
    ]


def main() -> int:
    """Print the findings, and return the exit code: 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--count", action="store_true", help="print counts by check alone")
    arguments = parser.parse_args()
    theirs: list[Check] = [
        check for check in proselint.checks.__register__ if check.path.split(".")[0] in OF_PROSELINT
    ]
    of_page = [*theirs, *our_checks(WORDS_OF_A_PAGE)]
    of_code = [*theirs, *our_checks(WORDS_OF_CODE)]
    counts: Counter[str] = Counter()
    for path in files_of(arguments.paths):
        text = prose_of(path)
        lines = [0, *(found.end() for found in re.finditer("\n", text))]
        checks = of_page if path.suffix == ".md" else of_code
        found = sorted(
            (r.span[0], r.check_path, r.message) for c in checks for r in c.check_with_flags(text)
        )
        for position, name, message in found:
            counts[name] += 1
            if not arguments.count:
                print(
                    f"{path}:{bisect_right(lines, position)}: {' '.join(message.split())} [{name}]"
                )
    for name, number in counts.most_common():
        print(f"{number:6d} {name}")
    return 1 if counts else 0


if __name__ == "__main__":
    raise SystemExit(main())
