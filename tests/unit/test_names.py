"""Public names consist of terms of the glossary and of the field, with one word for each thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("pipeline", "operators", "retrace")
VOCABULARY = Path(__file__).with_name("vocabulary.txt")

ALIKE = {
    "__init__": "packages",
    "__main__": "programs",
    "base": "the interface of every backend of a package: store, launch",
    "check": "the command; the check of the inputs; the rules across settings",
    "checked": "inputs before a run; samples and their shard before they are written",
    "cluster": "the flow on Kubernetes; the installation's description of the cluster",
    "errors": "errors that end training; errors in a user's input",
    "exits": "exit codes; the exit code of each error",
    "export": "traces to arrays; a model to an HF folder",
    "fetch": "inputs, and a policy version, from a store into a folder",
    "keys": "names of settings; names of objects; one module per package defines them",
    "layout": "the rule about parallel sizes; the assignment of samples to ranks",
    "local": "the flow and the launcher on this machine",
    "pods": "the rule about a pod's GPUs; the state of a pod",
    "policies": "the commands; the policies that generated a trace",
    "problems": "problems with settings; problems with stored objects",
    "rows": "rows written; rows read",
    "tokenizer": "text to tokens before a run; tokens to text after it",
    "training": "parts of a training set: written, read, verified",
    "types": "the dataclasses of a package",
    "weights": "a policy's tensors: their digest; their names in HF files and in Megatron",
    "worker": "the program of a rollout worker; the program of a training rank",
}
"""The module names that several packages use, with their meaning in each package."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def public_names(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module, and of its functions, classes, fields and constants."""
    yield module
    for node in tree.body:
        yield from _bound(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                yield from _bound(inner)


def _bound(node: ast.stmt) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    yield from (name for name in names if not name.startswith("_"))


def words(name: str) -> set[str]:
    """Return the words of a name in lower case, without shape suffixes.

    'routes_TLK' -> routes; 'RankPosition' -> rank, position.
    """
    found = set()
    for part in re.split(r"[._]", name):
        if part.isupper() and len(part) <= 4 and not name.isupper():
            continue  # a shape: TLK, BN
        found.update(re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", part))
    return {word.lower() for word in found}


def known() -> set[str]:
    terms = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    lines = [line.partition("#")[0] for line in VOCABULARY.read_text().splitlines()]
    return {word.lower() for text in (*terms, *lines) for word in re.findall(r"[A-Za-z]+", text)}


def test_public_names_use_known_words():
    vocabulary = known()
    unknown = defaultdict(set)
    for module, tree in modules():
        for name in public_names(module, tree):
            for word in words(name) - vocabulary:
                unknown[word].add(name if name == module else f"{module}.{name}")
    assert not unknown, (
        "use a term of docs/glossary.md, or, for a word of the field, add it to "
        f"{VOCABULARY.name}: "
        + "; ".join(f"{word} ({', '.join(sorted(where)[:3])})" for word, where in unknown.items())
    )


def test_every_word_of_the_vocabulary_is_used():
    """An unused word must be removed from the list, so that the test notices a name that uses it
    again."""
    used = {
        word
        for module, tree in modules()
        for name in public_names(module, tree)
        for word in words(name)
    }
    listed = {
        word
        for line in VOCABULARY.read_text().splitlines()
        for word in re.findall(r"[a-z]+", line.partition("#")[0])
    }
    assert sorted(listed - used) == []


def test_no_two_public_classes_have_the_same_name():
    found = defaultdict(list)
    for module, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_module_names_that_several_packages_use_have_a_reason():
    found = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found[path.stem].append(str(path.relative_to(ROOT)))
    alike = {name: where for name, where in found.items() if len(where) > 1}
    assert set(alike) == set(ALIKE), {name: alike.get(name) for name in set(alike) ^ set(ALIKE)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("routes_TLK", {"routes"}),
        ("RankPosition", {"rank", "position"}),
        ("MOST_TOPK", {"most", "topk"}),
        ("S3Client", {"s", "client"}),
        ("pipeline.traces.write", {"pipeline", "traces", "write"}),
    ],
)
def test_a_name_is_split_into_words(name, expected):
    assert words(name) == expected
