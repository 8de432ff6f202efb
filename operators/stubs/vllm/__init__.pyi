from collections.abc import Callable
from typing import Any, TypeVar

from vllm.config import ModelConfig
from vllm.outputs import RequestOutput as RequestOutput
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

__version__: str
_R = TypeVar("_R")

class EngineArgs:
    model: str

class LLM:
    llm_engine: LLMEngine
    model_config: ModelConfig
    def __init__(self, model: str, **kwargs: Any) -> None: ...
    def collective_rpc(
        self,
        method: str | Callable[..., _R],
        *,
        args: tuple[Any, ...] = ...,
        kwargs: dict[str, Any] = ...,
    ) -> list[_R]: ...
    def reset_prefix_cache(self) -> bool: ...
    def update_weight_version(self, new_version: str) -> None: ...
