"""Ranks wait for each other in a pass or for the store, but never for both at the same time."""

import ast
from collections.abc import Iterator

from tests.paths import ROOT

TRAINING = ROOT / "operators/training"
SLOW = {
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
}
"""Collectives in which ranks wait for each other or exchange results rather than compute."""
OF_A_PASS = {
    "megatron/weights.py": "names of weights, from a folder that every rank has",
    "passes/corrected.py": "sums of a pass, over its own group",
}
"""Modules that call one of these collectives with their own group. The values describe the data
that is exchanged. No rank waits for the store to obtain this data."""


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the function and the source of each call of these collectives."""
    for path in sorted(TRAINING.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in SLOW:
                yield path.relative_to(TRAINING).as_posix(), node.func.attr, ast.unparse(node)


def test_only_agree_waits_as_long_as_the_store_may_take():
    """The groups used in passes time out after launch.step_timeout_s, and NCCL then ends the
    process."""
    found = list(calls())
    assert {module for module, _, _ in found} == {"agree.py", *OF_A_PASS}, found
    ours = [call for module, _, call in found if module == "agree.py"]
    assert len(ours) == 3
    assert all("_group)" in call for call in ours), ours
