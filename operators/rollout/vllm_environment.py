"""The environment of the engine: vLLM reads these variables when it is imported."""

import logging
import os
import warnings

_FIXED = {
    # The engine runs in this process: killing the worker leaves nothing of it behind. Tensor
    # parallelism still starts one process per further GPU; those end with this one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Workers read from the object store only, and send no usage statistics.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Waiting threads must sleep: on cores shared with a trainer (or another worker), spinning at
    # OpenMP's barriers made generation 5 to 30 times slower. OMP_NUM_THREADS sets the number of
    # threads: an engine in this process is not bound to cores (vLLM's own
    # VLLM_CPU_OMP_THREADS_BIND acts on child processes only).
    "OMP_WAIT_POLICY": "PASSIVE",
}


def prepare_environment(enforce_eager: bool) -> None:
    """Set the variables of vLLM, torch and OpenMP; call it before the first import of any."""
    os.environ.update(_FIXED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Parts of vLLM log at import, before vLLM has read its own level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if enforce_eager:
        # vLLM compiles parts of its sampler even when the model runs eagerly: 3 to 23 s at the
        # first request on CPU, without a measurable gain.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch)\b")
