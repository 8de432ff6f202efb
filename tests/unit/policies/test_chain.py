"""Commits of policies: whole versions, differences, their chains, and inconsistent commits."""

import json
from dataclasses import asdict, replace

import pytest

from pipeline.policies.tensors import StoredTensor, share_body
from pipeline.policies.versions import (
    WEIGHTS,
    Difference,
    PolicyVersion,
    chain,
    check_fits,
    commit_version,
    read_tensors,
    read_version,
)
from pipeline.policies.weights import Tensor, tensors_digest
from pipeline.run import keys
from pipeline.run.commit import (
    CONTENT_SHA256,
    CorruptObjectError,
    content_digest,
    file_list,
    read_commit_file,
    to_json,
)
from pipeline.run.shares import write_share
from pipeline.store import ObjectMissingError
from tests.data_files import put_data
from tests.memory_store import MemoryStore

MADE = "0123abcd"
NAMES = ("embed.weight", "gate.weight", "norm.weight")
DIFFERENCE = "difference-00001-of-00001.safetensors"


def tensor(name: str, version: int) -> Tensor:
    return Tensor(name, "BF16", (4, 2), f"{NAMES.index(name):032x}{version:032x}")


def written(store: MemoryStore, version: int, changed: int, difference: bool) -> PolicyVersion:
    """Write the files and shares of two ranks; tensors at index `changed` and above are new."""
    name = DIFFERENCE if difference else "model.safetensors"
    file = put_data(store, keys.policy_file(version, MADE, name), b"bytes" * (version + 1))
    files = [file]
    if not difference:
        files.append(put_data(store, keys.policy_file(version, MADE, "config.json"), b"{}"))
    tensors = [
        StoredTensor(tensor(n, version), name) if i >= changed else StoredTensor(tensor(n, 5), None)
        for i, n in enumerate(NAMES)
    ]
    for rank, (mine, its) in enumerate(((tensors[:2], files), (tensors[2:], []))):
        body = share_body(version, its, mine)
        write_share(store, keys.policy_share(version, MADE, rank), body, MADE)
    shares = [read_commit_file(store, keys.policy_share(version, MADE, r))[0] for r in (0, 1)]
    digest = tensors_digest(stored.tensor for stored in tensors)
    base = None
    if difference:
        before = read_version(store, version - 1).weights_sha256
        assert before is not None
        base = Difference(version - 1, before)
    return PolicyVersion(version, digest, tuple(files), tuple(shares), base)


@pytest.fixture(name="store")
def three_versions() -> MemoryStore:
    """Policy 5 is whole; policies 6 and 7 are differences that change all tensors but the first."""
    store = MemoryStore()
    for version, changed in ((5, 0), (6, 1), (7, 1)):
        policy = written(store, version, changed, version > 5)
        assert commit_version(store, policy, MADE).ours
        assert read_version(store, version) == policy
    return store


def remade(store: MemoryStore, version: int, **changes: object) -> None:
    """Change keys of a commit and update its digest; None removes the key."""
    body = {**json.loads(store.objects[keys.policy(version)]), **changes}
    body = {key: value for key, value in body.items() if value is not None}
    store.objects[keys.policy(version)] = to_json({**body, CONTENT_SHA256: content_digest(body)})


def test_a_chain_begins_with_the_newest_whole_version(store):
    assert [policy.version for policy in chain(store, 7)] == [5, 6, 7]
    assert [policy.version for policy in chain(store, 5)] == [5]
    assert commit_version(store, written(store, 8, 0, False), MADE).ours
    assert [policy.version for policy in chain(store, 8)] == [8]


def test_shares_list_every_tensor_once(store):
    tensors = read_tensors(store, read_version(store, 7))
    assert tensors == {
        "embed.weight": StoredTensor(tensor("embed.weight", 5), None),
        "gate.weight": StoredTensor(tensor("gate.weight", 7), DIFFERENCE),
        "norm.weight": StoredTensor(tensor("norm.weight", 7), DIFFERENCE),
    }
    check_fits(store, read_version(store, 7), tensors, read_tensors(store, read_version(store, 6)))


def test_a_difference_may_have_no_file(store):
    """With a learning rate of 0, no tensor changes."""
    before = read_tensors(store, read_version(store, 7))
    unchanged = [StoredTensor(stored.tensor, None) for stored in before.values()]
    write_share(store, keys.policy_share(8, MADE, 0), share_body(8, [], unchanged), MADE)
    share, _ = read_commit_file(store, keys.policy_share(8, MADE, 0))
    digest = read_version(store, 7).weights_sha256
    assert digest is not None
    policy = PolicyVersion(8, digest, (), (share,), Difference(7, digest))
    commit_version(store, policy, MADE)
    assert chain(store, 8)[-1] == policy
    check_fits(store, policy, read_tensors(store, policy), before)


