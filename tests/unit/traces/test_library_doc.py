"""The traces library: which input its functions accept or refuse, and what it imports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import retrace
from pipeline.cli import traces
from pipeline.run.commit import new_write_id
from pipeline.store import open_store
from pipeline.traces import (
    Geometry,
    NewTrainerRoutes,
    Provenance,
    Routes,
    TraceError,
    VersionSpan,
    new_sample,
    open_manifest,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    seal_trainer_routes,
    used_routes,
    write_shard,
    write_step,
    write_trainer_routes,
)
from pipeline.upkeep.verify import verify
from tests.weights import digest_of, some_weights

GEOMETRY = Geometry(16, 2, (1, 2))
MADE_BY = Provenance("R3", 0, "an engine")


def run_apart(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_library_imports_only_what_traces_need(tmp_path):
    """Traces can therefore be used on machines where Retrace does not run."""
    program = (
        "import json, sys\n"
        "before = set(sys.modules)\n"
        "import pipeline.traces, pipeline.upkeep.export, pipeline.upkeep.verify\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(new - set(sys.stdlib_module_names) - {'pipeline'})))\n"
    )
    done = run_apart(program, tmp_path)
    assert done.returncode == 0, done.stderr
    needed = {"numpy", "pyarrow", "msgspec", "cython_runtime", "cloudpickle"}
    needed.add("typing_extensions")  # msgspec uses it if it is installed
    extra = set(json.loads(done.stdout)) - needed
    assert {name for name in extra if not name.startswith("_")} == set()


def test_a_step_of_samples_without_routes_has_default_values(tmp_path):
    store = open_store(str(tmp_path))
    manifest = write_step(store, 0, [new_sample(0, "a", 0, [1, 2], [3])], None, None)
    assert manifest.samples == 1
    (sample,) = read_samples(store, manifest.all(), ["000000/a/0"])
    assert np.isnan(sample.logprobs_G).all()
    assert sample.loss_mask_G.all()
    assert (sample.reward, sample.seed, sample.version_spans) == (None, -1, (VersionSpan(0, 0, 1),))


def test_an_empty_response_with_every_argument_is_written_and_read(tmp_path):
    store = open_store(str(tmp_path))
    sets = np.array([[[3, 1], [0, 15]]])
    more = {"logprobs": [], "loss_mask": [], "reward": 1.5, "finish_reason": "abort", "seed": 9}
    sample = new_sample(7, "b", 1, [1, 2], [], sets, versions=2, extras={"x": 1}, **more)
    write_step(store, 7, [sample], GEOMETRY, Provenance("R3", 2, "an engine"))
    manifest = read_manifest(store, 7)
    assert manifest.policy_versions == (2,)
    found = read_routes(store, manifest, ["000007/b/1"])["000007/b/1"]
    assert found.sets_TLK.tolist() == [[[1, 3], [0, 15]]]
    (back,) = read_samples(store, manifest, ["000007/b/1"])
    assert (back.reward, back.finish_reason, back.seed, back.extras) == (1.5, "abort", 9, {"x": 1})


def test_a_row_is_unknown_only_if_all_its_ids_are(tmp_path):
    store = open_store(str(tmp_path))
    sets = np.full((2, 2, 2), -1)
    sets[1] = [[0, 1], [-1, -1]]
    with pytest.raises(TraceError, match=r"sample 000000/a/0: row 1 has the expert id -1"):
        write_step(store, 0, [new_sample(0, "a", 0, [1, 2], [3], sets)], GEOMETRY, MADE_BY)
    assert [info.key for info in store.list("")] == []


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([-1], "tokens -1..-1, expected 0..4294967295"),
        ([2**32], "tokens 4294967296..4294967296, expected 0..4294967295"),
        ([0.5], "tokens of type float64 and shape (1,), expected integers in one dimension"),
        ([[1]], "tokens of type int64 and shape (1, 1), expected integers in one dimension"),
    ],
)
def test_malformed_tokens_are_refused(tokens, says):
    with pytest.raises(TraceError, match="^sample 000000/a/0: " + re.escape(says)):
        new_sample(0, "a", 0, tokens, [1])


@pytest.mark.parametrize("prompt_id", ["", "a/b"])
def test_a_prompt_id_that_would_break_sample_ids_is_refused(prompt_id):
    with pytest.raises(TraceError, match="expected a name without '/'"):
        new_sample(0, prompt_id, 0, [1], [1])


@pytest.mark.parametrize("experts", [np.zeros((1, 2)), np.zeros((1, 2, 2)), np.zeros((1, 2), int)])
def test_experts_of_a_wrong_form_are_refused(experts):
    with pytest.raises(
        TraceError, match=r"^sample 000000/a/0: experts of type .* expected integers"
    ):
        new_sample(0, "a", 0, [1], [1], experts)


def test_an_extra_row_is_refused(tmp_path):
    """Some engines and scripts also return a row for the last token. A reader cannot determine
    which row is the extra one."""
    sample = new_sample(0, "a", 0, [1, 2], [3], np.array([[[0, 1], [0, 1]]] * 3))
    with pytest.raises(TraceError, match="one row per token except the last"):
        write_step(open_store(str(tmp_path)), 0, [sample], GEOMETRY, MADE_BY)


def test_a_sample_of_one_token_without_rows_is_joined(tmp_path):
    """In R2, the trainer's files may omit such a sample, because it has no routes."""
    store = open_store(str(tmp_path))
    samples = [new_sample(0, "a", 0, [1], []), new_sample(0, "b", 0, [1, 2], [])]
    write_shard(store, 0, 0, new_write_id(), samples, None, None)
    sealed = seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0, training=True)
    new = NewTrainerRoutes(sealed.all(), Provenance("R2", 0, "a trainer"))
    files = []
    for stage, layer in enumerate(GEOMETRY.layers):
        routes = {
            "000000/a/0": Routes(np.zeros((0, 1, 2), np.uint8), np.ones(0, np.bool_)),
            "000000/b/0": Routes(np.array([[[3, 4]]], np.uint8), np.ones(1, np.bool_)),
        }
        one = Geometry(16, 2, (layer,))
        files.append(write_trainer_routes(store, new, stage, 0, routes, one))
    seal_trainer_routes(store, new, files, GEOMETRY)
    assert [str(problem) for problem in verify(store).problems] == []
    found = read_routes(store, used_routes(store, 0), ["000000/a/0", "000000/b/0"])
    assert found["000000/a/0"].sets_TLK.shape == (0, 2, 2)
    assert found["000000/b/0"].sets_TLK.tolist() == [[[3, 4], [3, 4]]]


