"""docs/library.md: its blocks run as they stand; those that make a run: tests/integration/run."""

import pytest

import retrace
from pipeline.upkeep.verify import verify
from tests.library_page import blocks, run_apart


def test_the_blocks_of_the_page_run_one_after_the_other(tmp_path):
    pytest.importorskip("duckdb", reason="the page queries a manifest with DuckDB")
    program = blocks(needs_engines=False)
    assert program.count("import") >= 5
    done = run_apart(program, tmp_path)
    assert done.returncode == 0, done.stderr
    store = retrace.open_store(str(tmp_path / "traces"))
    assert [str(problem) for problem in verify(store).problems] == []
