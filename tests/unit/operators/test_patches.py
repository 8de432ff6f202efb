"""The refusal of unknown source code by patches."""

import hashlib
import inspect

import pytest

from operators import patches


def test_a_patch_refuses_unknown_source():
    """With a different release of a patched library, the error names the function to review."""

    def function():
        return 1

    known = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    patches.require_source(function, known, "some_patch")
    with pytest.raises(patches.PatchError, match=r"function.*some_patch.*0000") as error:
        patches.require_source(function, "0" * 16, "some_patch")
    assert known in str(error.value)
