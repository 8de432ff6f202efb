#!/usr/bin/env bash
# Install the chart for a trial, train the quickstart, and show the run's traces.
#   demo.sh [RUN_NAME [key.path=value ...]]
# This works on any cluster whose nodes have the images. CONTEXT selects kubectl's context (`make
# kind-demo` selects the kind cluster's); without it, the current context is used.
source "$(dirname "$0")/settings.sh"
need kubectl helm

run=${1:-demo}
shift || true
overrides=$(printf ',"%s"' "$@")
if (($#)); then overrides="[${overrides:1}]"; else overrides="[]"; fi

kubectl=(kubectl ${CONTEXT:+--context "$CONTEXT"})
in_namespace() { "${kubectl[@]}" --namespace "$NAMESPACE" "$@"; }
prefect() { in_namespace exec "deploy/$RELEASE-worker" --container worker -- env COLUMNS=160 prefect "$@"; }

say "installing the chart in the namespace $NAMESPACE${CONTEXT:+ of $CONTEXT}"
"${kubectl[@]}" get namespace "$NAMESPACE" >/dev/null 2>&1 || "${kubectl[@]}" create namespace "$NAMESPACE"
"${kubectl[@]}" label namespace "$NAMESPACE" --overwrite pod-security.kubernetes.io/enforce=restricted >/dev/null
helm upgrade --install "$RELEASE" charts/retrace ${CONTEXT:+--kube-context "$CONTEXT"} --namespace "$NAMESPACE" \
  --values charts/retrace/ci/trial-values.yaml --reset-then-reuse-values --wait --timeout 5m >/dev/null

say "training the preset quickstart as the run $run"
# Show only the events of the run and its tasks, because the progress artifact is updated constantly.
prefect deployment run retrace/retrace --watch --watch-interval 5 \
  --param preset=quickstart --param "run_name=$run" --param "overrides=$overrides" |
  grep --line-buffered --invert-match --extended-regexp 'prefect\.(artifact|worker|task-run\.Pending)|heartbeat'

say "reading the run's traces from the store, in a pod"
in_namespace delete pod retrace-show --ignore-not-found >/dev/null
sed "s/@RUN@/$run/" scripts/kind/show.yaml | in_namespace apply --filename - >/dev/null
in_namespace wait pod/retrace-show --for=jsonpath='{.status.phase}'=Succeeded --timeout=120s >/dev/null ||
  { in_namespace logs retrace-show; exit 1; }
in_namespace logs retrace-show
in_namespace delete pod retrace-show --wait=false >/dev/null

password=$(in_namespace get secret "$RELEASE-auth" --output go-template='{{index .data "auth-string" | base64decode}}')
cat <<END

The Prefect UI: ${kubectl[*]} --namespace $NAMESPACE port-forward service/$RELEASE-server 4200
  Log in at http://127.0.0.1:4200 with: $password
END
