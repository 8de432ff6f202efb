"""The code of a run's reward function, as staged: a Python file, or a zip archive with neighbours.

The first file of an archive is the reward file. The others are the modules that it imports from its
folder. An archive with the same files always has the same bytes, so its digest identifies the code.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.scratch import scratch_folder

_ZIP = b"PK\x03\x04"
"""The first bytes of an archive; no Python file begins with them."""


@dataclass(frozen=True)
class RewardCode:
    """The code that scores a run's samples. Example: RewardCode(b'def compute_score...', ...)."""

    content: bytes | None
    """The staged file or archive. None selects a built-in scorer for each data_source."""
    name: str = "compute_score"
    """The name of the function in the file."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for each call of the function."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the content to stage for a reward file, the first of `files`, and its neighbours.

    `files` contains the files' contents, keyed by their paths relative to the reward file's folder.
    """
    if len(files) == 1:
        return next(iter(files.values()))
    main, *others = files
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as target:
        for name in (main, *sorted(others)):
            target.writestr(zipfile.ZipInfo(name), files[name])  # with a constant date
    return archive.getvalue()


def staged_name(content: bytes) -> str:
    """Return the name under which `pack`'s result is staged."""
    return "reward.zip" if content.startswith(_ZIP) else "reward.py"


@contextmanager
def unpacked(content: bytes | None) -> Iterator[Path | None]:
    """Write the code to a scratch folder for the block, and yield the path of the reward file.

    Yields None for a built-in scorer.
    """
    if content is None:
        yield None
        return
    with scratch_folder("reward") as folder:
        if not content.startswith(_ZIP):
            main = staged_name(content)
            (folder / main).write_bytes(content)
        else:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(folder)
                main = archive.namelist()[0]
        yield folder / main
