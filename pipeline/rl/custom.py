"""Functions that users write, each from one self-contained file: how they are called and loaded.

A setting names one as `path/to/file.py:function` in place of a name of its table. Users' code runs
where it is needed, in workers; `custom_source` judges a file by its text.
"""

import hashlib
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from typing import Any

from pipeline.errors import LastingError

_FUNCTION_IN_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


class CustomError(LastingError):
    """A user's estimator or loss cannot be used; the text names the file and the function."""


@dataclass(frozen=True)
class CustomKind:
    """What a function of users is for, and how it is called.

    Example: CustomKind('reward file', ('data_source', ...), True, ...).
    """

    file: str
    """What its file is called."""
    parameters: tuple[str, ...]
    by_keyword: bool
    """How they are passed; False: by position."""
    rename: str
    """The fix for a file whose function has another name."""
    runners: str
    """Who runs it."""
    error: type[LastingError] = CustomError

    def fits(self, signature: inspect.Signature) -> bool:
        """Whether a function of this signature can be called."""
        try:
            if self.by_keyword:
                signature.bind(**dict.fromkeys(self.parameters))
            else:
                signature.bind(*self.parameters)
        except TypeError:
            return False
        return True


@dataclass(frozen=True)
class CustomFunction:
    """A function in a file. Example: CustomFunction('my/advantages.py', 'leave_one_out')."""

    path: str
    """A path of this machine, or a URI."""
    name: str


ESTIMATOR = CustomKind(
    file="estimator file",
    parameters=("rollouts", "settings"),
    by_keyword=False,
    rename="rename it, or change algorithm.adv_estimator",
    runners="training ranks",
)
LOSS = CustomKind(
    file="loss file",
    parameters=("tokens", "settings"),
    by_keyword=False,
    rename="rename it, or change actor_rollout_ref.actor.policy_loss.loss_mode",
    runners="training ranks",
)
CUSTOM: Mapping[str, CustomKind] = {
    "algorithm.adv_estimator": ESTIMATOR,
    "actor_rollout_ref.actor.policy_loss.loss_mode": LOSS,
}
"""The settings that may name a user's function, by dotted key."""


def custom_function(value: str) -> CustomFunction | None:
    """The function that a setting names; None: the value is not of the form `file.py:function`."""
    found = _FUNCTION_IN_FILE.fullmatch(value)
    return None if found is None else CustomFunction(*found.groups())


def load_custom(content: bytes, name: str, kind: CustomKind) -> Callable[..., Any]:
    """Run a file and return its function `name`.

    The file must be self-contained: its folder is not searched for other modules. Raises the kind's
    error when it cannot be run, or has no such function that can be called as its kind is.
    """
    module = _run(content, kind)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        found = sorted(
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise kind.error(f"{kind.file}: {missing_function(found, name, kind)}")
    if inspect.iscoroutinefunction(function):
        raise kind.error(f"{kind.file}: {wrong_call(name, 'is async', kind)}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # of a compiled function: calling it will show
    if not kind.fits(signature):
        raise kind.error(f"{kind.file}: {wrong_parameters(name, signature, kind)}")
    return function


def missing_function(functions: Sequence[str], name: str, kind: CustomKind) -> str:
    """Say that a file lacks the function `name`, and which it has."""
    found = f"functions {', '.join(functions)}" if functions else "no function"
    return f"found {found}, expected one named {name}; {kind.rename}"


def wrong_call(name: str, what: str, kind: CustomKind) -> str:
    """Say that what a file calls `name` cannot be called."""
    return f"{name} {what}; expected a plain function {name}({', '.join(kind.parameters)})"


def wrong_parameters(name: str, signature: inspect.Signature, kind: CustomKind) -> str:
    """Say that a file's function has other parameters than it is called with."""
    if not kind.by_keyword:
        return (
            f"{name} has the parameters {signature}, but is called as "
            f"{name}({', '.join(kind.parameters)}); take these {len(kind.parameters)}"
        )
    call = ", ".join(f"{parameter}=" for parameter in kind.parameters)
    return (
        f"{name} has the parameters {signature}, but is called with {call}; name them so, with "
        "**kwargs for those that it does not use"
    )


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """What users' code made, as text; if it has none, its type."""
    try:
        return form(value)
    except Exception:  # noqa: BLE001 - of users' code, and integers of too many digits
        return f"a {type(value).__name__} that cannot be shown"


def _run(content: bytes, kind: CustomKind) -> types.ModuleType:
    digest = hashlib.sha256(content).hexdigest()
    module = types.ModuleType(f"retrace_{kind.file.replace(' ', '_')}_{digest[:16]}")
    module.__file__ = f"<{kind.file}>"
    # Dataclasses look up their module by name, and tracebacks look up source lines.
    sys.modules[module.__name__] = module
    try:
        text = decode_source(content)
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
        exec(compile(content, module.__file__, "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        raise kind.error(
            f"{kind.file}: it imports {error.name!r}, which is not installed; a {kind.file} must "
            "be self-contained: put the code into it, or install the package for the workers"
        ) from error
    except BaseException as error:  # users' code may raise anything
        raise kind.error(
            f"{kind.file}: running it raised {type(error).__name__}: {error}; it must run by itself"
        ) from error
    return module
