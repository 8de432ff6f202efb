"""The programs of an installation on Kubernetes, beside the flow: they run in the chart's pods."""
