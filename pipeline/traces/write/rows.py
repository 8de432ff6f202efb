"""Creating and writing the rows of a samples file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.traces.format.digests import digest_of_canonical, token_digest
from pipeline.traces.format.domain import json_text
from pipeline.traces.format.schema import SAMPLES
from pipeline.traces.format.types import Sample
from pipeline.traces.write.files import FileWriter
from pipeline.traces.write.segments import SegmentRef

ROW_GROUP_TOKENS = 262_144
"""Tokens per row group (2 MB). Sealing reads some columns of every row group, so a few large row
groups are better than many small ones."""
_ROW_GROUP_TEXT = 8 << 20
"""Characters of text per row group, limited because readers decode entire row groups."""
_TEXTS = [field.name for field in SAMPLES if field.type == pa.string()]


def sample_row(
    sample: Sample, geometry: Geometry | None, places: Sequence[SegmentRef] | None
) -> dict[str, Any]:
    """Return the row for a sample that was checked (`check_new`) and has canonical routes.

    Args:
        sample: The sample.
        geometry: Geometry of its routes; None if there are no routes.
        places: Segments of the routes file that contain its routes; None if there are no routes.
    """
    routes, tokens_S = sample.routes, sample.tokens_S
    return {
        "id": sample.id,
        "group": sample.group,
        "prompt_id": sample.prompt_id,
        "policy_version": min(span.version for span in sample.version_spans),
        "prompt_length": len(sample.prompt_tokens_P),
        "response_length": len(sample.response_tokens_G),
        "reward": None if sample.reward is None else float(sample.reward),
        "reward_error": sample.reward_error,
        "token_digest": token_digest(tokens_S),
        "routes_digest": digest_of_canonical(routes, geometry) if routes and geometry else None,
        "rows_valid": int(np.count_nonzero(routes.valid_T)) if routes else None,
        "rows_total": len(tokens_S) - 1,
        "branch_of": sample.branch_of,
        "segments": None if places is None else [vars(place) for place in places],
        "prompt_tokens": sample.prompt_tokens_P,
        "response_tokens": sample.response_tokens_G,
        "loss_mask": sample.loss_mask_G,
        "logprobs": sample.logprobs_G,
        "finish_reason": sample.finish_reason,
        "version_spans": [vars(span) for span in sample.version_spans],
        "seed": sample.seed,
        "extras": json_text(sample.extras, f"sample {sample.id}: extras"),
    }


class RowWriter:
    """Writes sample rows to a samples file, one row group at a time."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._pending: list[dict[str, Any]] = []
        self._tokens = self._text = 0

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self._pending.append(row)
        lists = (row["version_spans"], row["segments"] or ())
        self._tokens += row["rows_total"] + 1 + sum(map(len, lists))
        self._text += sum(len(row[name] or "") for name in _TEXTS)
        if self._tokens >= ROW_GROUP_TOKENS or self._text >= _ROW_GROUP_TEXT:
            self._cut()

    def finish(self) -> None:
        """Write the last row group. The caller finishes the file."""
        if self._pending:
            self._cut()

    def _cut(self) -> None:
        columns = {name: [row[name] for row in self._pending] for name in SAMPLES.names}
        self._file.write_table(pa.table(columns, schema=SAMPLES))
        self._pending, self._tokens, self._text = [], 0, 0
