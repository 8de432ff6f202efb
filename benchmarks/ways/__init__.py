"""What the programs compare: formats for routes, and codings of the differences of policies.

ours is Retrace's format, peers those of other frameworks.
"""
