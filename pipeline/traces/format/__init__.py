"""The format itself: what files, commits and manifests hold, and what readers must refuse."""
