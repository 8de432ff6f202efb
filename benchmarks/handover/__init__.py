"""Transfer of routes from the rollout process to the trainer, over links of different speeds.

__main__   The program: it measures each format on each link, and writes the tables.
link       Three simulated hosts (rollout, store, trainer), each with a link that the kernel limits.
party      The two processes and the pipes that control them.
roles      The work of the two processes in each format.
wire       HTTP, shared memory and connections for the formats of other frameworks.
"""
