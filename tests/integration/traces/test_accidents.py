"""Accidents to the objects of a run on a real S3 server; the unit tests repeat them on files."""

import pytest

from pipeline.store import open_store
from tests.accidents import check_changed_bytes, check_lost_objects

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize("check", [check_changed_bytes, check_lost_objects])
def test_accidents_are_noticed(s3_uri, tmp_path, mode, check):
    check(open_store(s3_uri), tmp_path, mode, sample=12)
