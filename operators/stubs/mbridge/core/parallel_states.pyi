class ParallelStates:
    tp_size: int
    def __init__(
        self,
        tp_size: int = ...,
        *,
        pp_size: int = ...,
        vpp_size: int | None = ...,
        cp_size: int = ...,
        ep_size: int = ...,
        etp_size: int = ...,
    ) -> None: ...
