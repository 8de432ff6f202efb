"""Make a policy that differs from another one in some tensors, like a stored difference."""

import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

NAME = "model.safetensors"


def mixed_policy(
    folder: Path, policy: Path, other: Path, takes: Callable[[str], bool]
) -> tuple[Path, set[str]]:
    """Copy a policy, and replace some of its tensors with those of another policy.

    Args:
        folder: The folder of the copy.
        policy: The folder of the policy to copy.
        other: The folder of the policy from which tensors are taken.
        takes: Function that returns whether to take the tensor with a given name.

    Returns:
        The folder of the copy, and the names of the replaced tensors.
    """
    shutil.copytree(policy, folder)
    tensors, others = load_file(policy / NAME), load_file(other / NAME)
    changed = {name for name in tensors if takes(name)}
    assert changed
    save_file(tensors | {name: others[name] for name in changed}, folder / NAME, {"format": "pt"})
    return folder, changed
