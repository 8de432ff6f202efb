"""The programs of an installation on Kubernetes, beside the flow: they run in the chart's pods."""

from pipeline.extras import need

need("kubernetes", "a program of an installation")
