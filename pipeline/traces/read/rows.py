"""Creates samples from the rows of a samples file."""

from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.run.strict_json import parse_json
from pipeline.traces.format.digests import token_digest
from pipeline.traces.format.domain import check_sample, check_text, shown
from pipeline.traces.format.types import Sample, TraceError, VersionSpan


def sample_at(table: pa.Table, i: int, name: str) -> Sample:
    """Return the sample in row i of a samples table, without its routes.

    Args:
        table: A table with the columns of schema.SAMPLES.
        i: The index of the row.
        name: The file, for error messages.

    Raises:
        TraceError: The tokens do not match their digest, or columns contradict each other. The
            message names the file and the sample.
    """

    def array(column: str, dtype: Any) -> Any:
        return table[column][i].values.to_numpy(zero_copy_only=False).astype(dtype)

    def value(column: str) -> Any:
        return table[column][i].as_py()

    id = value("id")
    sample = Sample(
        id=id,
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
        extras=_extras(value("extras"), f"{name}: sample {shown(id)}"),
        routes=None,
        branch_of=value("branch_of"),
    )
    check_sample(sample, name)
    made = {
        "prompt_length": len(sample.prompt_tokens_P),
        "response_length": len(sample.response_tokens_G),
        "rows_total": len(sample.prompt_tokens_P) + len(sample.response_tokens_G) - 1,
        "policy_version": min(span.version for span in sample.version_spans),
    }
    for column, expected in made.items():
        if value(column) != expected:
            raise TraceError(
                f"{name}: sample {sample.id}: {column} {value(column)}, but its tokens and version "
                f"spans require {expected}; remake the step"
            )
    found = token_digest(sample.tokens_S)
    if found != value("token_digest"):
        raise TraceError(
            f"{name}: sample {sample.id}: its tokens have digest {found[:16]}..., but its row "
            f"records {value('token_digest')[:16]}...; remake the step"
        )
    return sample


def _extras(text: str, name: str) -> dict[str, Any]:
    try:
        found = parse_json(check_text(text, f"{name}: extras"))
    except ValueError as error:
        raise TraceError(f"{name}: invalid JSON in extras: {error}; remake the step") from error
    if not isinstance(found, dict):
        raise TraceError(
            f"{name}: extras of type {type(found).__name__}, expected an object; remake the step"
        )
    return found
