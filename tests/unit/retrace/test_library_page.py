"""The code blocks in docs/library.md run unchanged.

tests/integration/run tests the blocks that start a run.
"""

import pytest

import retrace
from pipeline.upkeep.verify import verify
from tests.library_page import blocks, run_apart


def test_the_blocks_of_the_page_run_in_order(tmp_path):
    pytest.importorskip("duckdb", reason="the page queries a manifest with DuckDB")
    program = blocks(needs_engines=False)
    assert program.count("import") >= 5
    done = run_apart(program, tmp_path)
    assert done.returncode == 0, done.stderr
    store = retrace.open_store(str(tmp_path / "traces"))
    assert [str(problem) for problem in verify(store).problems] == []
