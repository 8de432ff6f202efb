"""A CPU worker and scheduler whose outputs are consumed late, as on GPUs.

On GPUs, vLLM schedules one step ahead of the tokens. The CPU build never does, so the engine gets
these classes by name, with a queue of two steps.
"""

import numpy as np
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import PendingAuxOutput
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from operators.cpu.vllm_build import PlainWorker, RoutesWorker

NAMES = {
    "worker_cls": f"{__name__}.LateWorker",
    "scheduler_cls": f"{__name__}.LateScheduler",
    "async_scheduling": True,
}
"""Engine arguments."""


class _Late(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput, pending: PendingAuxOutput | None) -> None:
        self._output = output
        self._pending = pending

    def get_output(self) -> ModelRunnerOutput:
        if self._pending is not None:
            self._output.aux_output_connector_output = self._pending.process_output()
        return self._output


class LateWorker(RoutesWorker):
    """Delivers a step's routes when the step's output is consumed, not when it is computed."""

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        output = PlainWorker.sample_tokens(self, grammar_output)
        pending, self._pending = self._pending, None
        if output is None:
            return None
        if pending is not None:
            counts = np.array(
                [
                    len(output.sampled_token_ids[output.req_id_to_index[r]])
                    for r in pending.request_ids
                ]
            )
            pending.enqueue_cpu_copy(counts, np.zeros_like(counts))
        return _Late(output, pending)


class LateScheduler(AsyncScheduler):
    """vLLM's scheduler for steps in flight, with the data plane for routes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.aux_output_connector = AuxOutputSchedulerConnector()
