"""Change one expression of the algorithms at a time, and report the changes that no unit test sees.

    python -m tests.mutation                          200 changes, half in each folder
    python -m tests.mutation --count 40 --seed 7      40 other changes
    python -m tests.mutation --only passes/samples    all changes of the modules that match

Each changed module (a mutant) is loaded in a forked process, which runs the unit tests of both
folders. The libraries are imported before the fork, so a mutant takes seconds. A mutant is dead if
a test fails, live if all tests pass. EQUIVALENT lists changes that cannot change a result.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import itertools
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from tests.exhaustive import VARIABLE
from tests.paths import ROOT

FOLDERS = {
    "operators/training/passes": ("tests/unit/operators/training/passes", "tests/unit/rl"),
    "pipeline/rl": ("tests/unit/rl", "tests/unit/operators/training/passes"),
}
"""The folders to change, and the tests that should notice, the most likely ones first."""

LIBRARIES = ("numpy", "torch", "torch.distributed", "torch.profiler", "transformers", "hypothesis",
             "hypothesis.strategies", "pyarrow.parquet", "pydantic", "yaml",
             "megatron.core.optimizer", "megatron.core.models.gpt")  # fmt: skip
"""Imported once, before the forks. None of them imports Retrace."""

MOST_LIVE = 0.05
LIMIT_S = 600
"""A mutant that runs longer than this hangs, which a person would notice: it counts as dead."""

_PASSES, _SAME = "operators/training/passes", "has two dimensions, so -1 and 1 are the same one"
EQUIVALENT: dict[str, str] = {
    f"{_PASSES}/logprobs.py: logp_CV.scatter_add_(-1, local_T[chunk, None], at_label_C[:, None])"
    "  ->  logp_CV.scatter_add_(1, local_T[chunk, None], at_label_C[:, None])": f"logp_CV {_SAME}",
    f"{_PASSES}/logprobs.py: largest_C = x_CV.max(dim=-1).values  ->  "
    "largest_C = x_CV.max(dim=1).values": f"x_CV {_SAME}",
    f"{_PASSES}/totals.py: sums += torch.tensor(of_sample, dtype=torch.float64, device=sums.device)"
    "  ->  sums += torch.tensor(of_sample, dtype=torch.float64)": "the CPU is the default device",
    f"{_PASSES}/logprobs.py: logprobs_T, log_z_T, entropy_T = (torch.empty(len(labels_T), "
    "device=hidden_TH.device) for _ in range(3))  ->  logprobs_T, log_z_T, entropy_T = "
    "(torch.empty(len(labels_T)) for _ in range(3))": "the CPU is the default device",
    f"{_PASSES}/corrected.py: return {{id: np.nan_to_num(of_G, nan=0.0, posinf=0.0, neginf=0.0) "
    "for id, of_G in logprobs.items()}  ->  return {id: np.nan_to_num(of_G, posinf=0.0, "
    "neginf=0.0) for id, of_G in logprobs.items()}": "numpy's default for nan is 0.0",
    f"{_PASSES}/critic_passes.py: critic.model.optimizer.zero_grad()  ->  None": "it frees memory: "
    "training_pass sets the gradient buffers to 0, and prepare_grads replaces the gradients",
    "pipeline/rl/losses/formulas.py: rising_T = (kl_T <= settings.clip_high) | (new_T <= old_T)"
    "  ->  rising_T = (kl_T <= settings.clip_high) | (new_T < old_T)": "kl_T is 0 "
    "where new_T is old_T",
}
"""Changes that cannot change a result, as printed, each with the reason."""

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "sum": "mean", "mean": "sum",
          "maximum": "minimum", "minimum": "maximum"}  # fmt: skip
_KEPT_OUT = ("detach", "clone", "copy")
"""Methods whose calls are left out: `x.detach()` becomes `x`."""


@dataclass(frozen=True)
class Mutant:
    """A changed module. Example: Mutant('pipeline.rl.moments', <tree>, 'a + b  ->  a - b')."""

    module: str
    tree: ast.Module
    shown: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield every change of a module."""
    name = str(path.relative_to(ROOT))
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    original = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(original) if hasattr(node, "lineno")]
    places = {id(node): index for index, node in enumerate(nodes)}
    for statement in _statements(original):
        for node in _expressions(statement):
            for change in _changes(node):
                tree = copy.deepcopy(original)
                copied = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
                change(copied[places[id(node)]])
                before, after = ast.unparse(statement), ast.unparse(copied[places[id(statement)]])
                if before != after:
                    shown = f"{name}: {_short(before, after)}"
                    yield Mutant(module, ast.fix_missing_locations(tree), shown)


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that compute something: no definitions, imports or raised errors."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(
            node,
            ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Raise | ast.Assert
            | ast.With | ast.For | ast.While | ast.Try,
        ):  # fmt: skip
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        yield node


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and its expressions, without annotations, texts and inner statements."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        yield node
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                texts = isinstance(child, ast.JoinedStr) or (
                    isinstance(child, ast.Constant) and isinstance(child.value, str)
                )
                if (
                    isinstance(child, ast.expr | ast.keyword)
                    and field != "annotation"
                    and not texts
                ):
                    waiting.append(child)


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            yield lambda n: setattr(n, "ops", [_COMPARED[type(op)]()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _COMPUTED:
            yield lambda n: setattr(n, "op", _COMPUTED[type(op)]())
        case ast.BoolOp(op=op):
            yield lambda n: setattr(n, "op", ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield lambda n: _become(n, n.operand)  # type: ignore[attr-defined]
        case ast.Constant(value=bool() as value):
            yield lambda n: setattr(n, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield lambda n: setattr(n, "value", value + 1)
        case ast.IfExp():
            yield lambda n: _swap(n, "body", "orelse")
        case ast.If():
            yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))  # type: ignore[attr-defined]
        case ast.Expr(value=ast.Call()):
            yield lambda n: setattr(n, "value", ast.Constant(None))
        case ast.Call():
            yield from _changes_of_call(node)


def _changes_of_call(call: ast.Call) -> Iterator[Callable[[ast.AST], None]]:
    function = call.func
    field = {ast.Name: "id", ast.Attribute: "attr"}.get(type(function))
    name = None if field is None else getattr(function, field)
    if name in _NAMES:
        yield lambda n: setattr(n.func, field, _NAMES[name])  # type: ignore[attr-defined]
    if isinstance(function, ast.Attribute) and name in _KEPT_OUT:
        yield lambda n: _become(n, n.func.value)  # type: ignore[attr-defined]
    for index, pair in enumerate(itertools.pairwise(call.args)):
        if _alike(*pair):
            yield lambda n, i=index: n.args.insert(i, n.args.pop(i + 1))
    named = [keyword for keyword in call.keywords if keyword.arg not in (None, "strict")]
    for one, other in itertools.pairwise(named):
        if _alike(one.value, other.value):
            i, j = call.keywords.index(one), call.keywords.index(other)
            yield lambda n, i=i, j=j: _swap_values(n.keywords[i], n.keywords[j])
    if name is not None and not name[0].isupper():  # a class needs all its fields
        for index, keyword in enumerate(call.keywords):
            if keyword in named:
                yield lambda n, i=index: n.keywords.pop(i)


def _alike(one: ast.expr, other: ast.expr) -> bool:
    """Return whether two arguments may have the same type: their names have the same ending."""
    endings = [
        re.search(r"(_[A-Z]\w*|\.\w+)\)*$", ast.unparse(argument)) for argument in (one, other)
    ]
    first, second = (ending and ending[1] for ending in endings)
    both = isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute)
    return (first is not None and first == second) or (
        both and ast.unparse(one.value) == ast.unparse(other.value)
    )


def _swap_values(one: ast.keyword, other: ast.keyword) -> None:
    one.value, other.value = other.value, one.value


def _become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__  # type: ignore[assignment]
    node.__dict__.clear()
    node.__dict__.update(other.__dict__)


def _swap(node: ast.AST, one: str, other: str) -> None:
    kept = getattr(node, one)
    setattr(node, one, getattr(node, other))
    setattr(node, other, kept)


def _short(before: str, after: str) -> str:
    """Return the first line that differs, before and after the change."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), (before, after))
    return f"{one.strip()}  ->  {other.strip()}"


def chosen(count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, half of them from each folder."""
    found: list[Mutant] = []
    for folder in FOLDERS:
        of_folder = [m for path in _modules(folder) for m in mutants_of(path)]
        found += random.Random(seed).sample(of_folder, min(count // 2, len(of_folder)))
    return found


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


class _Changed:
    """Finds the changed module before the usual finders do."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        file = ROOT / (name.replace(".", "/") + ".py")
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        return importlib.util.spec_from_file_location(name, file, loader=self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree, str(module.__file__), "exec"), module.__dict__)


def _tests_pass(mutant: Mutant | None) -> bool:
    """Run the tests in this process."""
    folder = "pipeline/rl" if mutant is None else mutant.module.replace(".", "/")
    if mutant is not None:
        sys.meta_path.insert(0, _Changed(mutant))  # type: ignore[arg-type]
    tests = next(paths for start, paths in FOLDERS.items() if folder.startswith(start))
    options = ("-x", "-q", "-n0", "-m", "not integration", "-p", "no:cacheprovider")
    return pytest.main([*options, *tests]) == pytest.ExitCode.OK


def _forked(mutant: Mutant | None) -> int:
    """Start the tests in a forked process, and return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 2
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        code = 0 if _tests_pass(mutant) else 1
    finally:
        os._exit(code)


def live(mutants: list[Mutant], at_once: int) -> list[Mutant]:
    """Run the tests against each mutant, `at_once` at a time; return those that all tests pass."""
    waiting, found = list(mutants), []
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            mutant = waiting.pop(0)
            running[_forked(mutant)] = (mutant, time.monotonic())
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            mutant, _ = running.pop(child)
            passed = os.waitstatus_to_exitcode(status) == 0
            done = len(mutants) - len(waiting) - len(running)
            print(
                f"{done}/{len(mutants)} {'LIVE' if passed else 'dead'} {mutant.shown}", flush=True
            )
            found += [mutant] * passed
            continue
        for child, (_, start) in running.items():
            if time.monotonic() - start > LIMIT_S:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, 9)
        time.sleep(0.05)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--only", help="all changes of the modules whose paths contain this text")
    parser.add_argument("--list", action="store_true", help="print the changes, run nothing")
    arguments = parser.parse_args()
    mutants = chosen(arguments.count, arguments.seed)
    if arguments.only:
        paths = (p for folder in FOLDERS for p in _modules(folder) if arguments.only in str(p))
        mutants = [mutant for path in paths for mutant in mutants_of(path)]
    mutants = [mutant for mutant in mutants if mutant.shown not in EQUIVALENT]
    if arguments.list:
        print("\n".join(mutant.shown for mutant in mutants))
        return
    os.environ.pop(VARIABLE, None)  # the sample of each test is enough
    for library in LIBRARIES:
        importlib.import_module(library)
    if os.waitstatus_to_exitcode(os.waitpid(_forked(None), 0)[1]) != 0:
        sys.exit("the tests fail without any change; run them first: make test-unit")
    survivors = live(mutants, os.cpu_count() or 1)
    print(f"{len(survivors)} of {len(mutants)} changes were not noticed (at most {MOST_LIVE:.0%}):")
    print("\n".join(f"  {mutant.shown}" for mutant in survivors))
    sys.exit(len(survivors) > MOST_LIVE * len(mutants))


if __name__ == "__main__":
    main()
