import pytest

from pipeline.store import Store, open_store
from pipeline.traces.write import segments


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def small_row_groups(monkeypatch) -> None:
    """Limit row groups to a few tokens, so that there are many row groups."""
    monkeypatch.setattr(segments, "ROW_GROUP_TOKENS", 10)
