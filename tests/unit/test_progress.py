"""Workers report their progress in a file whose path the launcher gives them."""

from pathlib import Path

import pytest

from pipeline import progress
from pipeline.progress import Progress, read_progress


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rollout-0.json"
    for name, value in progress.environment(path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "_Own", type("_Own", (progress._Own,), {}))
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    return path


def test_a_worker_is_starting_until_it_reports_something_else(file: Path):
    assert read_progress(file).text == "starting"
    progress.say("loading policy 3")
    assert read_progress(file).text == "loading policy 3"


def test_the_text_shows_the_counts_and_the_rate(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress.time, "time", iter([100.0, 104.0]).__next__)
    progress.say("step 3 shard 0: generating", 1064, "samples")
    assert read_progress(file).text == "step 3 shard 0: generating, 0 of 1,064 samples"
    progress.count(37, lambda: 20_480)
    assert read_progress(file) == Progress(
        "step 3 shard 0: generating", 100.0, 37, 1064, "samples", 5120.0
    )
    assert read_progress(file).text == (
        "step 3 shard 0: generating, 37 of 1,064 samples, 5,120 tokens/s"
    )


def test_items_are_counted_when_they_are_finished(file: Path):
    progress.say("updates", 2, "mini-batches")
    assert [read_progress(file).finished for _ in progress.counted("ab")] == [0, 1]
    assert read_progress(file).finished == 2


def test_frequent_counts_cause_few_writes(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "_EVERY_S", 3600.0)
    progress.say("generating", 9, "samples")
    progress.count(1, lambda: pytest.fail("tokens were counted, although the count is not shown"))
    assert read_progress(file).finished == 0


def test_only_rank_0_reports(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    progress.say("log-probs")
    assert read_progress(file).text == "starting"
    monkeypatch.setenv("RANK", "0")
    progress.say("log-probs")
    assert read_progress(file).text == "log-probs"


def test_a_failed_write_causes_one_warning(file: Path, caplog: pytest.LogCaptureFixture):
    """The folder may have been removed, or its disk may be full. Later writes fail silently."""
    file.unlink()
    file.parent.rmdir()
    progress.say("log-probs", 4, "mini-batches")
    progress.count(1)
    progress.say("updates")
    [warning] = caplog.messages
    assert warning.startswith("the progress of this worker cannot be displayed: [Errno 2]")
    progress.environment(file)  # as the launcher does when it restarts the worker


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RETRACE_PROGRESS_FILE", raising=False)
    progress.say("log-probs", 1, "mini-batches")
    progress.count(1, lambda: pytest.fail("tokens were counted, although there is no file"))
    assert not list(tmp_path.iterdir())
