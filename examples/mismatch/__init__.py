"""One policy trained by several algorithms, and what each does about the mismatch between engines.

python -m examples.mismatch            # make mismatch: within half an hour on two cores
python -m examples.mismatch --full     # hours; resumable

make_policy.py   the policy and its dense twin, from random weights
arms.py          which runs there are: overrides on mismatch.yaml, seeds
running.py       runs those arms that are not finished: `retrace run`, one after the other
results.py       reads what the arms left in the store; when an arm has collapsed
paper.py         what the R3 paper reports
page.py          tables and plots of all that: outputs/mismatch/page
"""
