"""Checks of users' files (rewards, estimators, losses) that read only the files' syntax trees.

Users' code runs only in workers. `retrace check` and the flow, which hold credentials for the store
and for Prefect, only read the code. They refuse code that is certainly invalid, and report a note
if only running the code could reveal an error.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pipeline.errors import LastingError
from pipeline.rl.custom import CustomKind, missing_function, wrong_call, wrong_parameters

_BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With, ast.For, ast.While, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_NO_FUNCTIONS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
_UNSEEN = {"exec", "globals", "vars", "setattr", "locals"}
"""Functions whose calls may create names that do not appear in the file's text."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_source(
    content: bytes, label: str, name: str, kind: CustomKind, beside: Collection[str] = ()
) -> list[str]:
    """Check that a file contains the function `name` with the parameters of its kind.

    The file is not run.

    Args:
        content: The file's content.
        label: The text that names the file at the start of notes and errors.
        name: The function's name.
        kind: The kind of function.
        beside: Names of the modules that are staged with the file.

    Returns:
        Notes on properties that are unknown until workers run the file.

    Raises:
        LastingError: The file is certainly invalid. The error has the kind's class (`kind.error`).
    """
    try:
        tree = ast.parse(content, label)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise kind.error(f"{label}: syntax error: {error}; fix it") from error
    notes = _Source(tree, label, name, kind).check(name)
    return [
        *notes,
        *_import_notes(tree, label, kind, beside),
        *(f"{label}: {text}" for text in _place_notes(tree)),
    ]


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


@dataclass(frozen=True)
class _Source:
    """The syntax tree of a file, and the function to find in it."""

    tree: ast.Module
    label: str
    wanted: str
    kind: CustomKind

    def check(self, name: str) -> list[str]:
        """Check the last binding of `name` in the module, and return notes on it.

        `name` is the required function's name. If the module assigns a different function to this
        name, for example with `required = other`, the method calls itself with the other name.
        """
        bindings = [
            (node, sure) for node, sure in _statements(self.tree.body) if name in _bound(node)
        ]
        if not bindings:
            if _may_make_names(self.tree):
                return [self._unknown("it is created while the file runs")]
            raise self._wrong(missing_function(_functions(self.tree), self.wanted, self.kind))
        node, sure = bindings[-1]
        try:
            return self._check_bound(node, name)
        except LastingError:
            if sure:
                raise
            return [self._unknown("its definition depends on a condition")]

    def _check_bound(self, node: ast.stmt, name: str) -> list[str]:
        if isinstance(node, Function):
            if node.decorator_list:
                return [self._unknown("it is decorated")]
            if isinstance(node, ast.AsyncFunctionDef):
                raise self._wrong(wrong_call(self.wanted, "is async", self.kind))
            self._check_parameters(node.args)
            return []
        if isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.ImportFrom) and not node.level:
                return [self._unknown(f"it is imported from {node.module}")]
            what = "is a module" if isinstance(node, ast.Import) else "comes from a relative import"
            raise self._wrong(wrong_call(self.wanted, what, self.kind))
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Lambda):
            self._check_parameters(value.args)
            return []
        if isinstance(value, ast.Name) and name == self.wanted != value.id:
            return self.check(value.id)
        if isinstance(value, _NO_FUNCTIONS):
            raise self._wrong(wrong_call(self.wanted, f"is {ast.unparse(value)}", self.kind))
        return [self._unknown("it is not written as a function")]

    def _check_parameters(self, found: ast.arguments) -> None:
        signature = _signature(found)
        if not self.kind.fits(signature):
            raise self._wrong(wrong_parameters(self.wanted, signature, self.kind))

    def _wrong(self, text: str) -> LastingError:
        return self.kind.error(f"{self.label}: {text}")

    def _unknown(self, why: str) -> str:
        return (
            f"{self.label}: whether {self.wanted} takes {', '.join(self.kind.parameters)} is "
            f"unknown until the {self.kind.runners} run the file: {why}"
        )


class _Shown:
    """A placeholder for a default value, shown as `...`."""

    def __repr__(self) -> str:
        return "..."


def _signature(found: ast.arguments) -> inspect.Signature:
    """Return the signature of a function in a syntax tree, with placeholders for defaults."""
    kinds = inspect.Parameter
    positional = [*found.posonlyargs, *found.args]
    without = len(positional) - len(found.defaults)
    parameters = [
        kinds(
            argument.arg,
            kinds.POSITIONAL_ONLY
            if index < len(found.posonlyargs)
            else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if index < without else _Shown(),
        )
        for index, argument in enumerate(positional)
    ]
    if found.vararg:
        parameters.append(kinds(found.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        value = kinds.empty if default is None else _Shown()
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=value))
    if found.kwarg:
        parameters.append(kinds(found.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _statements(body: Sequence[ast.stmt], sure: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield each module-level statement in order, and whether the statement certainly runs."""
    for node in body:
        yield node, sure
        if isinstance(node, _BLOCKS):
            for inner in ast.iter_child_nodes(node):
                if isinstance(inner, ast.stmt):
                    yield from _statements([inner], False)
                elif isinstance(inner, ast.ExceptHandler | ast.match_case):
                    yield from _statements(inner.body, False)


def _bound(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds, except those bound in its blocks or functions."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {
        inner.id
        for inner in _own_nodes(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, (*_SCOPES, ast.stmt)):
            yield from _own_nodes(inner)


def _functions(tree: ast.Module) -> list[str]:
    return sorted(node.name for node, _ in _statements(tree.body) if isinstance(node, Function))


def _may_make_names(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return True
        if isinstance(node, ast.Global):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in _UNSEEN:
            return True
    return False


def _import_notes(
    tree: ast.Module, label: str, kind: CustomKind, beside: Collection[str]
) -> Iterator[str]:
    """Yield notes on packages that the file certainly imports but that are not installed here."""
    for node, sure in _statements(tree.body):
        found = _imported(node) if sure else []
        for package in {name.partition(".")[0] for name in found} - set(beside):
            if not is_installed(package):
                yield (
                    f"{label}: it imports {package!r}, which is not installed here, but the "
                    f"{kind.runners} need it; {kind.supply}"
                )


def _place_notes(tree: ast.Module) -> Iterator[str]:
    """Yield notes on relative imports and on files that are opened by a relative path."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=level, module=module) if level:
                name = module or ", ".join(alias.name for alias in node.names)
                yield (
                    f"line {node.lineno}: the relative import of {name} fails, because the file "
                    "is not run as part of a package; import the module without a dot"
                )
            case ast.Call(func=ast.Name(id="open"), args=[ast.Constant(value=str(path)), *_]):
                if path and not path.startswith(("/", "~")):
                    yield (
                        f"line {node.lineno}: {path!r} is opened relative to the working "
                        "directory, which is not this file's folder where the file runs; write "
                        f"Path(__file__).parent / {path!r}"
                    )


def is_installed(package: str) -> bool:
    """Return whether this process could import a package, without importing it."""
    return package in sys.modules or importlib.util.find_spec(package) is not None
