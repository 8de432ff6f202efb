"""The listing of `retrace checkpoints`."""

from typer.testing import CliRunner

import retrace
from pipeline.cli import _app
from pipeline.run import keys
from pipeline.run.commit import commit, file_list, read_commit
from pipeline.store import open_store
from tests.data_files import put_data
from tests.stored_runs import whole_run

LAYOUT = {"tensor": 2, "pipeline": 1, "context": 1, "virtual_pipeline": 1, "data": 4, "expert": 8}


def ls(store, expect: int) -> list[str]:
    result = CliRunner().invoke(_app, ["checkpoints", "ls", store.uri])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def test_ls_shows_sizes_layouts_and_problems(tmp_path, monkeypatch):
    """The run has checkpoints of a finished step and of an unfinished one. At the end of the test,
    the second checkpoint loses a file."""
    monkeypatch.setenv("COLUMNS", "100")
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    first = read_commit(store, keys.checkpoint(1))
    file = put_data(store, keys.checkpoint_file(9, "0badcafe", "x.distcp"), bytes(2000))
    body = {"version": 9, "step": 9, "layout": LAYOUT, "files": file_list([file])}
    commit(store, keys.checkpoint(9), body, "0badcafe")
    head, *rows = ls(store, expect=0)
    assert head.split() == ["policy", "size", "saved", "by", "continues", "at"]
    assert rows[0].split()[0] == "1"
    assert rows[0].rstrip().endswith("step 1")
    assert rows[1].split()[:6] == ["9", "2.0", "kB", "TP2", "EP8", "DP4"]
    assert rows[1].rstrip().endswith("(its step is unfinished)")
    found = retrace.open_run(store.uri).listed_checkpoints()
    assert [(one.version, one.restarts, one.problem) for one in found] == [
        (1, True, ""),
        (9, False, ""),
    ]
    assert found[0].size == sum(entry["size"] for entry in first["files"])
    store.delete(file.key)
    assert ls(store, expect=1)[-1].rstrip() == (
        f"checkpoint of policy 9: {file.key} is missing or has a different size"
    )
