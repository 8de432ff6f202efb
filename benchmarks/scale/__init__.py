"""How Retrace scales: a model of a step's traffic and time, and a simulation of 1,000 parties.

coefficients.json         Measured and assumed coefficients; tests and benchmarks/scale.md use them.
coefficients.py           That file's content as typed numbers.
measure                   Measurement of the coefficients on this machine.
model.py                  Formulas for a step's traffic and time on a cluster.
simulation                Flow, workers and ranks in simulated time against a MinIO server.
clock, counted, parties   Parts of the simulation.
"""
