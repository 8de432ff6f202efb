import torch

class PackedSeqParams:
    cu_seqlens_q: torch.Tensor
    def __init__(
        self,
        qkv_format: str = ...,
        cu_seqlens_q: torch.Tensor = ...,
        cu_seqlens_kv: torch.Tensor = ...,
        *,
        max_seqlen_q: int = ...,
        max_seqlen_kv: int = ...,
        cu_seqlens_q_padded: torch.Tensor | None = ...,
        cu_seqlens_kv_padded: torch.Tensor | None = ...,
    ) -> None: ...
