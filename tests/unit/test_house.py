"""Limits on the sizes of functions, modules and folders."""

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import chain

from tests.paths import ROOT

FUNCTION_LINES = 60
MODULE_LINES = 350
FOLDER_MODULES = 15
DESCRIBED = 2
"""The number of parameters that a public function may have without `Args:` in its docstring."""
PARAMETERS = 6
"""The maximum number of positional parameters, not counting `self`."""

MANY_PARAMETERS = {
    ("pipeline/traces/write/writer.py", "__init__"),
    ("pipeline/traces/write/writer.py", "write_shard"),
}
"""Public library functions; changing their signatures would break callers."""

MODULES = {
    str(path.relative_to(ROOT)): path.read_text()
    for package in ("retrace", "pipeline", "operators")
    for path in (ROOT / package).rglob("*.py")
}
FUNCTIONS = [
    (module, node)
    for module, text in MODULES.items()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]
"""Every function and method, including inner ones."""


def lines_of(tree: ast.AST, text_lines: int) -> int:
    """Return the number of lines of a module or function, without its docstrings."""
    return text_lines - sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def undescribed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function with more than two parameters lacks `Args:` in its docstring."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [argument.arg for argument in named if argument.arg not in ("self", "cls")]
    return len(names) > DESCRIBED and "\n    Args:\n" not in _indented(function)


def _indented(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return "\n    ".join((ast.get_docstring(function) or "").split("\n")) + "\n"


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a module's public functions and the public methods of its public classes."""
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
    for node in chain(tree.body, *(of.body for of in classes)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            yield node


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_modules_are_short():
    lines = {m: lines_of(ast.parse(text), len(text.splitlines())) for m, text in MODULES.items()}
    assert {module: n for module, n in lines.items() if n > MODULE_LINES} == {}


def test_functions_are_short():
    lines = [(m, f.name, lines_of(f, (f.end_lineno or 0) - f.lineno + 1)) for m, f in FUNCTIONS]
    assert [found for found in lines if found[2] > FUNCTION_LINES] == []


def test_functions_have_few_positional_parameters():
    """Functions that need more belong to a class. Each exception must still be necessary."""
    many = {(module, f.name) for module, f in FUNCTIONS if positional(f) > PARAMETERS}
    assert many == MANY_PARAMETERS


def test_folders_have_few_modules():
    """Larger folders are split by the data that flows through them."""
    modules = Counter(m.rpartition("/")[0] for m in MODULES if not m.endswith("__init__.py"))
    assert {folder: n for folder, n in modules.items() if n > FOLDER_MODULES} == {}


def test_public_functions_describe_their_parameters():
    """Commands are an exception, because the docstring of a command is its help text, and the help
    lists the options separately."""
    missing = [
        (module, function.name)
        for module, text in MODULES.items()
        if not module.startswith("pipeline/cli/")
        for function in public_functions(ast.parse(text))
        if undescribed(function)
    ]
    assert missing == []
