"""A watcher that detects simultaneous flow pods, or simultaneous training gangs, of one run."""

import contextlib
import threading
from collections.abc import Iterator

from tests.e2e.installation import Installation, live_pods
from tests.e2e.kubectl import CommandError
from tests.e2e.prefect_api import FlowRun


@contextlib.contextmanager
def never_two_at_once(installation: Installation, run: FlowRun) -> Iterator[list[str]]:
    """Yield a list to which a thread adds each pair of pods or gangs that ran simultaneously.

    The thread checks about twice a second. The list must stay empty.
    """
    seen: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            with contextlib.suppress(CommandError):  # the next check follows soon
                flow = live_pods(installation.flow_pods(run))
                if len(flow) > 1:
                    seen.append(f"flow pods {', '.join(flow)}")
                ranks = live_pods(installation.pods(run, "training"))
                gangs = {pod.rpartition("-")[0].rpartition("-")[0] for pod in ranks}
                if len(gangs) > 1:
                    seen.append(f"gangs {', '.join(sorted(gangs))}")

    watcher = threading.Thread(target=look, name=f"watch {run.name}")
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()
