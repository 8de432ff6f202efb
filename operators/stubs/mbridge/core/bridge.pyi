from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core.transformer import TransformerConfig

# A transformers config.
_HfConfig = Any
# Whatever has `state_dict` and `named_parameters`, with mbridge's names.
_NamedModel = object

class Bridge:
    _DIRECT_MAPPING: dict[str, str]
    _ATTENTION_MAPPING: ClassVar[dict[str, list[str]]]
    _MLP_MAPPING: ClassVar[dict[str, list[str]]]
    hf_config: _HfConfig
    dtype: torch.dtype
    config: TransformerConfig
    def __init__(self, hf_config: _HfConfig, dtype: torch.dtype = ...) -> None: ...
    def set_extra_args(self, **kwargs: object) -> None: ...
    def load_weights(self, models: Sequence[_NamedModel], weights_path: str) -> None: ...
    def export_weights(
        self, models: Sequence[_NamedModel]
    ) -> Iterator[tuple[str, torch.Tensor]]: ...
    def _weight_name_mapping_mcore_local_to_global(self, model: _NamedModel) -> dict[str, str]: ...
    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]: ...
    def _adjust_mapping_for_shared_weights(self) -> None: ...
    def _get_safetensor_io(self, weights_path: str) -> SafeTensorIO: ...
