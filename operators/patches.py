"""The check that every patch of a library makes before it replaces the library's code.

Each patch is one function, whose docstring gives the trigger, the symptom, and the reason why the
patch is safe. A patch first compares the installed source with the expected one. With a
different release of the library, the process fails when it starts, instead of patching unknown
code.
"""

import hashlib
import inspect
from collections.abc import Callable


class PatchError(Exception):
    """The installed code differs from the code for which the patch was written."""


def require_source(function: Callable[..., object], sha256: str, patch: str) -> None:
    """Check that a function's source is the one for which a patch was written.

    Args:
        function: The function to be patched.
        sha256: The expected SHA-256 of its source, or a prefix.
        patch: Name of the patch, for the error message.

    Raises:
        PatchError: The source differs; the message names the function and the patch that must be
            reviewed.
    """
    function = inspect.unwrap(function)
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[: len(sha256)]
    if found != sha256:
        raise PatchError(
            f"{function.__module__}.{function.__qualname__} has source {found}, but the patch "
            f"{patch} was written for {sha256}; install the pinned release (pyproject.toml), or "
            "review the new source, correct or remove the patch, and enter the new digest"
        )
