"""The program of a training rank that kills itself while it writes an object to the store.

The arguments are the rank, a key prefix, the number of objects with this prefix that the rank
writes before it is killed, and then the arguments of the rank's program.
"""

import os
import signal
import sys
from typing import Any

from operators.training import __main__ as program
from pipeline.store.file import FileStore


def until_killed(prefix: str, objects: int) -> None:
    """Kill this process after it has written `objects` objects whose keys have the prefix.

    At that point, all bytes of the next object are written, but the object does not exist yet.
    """
    made = 0
    begin: Any = FileStore.upload

    def upload(store: FileStore, key: str) -> Any:
        found = begin(store, key)
        finish = found.finish

        def counted() -> None:
            nonlocal made
            if made == objects:
                os.kill(os.getpid(), signal.SIGKILL)
            finish()
            made += 1

        if key.startswith(prefix):
            found.finish = counted
        return found

    patched: Any = FileStore
    patched.upload = upload


if __name__ == "__main__":
    if os.environ["RANK"] == sys.argv[1]:
        until_killed(sys.argv[2], int(sys.argv[3]))
    del sys.argv[1:4]
    sys.exit(program.main())
