"""The programs that do the heavy work: one package per kind of worker.

An operator sees the object store and its own arguments, nothing else. It never imports
`pipeline.flows` or `pipeline.launch`: a worker must not care who started it.
"""
