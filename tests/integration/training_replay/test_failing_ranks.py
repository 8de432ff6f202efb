"""The error that is shown when several ranks fail, with a real torchrun and process group."""

import sys
from pathlib import Path

import pytest

from pipeline.launch.base import Stage, StageFailedError
from pipeline.launch.local import local_workers
from pipeline.run.wait import wait_for_any
from pipeline.store import open_store
from tests.integration.torchrun import run_ranks
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.integration


def test_the_error_of_a_full_disk_is_shown_and_the_ranks_are_not_restarted(tmp_path: Path):
    """The launcher shows the error of rank 0, and the failure of rank 1 as its consequence.

    torchrun ends with exit code 1 and a report of both ranks. Rank 1 reports that rank 0 closed its
    connection.
    """
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
    lines: list[str] = []
    with (
        local_workers(tmp_path, [stage], lines.append) as workers,
        pytest.raises(StageFailedError) as error,
    ):
        wait_for_any(open_store(str(tmp_path)), ["never"], PATIENCE_S, "no worker", workers.check)
    head, cause, *others = str(error.value).splitlines()
    assert lines == []
    assert "and was not restarted, because the error would recur" in head
    assert "rank 0 failed: RefusedError: create checkpoints/000001/x: [Errno 28] No space" in cause
    assert all(line.startswith("rank 1 then ended: ") for line in others)


def test_a_long_store_request_of_a_rank_does_not_end_a_pass():
    """While a rank sends requests to the store, the others wait for it up to the store's limit.

    Within a pass, they wait only up to the limit for passes. If a rank ends while another one
    waits, the waiting rank fails.
    """
    output = run_ranks("tests.integration.training_replay.apart", 2).splitlines()
    gave_up = [line for line in output if line.startswith("rank 0 gave up: ")]
    assert len(gave_up) == 2, output
    assert "2000ms" in gave_up[0]
    [ended] = [line for line in output if line.startswith("peer error: ")]
    assert "rank 0 failed while waiting for the other ranks: " in ended
    assert "or spent more time in the store than launch.start_timeout_s" in ended
