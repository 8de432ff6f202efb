"""Compare stubs with an installed library: `python -m tests.unit.operators.stubs vllm`.

The program prints each name that is in the stubs but not in the library. It is a separate
program because importing vLLM or Megatron-core would affect other tests in the same process.
"""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from operators.rollout.vllm_environment import prepare_environment
from tests.paths import ROOT

STUBS = ROOT / "operators/stubs"


def differences(library: str) -> Iterator[str]:
    """Yield the names and function parameters that exist only in the stubs."""
    for path in sorted((STUBS / library).rglob("*.pyi")):
        name = ".".join(path.relative_to(STUBS).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        for node in ast.parse(path.read_text()).body:
            yield from _differences(module, node)


def _differences(module: ModuleType, node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.ImportFrom(names=names):  # `X as X`: the module re-exports X
            wanted = [alias.name for alias in names if alias.asname]
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            wanted = [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            wanted = [name]
        case _:
            wanted = []  # an alias or a type variable in the stub
    if isinstance(node, ast.ClassDef) and _is_protocol(node):
        return
    for name in wanted:
        if not hasattr(module, name):
            yield f"{module.__name__}.{name}"
        elif isinstance(node, ast.ClassDef):
            yield from _members(getattr(module, name), node)
        elif isinstance(node, ast.FunctionDef):
            yield from _parameters(f"{module.__name__}.{name}", getattr(module, name), node)


def _members(found: type, node: ast.ClassDef) -> Iterator[str]:
    """Yield the members of a stub's class that the library's class lacks.

    An attribute counts as present if its name is in the source of the class or of a base class.
    """
    bases = [base for base in found.__mro__ if base is not object]
    source = "\n".join(_source(base) for base in bases)
    where = f"{found.__module__}.{found.__qualname__}"
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            if not hasattr(found, member.name):
                yield f"{where}.{member.name}"
            elif not any(isinstance(d, ast.Name) for d in member.decorator_list):  # property
                method = getattr(found, member.name)
                yield from _parameters(f"{where}.{member.name}", method, member)
        elif isinstance(member, ast.AnnAssign | ast.Assign):
            target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
            name = ast.unparse(target)
            if not hasattr(found, name) and not re.search(rf"\b{name}\b", source):
                yield f"{where}.{name}"


def _source(found: type) -> str:
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):  # written in C
        return ""


def _parameters(where: str, found: Any, node: ast.FunctionDef) -> Iterator[str]:
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for argument in (*node.args.args, *node.args.kwonlyargs):
        if argument.arg not in parameters:
            yield f"{where}({argument.arg})"


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "Protocol" for base in node.bases)


if __name__ == "__main__":
    prepare_environment(enforce_eager=True)
    sys.stdout.writelines(f"{line}\n" for line in differences(sys.argv[1]))
