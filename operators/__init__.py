"""The worker programs, called operators, which do the heavy work. Each kind has its own package.

An operator uses only the object store and its own arguments. It never imports `pipeline.flows` or
`pipeline.launch`, because a worker must not depend on the launcher that started it.
"""
