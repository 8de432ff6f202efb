"""Samples as rows of a samples file, and back."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.traces.digests import digest_of_canonical, token_digest
from pipeline.traces.files import FileWriter
from pipeline.traces.records import Geometry, Sample, TraceError, VersionSpan
from pipeline.traces.schema import SAMPLES
from pipeline.traces.segments import Place

ROW_GROUP_TOKENS = 262_144
"""Of a samples file: 2 MB. Sealing reads some columns of every row group, so there are few."""


def sample_row(
    sample: Sample, geometry: Geometry | None, places: Sequence[Place] | None
) -> dict[str, Any]:
    """A sample as a row; its routes are canonical and lie at these places of the routes file.

    The sample is checked (`check`). Raises TraceError when its extras are not JSON.
    """
    routes = sample.routes
    return {
        "id": sample.id,
        "group": sample.group,
        "prompt_id": sample.prompt_id,
        "policy_version": min(span.version for span in sample.version_spans),
        "prompt_length": len(sample.prompt_tokens_P),
        "response_length": len(sample.response_tokens_G),
        "reward": sample.reward,
        "reward_error": sample.reward_error,
        "token_digest": token_digest(sample.tokens_S),
        "routes_digest": digest_of_canonical(routes, geometry) if routes and geometry else None,
        "rows_valid": int(routes.valid_T.sum()) if routes else None,
        "rows_total": len(sample.tokens_S) - 1,
        "segments": None if places is None else [vars(place) for place in places],
        "prompt_tokens": sample.prompt_tokens_P,
        "response_tokens": sample.response_tokens_G,
        "loss_mask": sample.loss_mask_G,
        "logprobs": sample.logprobs_G,
        "finish_reason": sample.finish_reason,
        "version_spans": [vars(span) for span in sample.version_spans],
        "seed": sample.seed,
        "extras": _json(sample),
    }


class RowWriter:
    """Writes sample rows as the row groups of a samples file."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file
        self._pending: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self._pending.append(row)
        self._tokens += row["rows_total"] + 1
        if self._tokens >= ROW_GROUP_TOKENS:
            self._cut()

    def finish(self) -> None:
        """Write the last row group. The file is the caller's to finish."""
        if self._pending:
            self._cut()

    def _cut(self) -> None:
        columns = {name: [row[name] for row in self._pending] for name in SAMPLES.names}
        self._file.write_table(pa.table(columns, schema=SAMPLES))
        self._pending, self._tokens = [], 0


def sample_at(table: pa.Table, i: int, name: str) -> Sample:
    """Row i of a samples table as a sample, without routes.

    Raises TraceError, naming file and sample, when its tokens are not those of its digest.
    """

    def array(column: str, dtype: Any) -> Any:
        return table[column][i].values.to_numpy(zero_copy_only=False).astype(dtype)

    def value(column: str) -> Any:
        return table[column][i].as_py()

    sample = Sample(
        id=value("id"),
        group=value("group"),
        prompt_id=value("prompt_id"),
        prompt_tokens_P=array("prompt_tokens", np.uint32),
        response_tokens_G=array("response_tokens", np.uint32),
        loss_mask_G=array("loss_mask", np.bool_),
        logprobs_G=array("logprobs", np.float32),
        finish_reason=value("finish_reason"),
        version_spans=tuple(VersionSpan(**span) for span in value("version_spans")),
        seed=value("seed"),
        reward=value("reward"),
        reward_error=value("reward_error"),
        extras=json.loads(value("extras")),
        routes=None,
    )
    check(sample)
    found = token_digest(sample.tokens_S)
    if found != value("token_digest"):
        raise TraceError(
            f"{name}: sample {sample.id}: its tokens have digest {found[:16]}..., its row says "
            f"{value('token_digest')[:16]}...; remake the step"
        )
    return sample


def check(sample: Sample) -> None:
    """Raise TraceError, naming the sample, when its parts do not fit together."""
    length = len(sample.response_tokens_G)
    if len(sample.prompt_tokens_P) == 0:
        raise TraceError(f"sample {sample.id}: no prompt token")
    for name in ("loss_mask_G", "logprobs_G"):
        found = len(getattr(sample, name))
        if found != length:
            raise TraceError(
                f"sample {sample.id}: {found} values of {name} for {length} response tokens"
            )
    ends = [0, *(span.end for span in sample.version_spans)]
    starts = [*(span.start for span in sample.version_spans), length]
    if ends != starts or not sample.version_spans:
        raise TraceError(
            f"sample {sample.id}: version spans {sample.version_spans} do not cover its {length} "
            "response tokens, each once and in order"
        )


def _json(sample: Sample) -> str:
    try:
        return json.dumps(sample.extras, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceError(f"sample {sample.id}: extras are not JSON values: {error}") from error
