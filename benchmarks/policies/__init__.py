"""Transfer of a policy from training ranks to rollout workers, compared with the former design.

__main__   The program.
parties    Ranks and workers, each a process.
serial     The former design: one rank writes, digests twice and uploads the files; each worker
           fetches one file after the other.
weights    Tensors of a policy version and of the next version.
"""
