"""The format: the contents of files, commits and manifests, and the checks that readers make."""
