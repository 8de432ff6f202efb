import pytest

from pipeline.store import Store, open_store
from pipeline.traces.write import rows


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def small_row_groups(monkeypatch) -> None:
    """Limit row groups of routes to a few rows, so that there are many."""
    monkeypatch.setattr(rows, "ROUTES_ROWS", 10)
