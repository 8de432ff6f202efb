from vllm.inputs.engine import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor

class LLMEngine:
    engine_core: EngineCoreClient
    output_processor: OutputProcessor
    def add_request(
        self, request_id: str, prompt: TokensInput, params: SamplingParams
    ) -> str | None: ...
    def abort_request(self, request_ids: list[str]) -> None: ...
    def step(self) -> list[RequestOutput]: ...
