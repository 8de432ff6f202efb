"""The programs, except the flow, that run in the Helm chart's pods on Kubernetes."""

from pipeline.extras import need

need("kubernetes", "a program of an installation")
