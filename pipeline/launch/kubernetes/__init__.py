"""Workers as Kubernetes Jobs. Plain Kubernetes: no custom resource is needed.

cluster.py   what the installation decides: namespace, pod templates, limits of Jobs
names.py     labels, annotations and names of Jobs: all state of a launch is in them
jobs.py      the Jobs of a run, as manifests
api.py       the few calls to the API server
pods.py      what a pod is doing, and what is wrong with it
watch.py     what a Job and its pods are doing
notices.py   what people see of all this
workers.py   create or attach, watch, restart the gang, stop
"""

from pipeline.extras import need

need("kubernetes", "a run on Kubernetes")
