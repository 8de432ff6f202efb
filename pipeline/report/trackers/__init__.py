"""Trackers, which receive a run's metrics in addition to the screen (`trainer.logger`).

    flow ──lines of JSON──► a process per tracker ──► TensorBoard, wandb, mlflow, a file, ...
         ◄──taken, failed──

A tracker's library may hang, crash or wait for a server, so each tracker runs in its own process
(`python -m pipeline.report.trackers`). The flow waits for these processes only when it ends, and
only for a limited time. It reports how many metrics did not arrive. The store always contains all
metrics.
"""
