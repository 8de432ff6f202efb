"""Launchers, which start a run's workers as local processes or as Kubernetes Jobs."""
