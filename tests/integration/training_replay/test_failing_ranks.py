"""Which of several ranks' errors is shown, with a real torchrun and a real process group."""

import sys
from pathlib import Path

import pytest

from pipeline.launch.base import Stage, StageFailedError
from pipeline.launch.local import local_workers
from pipeline.run.wait import wait_for_any
from pipeline.store import open_store
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration


def test_the_rank_that_met_a_full_disk_is_shown_and_nothing_is_restarted(tmp_path: Path):
    """torchrun ends with 1 and a report of both ranks; rank 1 says that rank 0's end closed its
    connection."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    program = (
        str(Path(__file__).with_name("failing.py")),
        "--run-uri",
        "file:///nowhere",
        "--attempt",
        "0",
    )
    command = (*torchrun, "--nproc-per-node", "2", *program)
    stage = Stage("training", (command,), 3, {"OMP_NUM_THREADS": "1"})
    said: list[str] = []
    with (
        local_workers(tmp_path, [stage], said.append) as workers,
        pytest.raises(StageFailedError) as error,
    ):
        wait_for_any(open_store(str(tmp_path)), ["never"], PATIENCE_S, "nobody", workers.check)
    head, cause, *others = str(error.value).splitlines()
    assert said == []
    assert "and was not restarted, as it would meet the same error again" in head
    assert "rank 0 failed: RefusedError: create checkpoints/000001/x: [Errno 28] No space" in cause
    assert all(line.startswith("rank 1 then ended: ") for line in others)
