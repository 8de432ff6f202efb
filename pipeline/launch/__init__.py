"""How a run's workers start: as local processes, or as Kubernetes Jobs."""
