"""Environment variables for the engine, which vLLM reads when it is imported."""

import logging
import os
import warnings

from pipeline.hardware import gpu_pool

_FIXED = {
    # The engine runs in this process, so it ends when the worker is killed. Tensor parallelism
    # still starts one process per additional GPU; these child processes end with this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Workers read only from the object store, and send no usage statistics.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_DEFAULTS = {
    # On GPUs, warnings name weights that were not loaded, and a fallback to the old model runner.
    # The CPU build warns of all that it lacks, in every run.
    "VLLM_LOGGING_LEVEL": "WARNING" if gpu_pool() else "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Waiting threads must sleep, because spinning at OpenMP's barriers made generation 5 to 30
    # times slower on cores shared with a trainer or another worker. OMP_NUM_THREADS sets the number
    # of threads. vLLM's own VLLM_CPU_OMP_THREADS_BIND has no effect here, because it applies only
    # to child processes, and the engine runs in this process.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def prepare_environment(enforce_eager: bool) -> None:
    """Set the variables of vLLM, torch and OpenMP; call this before importing any of them."""
    os.environ.update(_FIXED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Parts of vLLM log at import time, before vLLM has read its own log level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if enforce_eager:
        # vLLM compiles parts of its sampler even when the model runs eagerly. On CPU this takes 3
        # to 23 s on the first request, without a measurable gain.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(vllm|torch)\b")
