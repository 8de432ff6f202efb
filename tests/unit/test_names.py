"""A name means one thing: classes have different names, and modules too, but for a reason."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.paths import ROOT

PACKAGES = ("pipeline", "operators", "retrace")

ALIKE = {
    "__init__": "packages",
    "__main__": "programs",
    "base": "the interface of every backend of a package: store, launch",
    "check": "the command; the check of the inputs; the rules across settings",
    "cluster": "the flow on Kubernetes; the installation's description of the cluster",
    "errors": "errors that end training; errors in a user's input",
    "exits": "exit codes; the exit code of each error",
    "export": "traces to arrays; a model to an HF folder",
    "fetch": "inputs, and a policy version, from a store into a folder",
    "keys": "names of settings; names of objects; one module per package defines them",
    "layout": "the rule about parallel sizes; the assignment of samples to ranks",
    "local": "the flow and the launcher on this machine",
    "pods": "the rule about a pod's GPUs; the state of a pod",
    "problems": "problems with settings; problems with stored objects",
    "replay": "steps of a recorded set; the rule about replay settings",
    "routes": "routes in stored form; the engine's routes",
    "tokenizer": "text to tokens before a run; tokens to text after it",
    "trainer": "the trainer's routes written, and read; its settings",
    "traces": "the commands; the public functions",
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
