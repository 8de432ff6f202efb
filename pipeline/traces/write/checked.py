"""What a writer is given, checked before the first byte reaches the store."""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.strict_json import MOST_DEPTH
from pipeline.traces.format import domain
from pipeline.traces.format.codec import canonical
from pipeline.traces.format.ids import named
from pipeline.traces.format.policies import parse_policies, policies_json
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError


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
    domain.check_new(sample, step)
    versions = {span.version for span in sample.version_spans}
    if policies is not None and (unknown := versions - policies.keys()):
        raise TraceError(
            f"sample {sample.id}: tokens of policy version {min(unknown)}, whose weights are "
            f"not said; give those of all versions, found {sorted(policies)}"
        )
    if geometry is not None:
        rows = len(sample.prompt_tokens_P) + len(sample.response_tokens_G) - 1
        return replace(sample, routes=canonical_routes(sample.id, sample.routes, geometry, rows))
    if sample.routes is not None:
        raise TraceError(f"sample {sample.id}: it has routes, but its shard has no geometry")
    return sample


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
