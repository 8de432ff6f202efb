"""Counts, on the CPU, where our own code would make a GPU and the CPU wait for each other."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from operators.training.batches import upload
from operators.training.megatron import schedules
from tests.paths import ROOT

_WAITS = [
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "masked_select",
    "__bool__",
    "__int__",
    "__float__",
]
_OURS = str(ROOT / "operators" / "training")


@dataclass
class Waits:
    """What a GPU would feel of our code; each key is a place in the code and a method."""

    in_pass: Counter[str] = field(default_factory=Counter)
    """Reads of device tensors during Megatron's forwards and backwards."""
    outside: Counter[str] = field(default_factory=Counter)
    """Reads before and after, such as one at the end of a pass."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Copies to the device."""
    passes: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Waits]:
    """Count the waits that operators.training itself causes, without those of torch and Megatron.

    Arrays that were never on the device count too, so our code avoids these methods for them.
    """
    waits, inside = Waits(), False

    def place() -> str | None:
        frame = sys._getframe(2)
        name = frame.f_code.co_filename
        if not name.startswith(_OURS):
            return None
        return f"{name[len(_OURS) + 1 :]}::{frame.f_code.co_name}"

    def counting(method: str) -> Any:
        original = getattr(torch.Tensor, method)

        def wrapped(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if (where := place()) is not None:
                (waits.in_pass if inside else waits.outside)[f"{where} {method}"] += 1
            return original(self, *arguments, **named)

        return wrapped

    def running(original: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            inside, waits.passes = True, waits.passes + 1
            try:
                return original(*arguments, **named)
            finally:
                inside = False

        return wrapped

    def uploading(original: Any) -> Any:
        def wrapped(array: Any, device: torch.device) -> torch.Tensor:
            waits.uploads[place() or "elsewhere"] += 1
            made: torch.Tensor = original(array, device)
            return made

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for method in _WAITS:
            patch.setattr(torch.Tensor, method, counting(method))
        patch.setattr(schedules, "_run", running(schedules._run))
        wrapped = uploading(upload.uploaded)
        for name, module in list(sys.modules.items()):
            if name.startswith("operators.training") and hasattr(module, "uploaded"):
                patch.setattr(module, "uploaded", wrapped)
        yield waits
