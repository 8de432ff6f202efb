from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from mbridge.core.parallel_states import ParallelStates
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer import TransformerConfig

# A transformers config.
_HfConfig = Any
# Any object with `state_dict` and `named_parameters` that use mbridge's names.
_NamedModel = object

class Bridge:
    _DIRECT_MAPPING: dict[str, str]
    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]]
    _MLP_MAPPING: ClassVar[dict[str, list[str]]]
    hf_config: _HfConfig
    dtype: torch.dtype
    config: TransformerConfig
    mpu: ParallelStates
    def __init__(
        self,
        hf_config: _HfConfig,
        dtype: torch.dtype = ...,
        parallel_states: ParallelStates | None = ...,
    ) -> None: ...
    def set_extra_args(self, **kwargs: object) -> None: ...
    def load_weights(self, models: Sequence[_NamedModel], weights_path: str) -> None: ...
    def _weight_name_mapping_mcore_local_to_global(self, model: _NamedModel) -> dict[str, str]: ...
    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]: ...
    def _weight_merge_across_tp(
        self, mcore_weights_name: str, mcore_weights: list[torch.Tensor], param: torch.Tensor
    ) -> torch.Tensor: ...
    def _weight_to_hf_format(
        self, mcore_weights_name: str, mcore_weights: torch.Tensor
    ) -> tuple[list[str], list[torch.Tensor]]: ...
    def _adjust_mapping_for_shared_weights(self) -> None: ...
    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO: ...
