"""Checks that a writer performs on its input before the first byte reaches the store."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from typing import Any

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.strict_json import MOST_DEPTH
from pipeline.traces.format import domain
from pipeline.traces.format.codec import canonical, canonical_samples
from pipeline.traces.format.ids import named
from pipeline.traces.format.policies import parse_policies, policies_json
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError

_SHORT_BYTES, _TOGETHER_BYTES = 1 << 16, 1 << 22
"""Maximum size in bytes of a short sample's routes, and of the routes that are sorted together."""


def shard_key(step: int, shard: int) -> str:
    """Return the key of a shard's commit. Raises TraceError for numbers beyond the limits."""
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
    """Check the common fields of a commit.

    Args:
        key: Key of the commit, for error messages.
        write_id: Write id of the commit's files.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.

    Raises:
        TraceError: A field is malformed, or only one of geometry and provenance is given.
    """
    domain.check_write_id(write_id, key)
    if (geometry is None) != (provenance is None):
        raise TraceError(f"{key}: only one of geometry and provenance, expected both or neither")
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
    """Raise a TraceError that names the commit if `maker` is not a JSON object."""
    if not isinstance(maker, Mapping | None):
        raise TraceError(f"{key}: maker of type {type(maker).__name__}, expected a JSON object")
    domain.json_text(dict(maker or {}), f"{key}: maker", MOST_DEPTH - 1)  # nested in the commit


def check_branch_of(key: str, branched: Set[str], ids: Set[str]) -> None:
    """Check that the first sequences of branches are present.

    Args:
        key: Key of the commit, for the error message.
        branched: Ids of the first sequences to which branches refer.
        ids: Ids of all samples.

    Raises:
        TraceError: First sequences are missing.
    """
    if missing := sorted(branched - ids):
        raise TraceError(f"{key}: {named('missing first sequences of branches', missing)}")


def checked_sample(
    sample: Sample, step: int, geometry: Geometry | None, policies: Mapping[int, str] | None
) -> Sample:
    """Check a sample, and return it with canonical routes.

    Args:
        sample: The sample to check.
        step: The step to which it must belong.
        geometry: The geometry of its routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.

    Raises:
        TraceError: A reader would refuse the sample; the message names it.
    """
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
    """Check samples, and return them with canonical routes. Short samples are sorted together.

    Args:
        samples: The samples to check.
        step: The step to which they must belong.
        geometry: The geometry of their routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.

    Raises:
        TraceError: A reader would refuse a sample; the message names it.
    """
    for sample in samples:
        _check(sample, step, geometry, policies)
    if geometry is None:
        return list(samples)
    ready: list[Sample] = []
    for together in _together(samples, geometry.row_bytes):
        ready += map(_with, together, _canonical(together, geometry))
    return ready


def _check(
    sample: Sample, step: int, geometry: Geometry | None, policies: Mapping[int, str] | None
) -> None:
    """Raise TraceError if a reader would refuse any field of a sample except its routes."""
    domain.check_new(sample, step)
    versions = {span.version for span in sample.version_spans}
    if policies is not None and (unknown := versions - policies.keys()):
        raise TraceError(
            f"sample {sample.id}: tokens from policy version {min(unknown)}, which has no "
            f"weights digest; found digests for versions {sorted(map(int, policies))}, pass one "
            "for each version"
        )
    if geometry is None and sample.routes is not None:
        raise TraceError(f"sample {sample.id}: routes in a shard without geometry")


def _together(samples: Sequence[Sample], row_bytes: int) -> Iterator[list[Sample]]:
    """Yield lists of short samples to sort together, and a separate list for each long sample."""
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
            pass  # a sample is invalid; check the samples one by one to find it
    return [
        canonical_routes(sample.id, sample.routes, geometry, T)
        for sample, T in zip(samples, rows, strict=True)
    ]


def _rows(sample: Sample) -> int:
    return len(sample.prompt_tokens_P) + len(sample.response_tokens_G) - 1


_FIELDS = tuple(field.name for field in fields(Sample))


def _with(sample: Sample, routes: Routes) -> Sample:
    # A subclass may have further fields. This takes half as long as `replace`.
    of_sample = vars(sample)
    return Sample(**{**{name: of_sample[name] for name in _FIELDS}, "routes": routes})


def canonical_routes(
    id: str, routes: Routes | None, geometry: Geometry, rows: int | None
) -> Routes:
    """Return the canonical routes of a sample.

    Args:
        id: The sample's id, for error messages.
        routes: The routes to check.
        geometry: The geometry that the routes must have.
        rows: The number of rows; None expects one row per validity bit.

    Raises:
        TraceError: The routes are missing or malformed.
    """
    if routes is None:
        raise TraceError(f"sample {id}: no routes; pass routes and mark unknown rows as not valid")
    where = f"sample {domain.shown(id)}"
    domain.check_routes(routes, where)
    try:
        return canonical(routes, geometry, routes.valid_T.size if rows is None else rows)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error
