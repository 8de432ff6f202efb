"""Benchmarks: the cost of the trace store and of replay, compared with the cost in other
frameworks.

`make bench` runs all of them except scale/ and health, and writes their tables into
benchmarks/performance.md.

    __main__                        The command.
    page, measure                   The generated blocks of the page; timing.
    traces, plain_parquet, cores    Sizes and speeds of route formats.
    handover/                       Transfer of routes between processes, over links of different
                                    speeds.
    writing, reading, manifest      Costs for rollout workers, trainers and the flow.
    verifying                       Cost of `retrace traces verify`.
    policies/                       Transfer of policies to workers, now and in the former design.
    codings                         Differences between policies: bytes and speed.
    training, replay, store         Packing; Megatron's layers with replay; S3 clients.
    health                          Detection of incorrect routes during replay.
    scale/                          Model and simulation of large clusters (benchmarks/scale.md).
    routes/, ways/                  The routes to measure; the formats to compare.
"""
