"""Functions that users write in files: their parameters, and how they are loaded.

A setting names such a function as `path/to/file.py:function`, in place of the name of a built-in
function. Users' code runs only in workers, and in the processes of `pipeline.scoring`.
"""

import hashlib
import inspect
import linecache
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from pipeline.errors import LastingError

_FUNCTION_IN_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


class CustomError(LastingError):
    """A user's estimator or loss cannot be used; the message names the file and the function."""


@dataclass(frozen=True)
class CustomKind:
    """A kind of user-written function: its purpose and its parameters.

    Example: CustomKind('reward file', ('data_source', ...), True, ...).
    """

    file: str
    """The term for a file of this kind in messages."""
    parameters: tuple[str, ...]
    by_keyword: bool
    """Whether parameters are passed by keyword rather than by position."""
    rename: str
    """The fix, for messages, if the file's function has a different name."""
    runners: str
    """The processes that run the function, for messages."""
    supply: str = "put the code into the file, or install the package for the workers"
    """The fix, for messages, if the file imports a missing module."""
    error: type[LastingError] = CustomError

    def fits(self, signature: inspect.Signature) -> bool:
        """Return whether a function with this signature accepts the kind's parameters."""
        try:
            if self.by_keyword:
                signature.bind(**dict.fromkeys(self.parameters))
            else:
                signature.bind(*self.parameters)
        except TypeError:
            return False
        # A known name in another position shows that the parameters were swapped.
        return self.by_keyword or all(
            name == wanted or name not in self.parameters
            for name, wanted in zip(signature.parameters, self.parameters, strict=False)
        )


@dataclass(frozen=True)
class CustomFunction:
    """A function in a file. Example: CustomFunction('my/advantages.py', 'leave_one_out')."""

    path: str
    """A path on this machine, or a URI."""
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
"""The settings that may name a user's function, keyed by dotted key."""


def custom_function(value: str) -> CustomFunction | None:
    """Return the function that a setting names; None unless it has the form `file.py:function`."""
    found = _FUNCTION_IN_FILE.fullmatch(value)
    return None if found is None else CustomFunction(*found.groups())


def load_custom(
    content: bytes, name: str, kind: CustomKind, path: Path | None = None
) -> Callable[..., Any]:
    """Run a file and return its function `name`.

    Args:
        content: The file's content.
        name: The function's name.
        kind: The kind of function.
        path: The file on disk; None if the file is only in the store.

    Raises:
        LastingError: The file cannot be run, or lacks a function with this name and the kind's
            parameters. The error has the kind's class (`kind.error`).
    """
    module = _run(content, kind, path)
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
        return function  # a compiled function; only calling it shows whether it fits
    if not kind.fits(signature):
        raise kind.error(f"{kind.file}: {wrong_parameters(name, signature, kind)}")
    return function


def missing_function(functions: Sequence[str], name: str, kind: CustomKind) -> str:
    """Return the error text for a file that lacks the function `name`.

    Args:
        functions: Names of the file's functions.
        name: The expected name.
        kind: The kind of function.
    """
    found = f"functions {', '.join(functions)}" if functions else "no function"
    return f"found {found}, expected one named {name}; {kind.rename}"


def wrong_call(name: str, what: str, kind: CustomKind) -> str:
    """Return the error text for a `name` that is not a plain function.

    Args:
        name: The function's name.
        what: The problem as a predicate ("is async").
        kind: The kind of function.
    """
    return f"{name} {what}; expected a plain function {name}({', '.join(kind.parameters)})"


def wrong_parameters(name: str, signature: inspect.Signature, kind: CustomKind) -> str:
    """Return the error text for a function whose parameters differ from its kind's.

    Args:
        name: The function's name.
        signature: The signature found.
        kind: The kind of function.
    """
    if not kind.by_keyword:
        return (
            f"{name} has the parameters {signature}, but is called as "
            f"{name}({', '.join(kind.parameters)}); declare these "
            f"{len(kind.parameters)}, in this order"
        )
    call = ", ".join(f"{parameter}=" for parameter in kind.parameters)
    return (
        f"{name} has the parameters {signature}, but is called with {call}; use these names, with "
        "**kwargs for unused ones"
    )


def shown(value: Any, form: Callable[[Any], str] = repr) -> str:
    """Return a value from users' code as text; if this fails, return a text with its type."""
    try:
        return form(value)
    except Exception:  # noqa: BLE001 - from users' code, and from integers with too many digits
        return f"a {type(value).__name__} that cannot be shown"


def raised_at(error: BaseException) -> str:
    """Return the place in the user's files at which an exception was raised, as text.

    The text is empty if the exception was not raised in these files. Call this function in the
    module that runs the code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = {__file__, frames[0].filename}
    places = [frame for frame in frames if frame.filename not in ours]
    if not places:
        return ""
    first = places[0].filename  # not a path if the file is only in the store
    within = os.path.dirname(first) or first
    last = [one for one in places if one.filename.startswith(within)][-1]
    return f" ({Path(last.filename).name}, line {last.lineno})"


def is_absent_here(error: LastingError, variables: Collection[str]) -> bool:
    """Return whether `load_custom` failed because something that workers may have is missing here.

    This is a module, a library, a file, a server, a GPU or an environment variable.

    Args:
        error: The error, whose cause is the exception from users' code.
        variables: The variables that the code reads without a default and that workers may have.
    """
    cause = error.__cause__
    text = shown(cause, str)
    match cause:
        case ImportError():  # the code is not part of a package in the workers either
            return "relative import" not in text
        case KeyError(args=(str(name), *_)):
            return name in variables
    return isinstance(cause, OSError) or "CUDA" in text or "NVIDIA" in text


def from_sigterm(error: BaseException) -> bool:
    """Return whether a worker's SIGTERM handler raised an exception while users' code ran.

    Other exceptions, including users' own `sys.exit()`, are errors of users' code.
    """
    return isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM


def _run(content: bytes, kind: CustomKind, path: Path | None) -> types.ModuleType:
    digest = hashlib.sha256(content).hexdigest()
    module = types.ModuleType(f"retrace_{kind.file.replace(' ', '_')}_{digest[:16]}")
    module.__file__ = f"<{kind.file}>" if path is None else str(path)
    # Dataclasses look up their module by name, and tracebacks look up source lines.
    sys.modules[module.__name__] = module
    try:
        text = decode_source(content)
        linecache.cache[module.__file__] = (len(text), None, text.splitlines(True), module.__file__)
        exec(compile(content, module.__file__, "exec"), module.__dict__)
    except ModuleNotFoundError as error:
        raise kind.error(
            f"{kind.file}: it imports {error.name!r}, which is not installed; {kind.supply}"
        ) from error
    except BaseException as error:  # users' code may raise anything
        raise kind.error(
            f"{kind.file}: running it raised {type(error).__name__}: {shown(error, str)}"
            f"{raised_at(error)}"
        ) from error
    return module
