"""What a Python file uses, according to its text; the file is not run.

Whether the file is valid is not decided here, but by loading it (`pipeline.scoring.trial`).
"""

import ast
import importlib.util
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Uses:
    """What a Python file uses, according to its text. Example: Uses({'numpy'}, ...)."""

    modules: frozenset[str]
    """The first part of the name of each module that the code imports by a constant name."""
    texts: frozenset[str]
    """All text constants if the code reads `__file__`, otherwise none."""
    variables: frozenset[str]
    """The environment variables that the code reads."""
    required: frozenset[str]
    """The environment variables that the code reads without a default."""


def uses_of(content: bytes) -> Uses:
    """Return what a Python file uses; nothing if its syntax is invalid."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        nodes = []
    places = any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes)
    modules = {name.partition(".")[0] for node in nodes for name in _imported(node)}
    texts = {
        node.value
        for node in nodes
        if places and isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    read = [found for node in nodes if (found := _variable(node)) is not None]
    return Uses(
        frozenset(modules),
        frozenset(texts),
        frozenset(name for name, _ in read),
        frozenset(name for name, required in read if required),
    )


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that a node imports, except relative ones."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(func=called, args=[ast.Constant(value=str(name)), *_]):
            if _ends(called, "import_module") or _ends(called, "__import__"):
                return [] if name.startswith(".") else [name]
    return []


def _variable(node: ast.AST) -> tuple[str, bool] | None:
    """Return the environment variable that an expression reads, and whether it has no default."""
    match node:
        case ast.Subscript(value=place, slice=ast.Constant(value=str(name)), ctx=ast.Load()):
            return (name, True) if _ends(place, "environ") else None
        case ast.Call(func=called, args=[ast.Constant(value=str(name)), *more]):
            if isinstance(called, ast.Attribute) and called.attr == "get":
                found = _ends(called.value, "environ")
            else:
                found = _ends(called, "getenv")
            return (name, not more and not node.keywords) if found else None
    return None


def _ends(node: ast.AST, name: str) -> bool:
    """Return whether an expression is `name` or an attribute `name`, such as os.environ."""
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def is_installed(package: str) -> bool:
    """Return whether this process could import a package, without importing it."""
    return package in sys.modules or importlib.util.find_spec(package) is not None
