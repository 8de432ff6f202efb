"""What a writer is given, checked before the first byte reaches the store."""

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.strict_json import MOST_DEPTH
from pipeline.traces.format import domain
from pipeline.traces.format.codec import canonical, canonical_samples
from pipeline.traces.format.ids import named
from pipeline.traces.format.policies import parse_policies, policies_json
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError

_SHORT_BYTES, _TOGETHER_BYTES = 1 << 16, 1 << 22
"""Of the routes of a sample, and of those that are sorted together."""


def shard_key(step: int, shard: int) -> str:
    """The key of a shard's commit. Raises TraceError for numbers that no key can hold."""
    domain.check_number(step, domain.MOST_STEP, "step")
    domain.check_number(shard, domain.MOST_SHARD, f"step {step}: shard")
    return keys.rollout(step, shard)


def check_source(
    key: str,
    write_id: str,
    geometry: Geometry | None,
    provenance: Provenance | None,
    policies: Mapping[int, str] | None,
) -> None:
    """Raise TraceError, naming the commit, for what its header must not say."""
    domain.check_write_id(write_id, key)
    if (geometry is None) != (provenance is None):
        raise TraceError(f"{key}: geometry and provenance go together, only one was given")
    if geometry is not None:
        domain.check_geometry(geometry, key)
        domain.check_provenance(provenance, key)
    if policies is not None:
        if not isinstance(policies, Mapping):
            raise TraceError(
                f"{key}: policies of type {type(policies).__name__}, expected digests by version"
            )
        for version in policies:
            domain.check_number(version, domain.MOST, f"{key}: version of a policy")
        parse_policies(policies_json(policies), key)


def check_maker(key: str, maker: Mapping[str, Any] | None) -> None:
    """Raise TraceError, naming the commit, for a maker that is not JSON."""
    if not isinstance(maker, Mapping | None):
        raise TraceError(f"{key}: maker of type {type(maker).__name__}, expected a JSON object")
    domain.json_text(dict(maker or {}), f"{key}: maker", MOST_DEPTH - 1)  # it lies in the commit


def check_branch_of(key: str, branched: Set[str], ids: Set[str]) -> None:
    """Raise TraceError, naming the commit, when first sequences of branches are missing."""
    if missing := sorted(branched - ids):
        raise TraceError(f"{key}: {named('branches of samples that are not there', missing)}")


def checked_sample(
    sample: Sample, step: int, geometry: Geometry | None, policies: Mapping[int, str] | None
) -> Sample:
    """A sample with canonical routes. Raises TraceError, naming it, for what no reader takes."""
    _check(sample, step, geometry, policies)
    if geometry is None:
        return sample
    return _with(sample, canonical_routes(sample.id, sample.routes, geometry, _rows(sample)))


def checked_samples(
    samples: Sequence[Sample],
    step: int,
    geometry: Geometry | None,
    policies: Mapping[int, str] | None,
) -> list[Sample]:
    """The same for many, of which short ones are sorted together."""
    for sample in samples:
        _check(sample, step, geometry, policies)
    if geometry is None:
        return list(samples)
    row_bytes = len(geometry.layers) * geometry.topk * np.dtype(geometry.dtype).itemsize
    ready: list[Sample] = []
    for together in _together(samples, row_bytes):
        ready += map(_with, together, _canonical(together, geometry))
    return ready


def _check(
    sample: Sample, step: int, geometry: Geometry | None, policies: Mapping[int, str] | None
) -> None:
    """Refuse a sample that no reader takes; its routes are not looked at."""
    domain.check_new(sample, step)
    versions = {span.version for span in sample.version_spans}
    if policies is not None and (unknown := versions - policies.keys()):
        raise TraceError(
            f"sample {sample.id}: tokens of policy version {min(unknown)}, whose weights are "
            f"not said; give those of all versions, found {sorted(policies)}"
        )
    if geometry is None and sample.routes is not None:
        raise TraceError(f"sample {sample.id}: it has routes, but its shard has no geometry")


def _together(samples: Sequence[Sample], row_bytes: int) -> Iterator[list[Sample]]:
    """Cut samples into runs of short ones, and long ones alone."""
    together: list[Sample] = []
    size = 0
    for sample in samples:
        of_sample = _rows(sample) * row_bytes
        is_long = of_sample > _SHORT_BYTES
        if together and (is_long or size + of_sample > _TOGETHER_BYTES):
            yield together
            together, size = [], 0
        if is_long:
            yield [sample]
        else:
            together.append(sample)
            size += of_sample
    if together:
        yield together


def _canonical(samples: Sequence[Sample], geometry: Geometry) -> list[Routes]:
    rows = [_rows(sample) for sample in samples]
    if len(samples) > 1:
        try:
            routes = [domain.check_routes(sample.routes, "") for sample in samples]
            return canonical_samples(routes, geometry, rows)
        except TraceError:
            pass  # one is wrong: which, is found out one by one
    return [
        canonical_routes(sample.id, sample.routes, geometry, T)
        for sample, T in zip(samples, rows, strict=True)
    ]


def _rows(sample: Sample) -> int:
    return len(sample.prompt_tokens_P) + len(sample.response_tokens_G) - 1


def _with(sample: Sample, routes: Routes) -> Sample:
    return Sample(**{**vars(sample), "routes": routes})  # a third of what `replace` takes


def canonical_routes(
    id: str, routes: Routes | None, geometry: Geometry, rows: int | None
) -> Routes:
    """Canonical routes of a sample; `rows` None: as many as there are bits of validity."""
    if routes is None:
        raise TraceError(
            f"sample {id}: no routes; a row that is not known is one that is not valid"
        )
    where = f"sample {domain.shown(id)}"
    domain.check_routes(routes, where)
    try:
        return canonical(routes, geometry, routes.valid_T.size if rows is None else rows)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error
