"""An experiment on the mismatch between engine and trainer: one policy, several algorithms.

    python -m examples.mismatch            # make mismatch: 20 minutes on two idle cores
    python -m examples.mismatch --full     # hours; can be interrupted and continued

The modules are:

- make_policy.py builds the policy and its dense twin from random weights.
- arms.py defines the runs: overrides of mismatch.yaml, and seeds.
- running.py runs the unfinished arms with `retrace run`, one after another.
- results.py reads the arms' results from the store, and finds the step of a collapse.
- paper.py contains the results of the R3 paper.
- page.py writes the page with tables and plots: outputs/mismatch/mismatch.md.
"""
