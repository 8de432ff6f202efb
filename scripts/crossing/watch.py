"""The profiler that each process of the run installs (`sitecustomize` of scripts.crossing)."""

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

FOLDER = "RETRACE_CROSSING"
"""The environment variable that names the folder for the results."""
_FORMS = {"Finished", "Sample", "Routes", "Part", "MicroBatch", "Replayer"}
"""The classes whose objects carry a sample."""
_ROOMS = ("pipeline.", "operators.", "retrace.")
_ENOUGH = 50
"""How many calls of a function are looked at."""

_calls: Counter[CodeType] = Counter()
_modules: set[str] = set()


def begin() -> None:
    """Watch the calls of all threads of this process from now on."""
    if FOLDER in os.environ:
        threading.setprofile(_look)
        sys.setprofile(_look)


def _look(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event != "call" or _calls[code] >= _ENOUGH:
        return
    module = frame.f_globals.get("__name__", "")
    if not module.startswith(_ROOMS):
        _calls[code] = _ENOUGH
        return
    _calls[code] += 1
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if module not in _modules and any(map(_carries, map(frame.f_locals.get, names))):
        _modules.add(module)
        program = "-".join([_program(), str(os.getpid())])
        with Path(os.environ[FOLDER], program).open("a") as out:
            out.write(f"{module}\n")


def _carries(value: object) -> bool:
    if isinstance(value, list | tuple | dict) and value:
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return type(value).__name__ in _FORMS


def _program() -> str:
    words = " ".join(sys.argv)
    return next((name for name in ("rollout", "training") if name in words), "flow")
