from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch.nn import Module
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.connector import AuxOutputConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AuxRequestOutput

class _InputBatch(Protocol):
    """The fields of Model Runner V2's InputBatch that the connector reads."""

    @property
    def req_ids(self) -> list[str]: ...
    @property
    def query_start_loc_np(self) -> npt.NDArray[np.int32]: ...
    @property
    def num_computed_tokens_np(self) -> npt.NDArray[np.int32]: ...

class PendingAuxOutput:
    request_ids: list[str]
    def enqueue_cpu_copy(
        self, num_sampled: npt.NDArray[np.int64], num_rejected: npt.NDArray[np.int64]
    ) -> None: ...
    def process_output(self) -> dict[str, AuxRequestOutput]: ...

class AuxOutputWorkerConnector:
    def begin_step(self, metadata: AuxOutputConnectorMetadata | None) -> None: ...
    def prepare_output(self, input_batch: _InputBatch) -> PendingAuxOutput | None: ...

def get_aux_output_connector(
    model: Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> AuxOutputWorkerConnector: ...
