from enum import Enum

class RequestOutputKind(Enum):
    FINAL_ONLY = ...

class SamplingParams:
    def __init__(
        self,
        *,
        n: int,
        seed: int | None,
        temperature: float,
        top_p: float,
        top_k: int,
        max_tokens: int | None,
        stop_token_ids: list[int],
        logprobs: int | None,
        flat_logprobs: bool,
        detokenize: bool,
        output_kind: RequestOutputKind,
    ) -> None: ...
