"""What is quoted of a worker's log, and what torchrun's report says of its ranks."""

from pipeline.launch.tail import LINES, last_lines, rank_exit_codes

REPORT = """\
E1121 03:58 torch/distributed/elastic/multiprocessing/api.py:1026] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
[0]:
  exitcode  : -9 (pid: 1234)
[1]:
  exitcode  : 78 (pid: 1235)
"""


def test_the_end_of_a_log_is_quoted():
    text = "\n".join(str(number) for number in range(100))
    assert last_lines(text).splitlines() == [f"  | {n}" for n in range(100 - LINES, 100)]
    assert last_lines("") == ""


def test_the_first_error_is_at_its_head_and_torchruns_report_is_left_out():
    log = "10:00 INFO a\n10:01 ERROR b\nTraceback c\n10:02 ERROR d\n"
    quoted = ["  | 10:01 ERROR b", "  | Traceback c", "  | 10:02 ERROR d"]
    assert last_lines(log + REPORT).splitlines() == quoted


def test_exit_codes_of_ranks():
    assert rank_exit_codes(REPORT) == {1, -9, 78}
    assert rank_exit_codes("10:00 INFO a") == set()
