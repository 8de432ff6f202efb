"""The programs that do the heavy work: one package per kind of worker.

An operator uses only the object store and its own arguments. It never imports `pipeline.flows` or
`pipeline.launch`: a worker must not depend on what started it.
"""
