"""Accidents to the objects of a run in a folder; tests/integration repeats them on an S3 server."""

import pytest

from tests.accidents import check_changed_bytes, check_lost_objects


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize("check", [check_changed_bytes, check_lost_objects])
def test_accidents_are_noticed(store, tmp_path, mode, check):
    check(store, tmp_path, mode)
