"""Where metrics go while a run is going on, beside the screen: `trainer.logger`.

    flow ──lines of JSON──► a process for each tracker ──► TensorBoard, wandb, mlflow, a file, ...
         ◄──taken, failed──

A tracker's library may hang, crash or wait for a server, so each has a process of its own
(`python -m pipeline.report.trackers`). The flow waits for none of them but, for a bounded time, at
its end. What did not arrive is counted and said; all of it is in the store.
"""
