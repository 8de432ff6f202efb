class ParallelStates:
    tp_size: int
