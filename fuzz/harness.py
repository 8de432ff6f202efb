"""Code that the fuzz targets have in common."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pipeline"]):
    from pipeline.store import StoreError
    from pipeline.traces import TraceError

Target = Callable[[bytes], None]


def run(target: Target, seeds: Sequence[bytes]) -> None:
    """Fuzz a target until it fails or reaches libFuzzer's limit (such as `-max_total_time=60`).

    If the command's arguments contain a file, only that input is tried.
    """

    def once(data: bytes) -> None:
        try:
            target(data)
        except (TraceError, StoreError):
            return

    with tempfile.TemporaryDirectory() as corpus:
        for i, seed in enumerate(seeds):
            Path(corpus, f"seed{i:03}").write_bytes(seed)
        files = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup(sys.argv if files else [*sys.argv, corpus], once)
        atheris.Fuzz()  # ends the process
