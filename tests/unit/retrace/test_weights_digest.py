"""The digest of the weights in a folder, by which a step names its policies."""

import pytest

from retrace.traces import TraceError, weights_digest
from tests.weights import digest_of, some_weights


def test_the_digest_is_that_of_a_policy(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(some_weights())
    assert weights_digest(tmp_path) == weights_digest(str(tmp_path)) == digest_of(tmp_path)


def test_folders_without_complete_weights_have_no_digest(tmp_path):
    with pytest.raises(TraceError, match=r"\*\.safetensors"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(some_weights()[:-1])
    with pytest.raises(TraceError, match=r"model\.safetensors"):
        weights_digest(tmp_path)


def test_a_folder_whose_index_lists_a_missing_file_has_no_digest(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(some_weights())
    digest = weights_digest(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"gate.weight": "a.safetensors"}}')
    assert weights_digest(tmp_path) == digest
    index.write_text('{"weight_map": {"gate.weight": "a.safetensors", "head": "b.safetensors"}}')
    with pytest.raises(TraceError, match=r"b\.safetensors"):
        weights_digest(tmp_path)
    for damaged in ("{}", "[]", "{", '{"weight_map": {"head": 1}}'):
        index.write_text(damaged)
        with pytest.raises(TraceError, match=r"index\.json"):
            weights_digest(tmp_path)


@pytest.mark.parametrize("folder", [None, 5, b"weights", "a\0b", "\ud800"])
def test_the_weights_are_in_a_folder(folder):
    with pytest.raises(TraceError, match=r"^weights: "):
        weights_digest(folder)
