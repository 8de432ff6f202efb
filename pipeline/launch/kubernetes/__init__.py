"""Workers as Kubernetes Jobs, without custom resources.

cluster.py   The installation's choices: namespace, pod templates, limits of Jobs.
names.py     Labels, annotations and names of Jobs, which contain the entire state of a launch.
jobs.py      The bodies of a run's Jobs.
api.py       Calls to the API server.
pods.py      The state of a pod and its problem, if any.
watch.py     The state of a Job and of its pods.
notices.py   Lines for users about a launch.
workers.py   The launcher: creates Jobs or attaches to them, watches them, restarts the gang.
"""

from pipeline.extras import need

need("kubernetes", "a run on Kubernetes")
