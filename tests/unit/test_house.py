"""How large functions, modules and folders may grow before they have to be cut."""

import ast
from collections import Counter

from tests.paths import ROOT

FUNCTION_LINES = 60
MODULE_LINES = 350
FOLDER_MODULES = 15
PARAMETERS = 6
"""That may be given by position, `self` not counted."""

MANY_PARAMETERS = {
    ("pipeline/traces/write/writer.py", "__init__"),
    ("pipeline/traces/write/writer.py", "write_shard"),
}
"""Their signatures are the library's, which other programs call."""

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
"""Every function and method, inner ones too."""


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From `def` to the last statement, with the docstring."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_modules_are_short():
    lines = {module: len(text.splitlines()) for module, text in MODULES.items()}
    assert {module: n for module, n in lines.items() if n > MODULE_LINES} == {}


def test_functions_are_short():
    lines = [(module, f.name, lines_of(f)) for module, f in FUNCTIONS]
    assert [found for found in lines if found[2] > FUNCTION_LINES] == []


def test_functions_take_few_arguments_by_position():
    """An object owns what more of them would need. The exceptions still are some."""
    many = {(module, f.name) for module, f in FUNCTIONS if positional(f) > PARAMETERS}
    assert many == MANY_PARAMETERS


def test_folders_hold_few_modules():
    """Larger ones are cut by what flows through them."""
    modules = Counter(m.rpartition("/")[0] for m in MODULES if not m.endswith("__init__.py"))
    assert {folder: n for folder, n in modules.items() if n > FOLDER_MODULES} == {}