def test_a_missing_base_is_named_with_the_version_that_needs_it(store):
    store.delete(keys.policy(5))
    text = r"000006/policy\.json in .* chain of policy 7 needs .*/000005/policy\.json is missing"
    with pytest.raises(ObjectMissingError, match=text):
        chain(store, 7)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"difference": {"base": 7, "base_weights_sha256": "0" * 64}}, "policy 7, expected"),
        ({"difference": {"base": 5, "base_weights_sha256": "0" * 64}}, "policy 5, expected"),
        ({"difference": {"base": 6}}, "base_weights_sha256"),
        ({"difference": {"base": 6, "base_weights_sha256": "0" * 64}}, "weights 0000000000000000"),
        ({"tensors": None}, "found no shares"),
        ({WEIGHTS: "0"}, WEIGHTS),
        ({"attempt": "0123abce"}, "its own writer"),
        ({"difference": None}, ""),
    ],
)
def test_an_inconsistent_commit_is_refused(store, changes, found):
    remade(store, 7, **changes)
    if changes == {"difference": None}:  # the commit is for a whole version, the shares are not
        with pytest.raises(CorruptObjectError, match="is not in a file, but policy 7 is whole"):
            read_tensors(store, chain(store, 7)[-1])
        return
    with pytest.raises(CorruptObjectError, match=rf"policies/000007/policy\.json in .*{found}"):
        chain(store, 7)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("run.json", "its own writer"),
        (keys.policy_file(6, MADE, DIFFERENCE), "its own writer"),
        (keys.policy_file(7, MADE, "model.safetensors"), "only difference files"),
    ],
)
def test_objects_outside_the_version_are_refused(store, key, found):
    remade(store, 7, files=[asdict(read_version(store, 7).files[0]) | {"key": key}])
    with pytest.raises(CorruptObjectError, match=rf"policies/000007/policy\.json in .*{found}"):
        chain(store, 7)


def test_an_object_that_is_named_twice_is_refused(store):
    share = read_version(store, 7).tensors[0]
    remade(store, 7, tensors=file_list([share, share]))
    with pytest.raises(CorruptObjectError, match="named twice"):
        chain(store, 7)


def test_a_version_that_readers_would_refuse_is_not_committed(store):
    policy = written(store, 8, 1, True)
    with pytest.raises(CorruptObjectError, match="its own writer"):
        commit_version(store, policy, "ffffffff")
    with pytest.raises(CorruptObjectError, match="expected one from policy 7"):
        commit_version(store, replace(policy, difference=Difference(6, "0" * 64)), MADE)
    assert store.size(keys.policy(8)) is None


def with_share(store: MemoryStore, rank: int, **changes: object) -> PolicyVersion:
    """Return policy 7 with a changed share, after updating the share's digest in the commit."""
    key = keys.policy_share(7, MADE, rank)
    body = {**json.loads(store.objects[key]), **changes}
    body[CONTENT_SHA256] = content_digest(body)
    store.objects[key] = to_json(body)
    shares = [read_commit_file(store, keys.policy_share(7, MADE, r))[0] for r in (0, 1)]
    remade(store, 7, tensors=file_list(shares))
    return chain(store, 7)[-1]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tensors": []}, "the tensors in its shares have weights digest"),
        ({"tensors": [[*tensor("embed.weight", 5), None]]}, "tensor embed.weight is in two"),
        ({"tensors": [[*tensor("norm.weight", 6), None]]}, "tensors in its shares have weights"),
        ({"tensors": [[*tensor("norm.weight", 7), "x.safetensors"]]}, "is not a weights file of"),
        ({"tensors": [["norm.weight", "BF16", [4, -2], "0" * 64, None]]}, ">= 0"),
        ({"tensors": [["norm.weight", "BF16", [4, 2]]]}, "tensors"),
        ({"version": 6}, "a share of version 6, expected 7"),
        ({"attempt": "0123abce"}, "write id '0123abce'"),
        ({"files": [{"key": "run.json", "size": 1, "sha256": "0" * 64}]}, "not in the commit"),
    ],
)
def test_an_inconsistent_share_is_refused(store, changes, found):
    policy = with_share(store, 1, **changes)
    with pytest.raises(CorruptObjectError, match=rf"policies/000007/.*{found}"):
        read_tensors(store, policy)


@pytest.mark.parametrize(("rank", "listed"), [(1, True), (0, False)])
def test_a_file_that_two_shares_or_no_share_lists_is_refused(store, rank, listed):
    files = json.loads(store.objects[keys.policy_share(7, MADE, 0)])["files"]
    policy = with_share(store, rank, files=files if listed else [])
    with pytest.raises(CorruptObjectError, match=r"000007/policy\.json.*its shares list \["):
        read_tensors(store, policy)


def test_tensors_that_do_not_match_the_base_are_refused(store):
    """All digests match, because the forger recomputed them."""
    before, after = (read_tensors(store, read_version(store, v)) for v in (6, 7))
    policy = read_version(store, 7)
    odd = {
        "embed.weight is listed as unchanged": StoredTensor(tensor("embed.weight", 6), None),
        "in only one of this version": None,
        r"embed.weight is F16 \[4, 2\], expected BF16 \[4, 2\]": StoredTensor(
            tensor("embed.weight", 5)._replace(dtype="F16"), None
        ),
    }
    for text, stored in odd.items():
        tensors = {name: of for name, of in after.items() if name != "embed.weight"}
        if stored is not None:
            tensors["embed.weight"] = stored
        with pytest.raises(CorruptObjectError, match=rf"policies/000007/policy\.json.*{text}"):
            check_fits(store, policy, tensors, before)
