"""Fuzzing what reads traces: `make fuzz`. Only TraceError and StoreError may come out.

    decode       coded bytes                                  -> decode_segments
    routes_file  a routes file, its digests made to fit       -> read_part
    manifest     commits and manifest rows, digests made to fit -> every reader, and verify

Digests protect readers from damage, so the two others give every input the digests that belong to
it: they ask what happens with files of a broken or hostile writer.
"""
