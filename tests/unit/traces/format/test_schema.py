"""Whatever happens to an object, a reader gives the right rows or an error: never wrong rows."""

import pytest

from pipeline.traces import TraceError
from pipeline.traces.format.schema import check_format


@pytest.mark.parametrize("version", ["2.0", "12", "0.1", None, "x", 1.0])
def test_format_versions(version):
    with pytest.raises(TraceError, match="format version"):
        check_format(version, "file")
    check_format("1.9", "file")
