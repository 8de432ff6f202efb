"""Where metrics are logged to."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.report.loggers import TensorBoardLogger
from tests.unit.report.values import VALUES


def test_tensorboard_files_hold_the_measured_values(tmp_path: Path):
    logger = TensorBoardLogger(tmp_path)
    logger.log(3, VALUES)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["tensors"]) == {k for k, v in VALUES.items() if v is not None}
    assert events.Tensors("critic/rewards/mean")[0].step == 3
