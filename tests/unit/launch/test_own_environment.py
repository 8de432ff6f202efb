"""Workers do not see the variables of a launcher that started `retrace run`."""

import json
import os
import sys
from pathlib import Path

import pytest

from pipeline.launch.base import Stage
from pipeline.launch.commands import rollout_command
from pipeline.launch.local import local_workers
from pipeline.launch.own_environment import foreign
from tests.patience import eventually

LAUNCHERS = {
    "PyTorchJob": "PET_NNODES PET_NODE_RANK PET_RDZV_ENDPOINT MASTER_ADDR MASTER_PORT WORLD_SIZE",
    "torchrun": "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE ROLE_NAME TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE",
    "mpirun": "OMPI_COMM_WORLD_RANK PMIX_RANK PMI_RANK PMI_SIZE MPI_LOCALRANKID",
    "srun": "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_STEP_NUM_TASKS NODE_RANK",
    "Ray": "RAY_ADDRESS RAY_JOB_ID VLLM_RAY_PER_WORKER_GPUS",
    "vLLM": "VLLM_DP_RANK VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_HOST_IP VLLM_PORT",
}
OURS = [
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PATH", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "VLLM_CACHE_ROOT"),
    *("AWS_REGION", "RETRACE_GUARD", "JOB_COMPLETION_INDEX", "RANKING", "NO_PROXY"),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_of_a_surrounding_launcher_are_known(launcher: str):
    names = LAUNCHERS[launcher].split()
    assert foreign([*names, *OURS]) == sorted(names)


def test_a_worker_sees_only_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [name for listed in LAUNCHERS.values() for name in listed.split()]
    for name in (*names, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    (tmp_path / "program.py").write_text(
        "import json, os; from pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'part').write_text(json.dumps([*os.environ]))\n"
        f"Path({str(tmp_path)!r}, 'part').rename({str(tmp_path / 'seen')!r})\n"
    )
    command = (*rollout_command(sys.executable, "", "0", 0)[:3], str(tmp_path / "program.py"))
    with local_workers(tmp_path, [Stage("w", (command,), 0, {})], print) as workers:
        eventually(lambda: not workers.check() and (tmp_path / "seen").exists(), lambda: "")
    seen = json.loads((tmp_path / "seen").read_text())
    assert foreign(seen) == []
    assert "CUDA_VISIBLE_DEVICES" in seen
    assert "PET_NNODES" in (tmp_path / "w-0.log").read_text(), "the log names what was dropped"
    assert os.environ["PET_NNODES"] == "7"
