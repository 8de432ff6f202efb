import queue

_results_queue: queue.Queue[object] | None

def _get_write_results_queue() -> queue.Queue[object]: ...
