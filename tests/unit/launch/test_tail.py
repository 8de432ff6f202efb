"""Quotes from workers' logs, the rank that is named as the cause, and torchrun's report."""

from pipeline.launch.tail import failed_first, last_lines, rank_exit_codes, why_ended

REPORT = """\
E1121 03:58 torch/distributed/elastic/multiprocessing/api.py:1026] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
[0]:
  exitcode  : -9 (pid: 1234)
[1]:
  exitcode  : 78 (pid: 1235)
"""


def test_the_quote_begins_with_the_first_error_and_omits_torchruns_report():
    log = "10:00 INFO a\n10:01 ERROR b\nTraceback c\n10:02 ERROR d\n"
    quoted = ["  | 10:01 ERROR b", "  | Traceback c", "  | 10:02 ERROR d"]
    assert last_lines(log + REPORT).splitlines() == quoted


def test_the_exit_codes_of_ranks_are_read():
    assert rank_exit_codes(REPORT) == {1, -9, 78}
    assert rank_exit_codes("10:00 INFO a") == set()


def rank_line(second: str, rank: int, what: str) -> str:
    return f"2026-11-22 10:00:{second} ERROR operators.training: rank {rank} failed: {what}"


FULL = "OSError: [Errno 28] No space left on device"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:25543"
INFO = "2026-11-22 10:00:00,000 INFO operators.training.worker: step 0"


def test_the_first_rank_to_fail_is_quoted_and_the_others_follow():
    """Long tracebacks from the other ranks must not hide the cause."""
    cause = [rank_line("01,100", 0, FULL), "Traceback (most recent call last):", "  save()"]
    echo = [rank_line("01,200", 1, CLOSED), "Traceback (most recent call last):", *["  x"] * 60]
    said = why_ended(["\n".join([INFO, *cause, *echo, REPORT])])
    assert said.splitlines() == [*(f"  | {line}" for line in cause), f"rank 1 then ended: {CLOSED}"]


def test_the_first_failure_is_found_in_the_logs_of_several_nodes():
    """The earliest failure counts as the cause, unless it is a lost connection."""
    late, early = rank_line("02,000", 3, FULL), rank_line("01,000", 1, "ValueError: a")
    assert failed_first([late, f"{INFO}\n{early}"]) == 1
    echo = rank_line("00,900", 2, CLOSED)
    assert failed_first([echo, late]) == 1
    assert why_ended([echo, late]).splitlines() == [f"  | {late}", f"rank 2 then ended: {CLOSED}"]
    assert failed_first(["no line of a rank"]) is None


def test_a_killed_rank_is_the_cause_if_others_only_lost_their_connection():
    """A killed rank wrote no line, but torchrun's report names the signal."""
    report = (
        "torch.distributed.elastic\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 7)\n"
    )
    echo = rank_line("01,000", 1, CLOSED)
    said = why_ended([f"{echo}\n{report}"]).splitlines()
    assert said == ["rank 0: killed by signal 9", f"rank 1 then ended: {CLOSED}"]
    own = rank_line("01,000", 1, FULL)
    said = why_ended([f"{own}\n{report}"]).splitlines()
    assert said == [f"  | {own}", "rank 0 then ended: killed by signal 9"]
