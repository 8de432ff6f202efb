"""The hostile campaign: stores that were damaged or forged in every way we know, and what every
reader, `verify` and the commands make of them.

    python -m tests.hostile [--all] [--only NAME]

    worlds      undamaged stores, made by the project's own writers, and twins of them
    case        a case: its name, what becomes of which object, what must be said of it
    remake      level L1: all digests that an attacker could recompute, recomputed
    families    the cases, one module a family
    judge       what readers, verify and commands make of a case, and whether that is right
    pool        child processes with bounds on time and memory
    campaign    all of it together, and the table that it prints
    known       what nobody can notice, and why; what is still open

A case is named `family/object/what/level`. Level L0: no digest was recomputed. L1: an attacker, or
a bug, recomputed every digest of files, of their ranges and of JSON objects up to the root.
"""
