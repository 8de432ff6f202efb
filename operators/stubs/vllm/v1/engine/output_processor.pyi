from vllm.v1.engine.detokenizer import IncrementalDetokenizer

class RequestState:
    detokenizer: IncrementalDetokenizer | None

class OutputProcessor:
    request_states: dict[str, RequestState]
