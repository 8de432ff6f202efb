"""Workers whose file store hangs, as a mount does when its server is gone.

Nothing interrupts a thread that waits for a hanging store, and the first thread that uses the store
is the worker's main thread.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run import keys
from pipeline.store import open_store
from tests.attempts import make_attempt
from tests.paths import ROOT
from tests.patience import PATIENCE_S

HANGING = """
import sys, time
from pathlib import Path
from operators import hanging
from operators.{kind} import __main__ as program

asked = Path.stat

def hang(path, **options):
    if path.name == {name!r}:
        time.sleep(3600)
    return asked(path, **options)

Path.stat = hang
hanging.allow(1.0)
sys.exit(program.main())
"""


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("training", (), "ERROR operators.training: rank 0 failed: StoreError: read "),
        ("rollout", ("--worker", "0"), "ERROR operators.rollout: StoreError: read "),
    ],
)
def test_a_worker_whose_store_hangs_names_the_object_and_the_operation(
    tmp_path: Path, kind: str, arguments: tuple[str, ...], said: str
):
    store = open_store(str(tmp_path))
    make_attempt(store, 0, steps=1)
    key = keys.attempt(0)
    program = HANGING.format(kind=kind, name=key.rpartition("/")[2])
    ended = subprocess.run(
        [sys.executable, "-c", program, "--run-uri", store.uri, "--attempt", "0", *arguments],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 1, ended.stderr
    assert f"{said}{key} in {store.uri}: no answer for " in ended.stderr.splitlines()[-1]