@pytest.mark.parametrize("arguments", ["ls", "show 000000/gsm8k-7/0", "stats", "verify", "export"])
def test_the_commands_read_steps_of_the_library(tmp_path, arguments):
    store = open_store(str(tmp_path / "set"))
    sample = new_sample(0, "gsm8k-7", 0, [1, 2], [3], np.array([[[0, 1], [2, 3]]] * 2))
    write_step(store, 0, [sample], GEOMETRY, MADE_BY)
    name, *rest = arguments.split()
    out = ["--out", str(tmp_path / "out")] if name == "export" else []
    done = CliRunner().invoke(traces.app, [name, store.uri, *rest, *out])
    assert done.exit_code == 0, done.output


def test_a_step_is_written_once(tmp_path):
    store = open_store(str(tmp_path))
    write_step(store, 0, [new_sample(0, "a", 0, [1, 2], [3])], None, None)
    with pytest.raises(
        TraceError, match=r"step 0 in .* already exists, and a step is written once"
    ):
        write_step(store, 0, [new_sample(0, "a", 0, [1, 2], [4])], None, None)
    assert open_manifest(store, 0).samples == 1


def test_a_step_names_its_weights(tmp_path):
    """The writer receives the digests and the manifest lists them; invalid digests are refused."""
    store = open_store(str(tmp_path / "traces"))
    (tmp_path / "model.safetensors").write_bytes(some_weights())
    digest = retrace.traces.weights_digest(tmp_path)
    assert digest == digest_of(tmp_path)
    sample = new_sample(0, "a", 0, [1], [2], versions=4)
    for wrong in ({4: "x"}, {"4": digest}, {5: digest}):
        with pytest.raises(TraceError, match="polic"):
            write_step(store, 0, [sample], None, None, policies=wrong)
    write_step(store, 0, [sample], None, None, policies={4: digest})
    assert read_manifest(store, 0).policies == {4: digest}
    assert not verify(store).problems


def test_folders_without_complete_weights_have_no_digest(tmp_path):
    with pytest.raises(TraceError, match=r"no \*\.safetensors files"):
        retrace.traces.weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(some_weights()[:-1])
    with pytest.raises(TraceError, match=r"model\.safetensors: it ends 1 bytes too early"):
        retrace.traces.weights_digest(str(tmp_path))


def test_a_folder_whose_index_lists_a_missing_file_has_no_digest(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(some_weights())
    digest = retrace.traces.weights_digest(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"gate.weight": "a.safetensors"}}')
    assert retrace.traces.weights_digest(tmp_path) == digest
    index.write_text('{"weight_map": {"gate.weight": "a.safetensors", "head": "b.safetensors"}}')
    with pytest.raises(
        TraceError, match=r"no file b\.safetensors, expected 2 files as in model\.s"
    ):
        retrace.traces.weights_digest(tmp_path)
    for damaged in ("{}", "[]", "{", '{"weight_map": {"head": 1}}'):
        index.write_text(damaged)
        with pytest.raises(TraceError, match=r"index\.json: .*; write or download the file again"):
            retrace.traces.weights_digest(tmp_path)


@pytest.mark.parametrize("folder", [None, 5, b"weights", "a\0b", "\ud800"])
def test_the_weights_are_in_a_folder(folder):
    with pytest.raises(TraceError, match=r"^weights: .*, expected "):
        retrace.traces.weights_digest(folder)
