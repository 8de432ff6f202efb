"""The hostile campaign: readers, `verify` and the commands on damaged and forged stores.

    python -m tests.hostile [--all] [--only NAME]

    worlds      Undamaged stores, written by the project's own writers, and their twins.
    newer       Stores with the additions of format 1.1; `worlds` lists them.
    case        A case: its name, its changes, and the expected reaction.
    remake      Level L1: recomputation of all digests that an attacker can recompute.
    families    The cases, one module per family.
    judge       The verdict on the results from readers, `verify` and the commands.
    pool        Child processes with limits on time and memory.
    campaign    The list of all cases, samples of this list, and the printed table.
    known       The undetectable cases, with reasons, and the open cases.

A case is named `family/object/what/level`. At level L0 no digest is recomputed. At L1 the case
recomputes every digest of files, their ranges and JSON objects, up to the root, as an attacker or a
bug could.
"""
