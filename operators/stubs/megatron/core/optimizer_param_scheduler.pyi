from typing import Any

from megatron.core.optimizer import MegatronOptimizer

class OptimizerParamScheduler:
    optimizer: MegatronOptimizer
    num_steps: int
    def __init__(
        self,
        optimizer: MegatronOptimizer,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: int,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        *,
        wsd_decay_steps: int | None = ...,
        lr_wsd_decay_style: str | None = ...,
    ) -> None: ...
    def get_wd(self) -> float: ...
    def get_lr(self, param_group: dict[str, Any]) -> float: ...
    def step(self, increment: int) -> None: ...
