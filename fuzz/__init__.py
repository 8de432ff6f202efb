"""Fuzzing of the trace readers (`make fuzz`), which may raise only TraceError and StoreError.

    target       input                                             code under test
    decode       coded bytes                                       decode_segments
    routes_file  a routes file, with matching digests              read_part
    manifest     commits and manifest rows, with matching digests  every reader, and verify

Readers detect damage by means of digests, so the last two targets give every input matching
digests. These targets thus test files that a broken or hostile writer could produce.
"""
