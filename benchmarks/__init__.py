"""Benchmarks: what the trace store and replay cost, beside others in the same run.

`make bench` runs them all and writes their tables into docs/performance.md.

    __main__   the one command       page      the page's blocks     measure   timing
    traces, plain_parquet, cores     bytes and speeds of ways to ship routes
    handover/                        from process to process over links of different speed
    writing, reading, manifest       what rollout workers, trainers and the flow spend
    verifying                        what `retrace traces verify` takes
    replay, store                    Megatron's layers with replay; clients of s3://
    routes/, ways/                   what is shipped; how
"""
