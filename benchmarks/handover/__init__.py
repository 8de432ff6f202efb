"""Routes from the rollout process to arrays in the trainer's, over links of different speed.

__main__   the programme: ways x links x rounds, the table and the goals
link       three hosts (rollout, store, trainer), each on a link limited by the kernel
party      the two processes: what each does in each way
"""
