"""Start a worker without the environment of a surrounding launcher.

`python -m pipeline.launch.own_environment WORDS...` replaces itself with `python WORDS...`.

`retrace run` may itself be started by torchrun, a PyTorchJob, mpirun, srun or Ray. torchrun reads
each of its options from PET_<OPTION> if the command line does not set it, and ranks and engines
read their place among other processes from variables such as RANK. These variables describe the
surrounding job, not the workers of this run.
"""

import os
import re
import sys
from collections.abc import Iterable

_FOREIGN = re.compile(
    r"(PET|TORCHELASTIC|OMPI|PMI|PMIX|RAY|VLLM_DP|VLLM_RAY)_.*"
    r"|(GROUP_|LOCAL_|ROLE_|NODE_|TORCHCOMM_)?RANK|((GROUP|LOCAL|ROLE)_)?WORLD_SIZE"
    r"|ROLE_NAME|TORCHCOMM_SIZE|MASTER_(ADDR|PORT)|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_.*)"
    # Kubernetes sets VLLM_PORT to a URL in every pod next to a Service named vllm.
    r"|VLLM_(HOST_IP|PORT)"
)


def foreign(names: Iterable[str]) -> list[str]:
    """Return the variables that a surrounding launcher sets for its own processes, sorted."""
    return sorted(name for name in names if _FOREIGN.fullmatch(name))


if __name__ == "__main__":
    if dropped := foreign(os.environ):
        names = ", ".join(dropped)
        sys.stderr.write(f"variables of a surrounding launcher are ignored: {names}\n")
        sys.stderr.flush()
    for name in dropped:
        del os.environ[name]
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
