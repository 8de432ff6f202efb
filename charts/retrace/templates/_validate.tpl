{{/*
What the schema cannot say: rules across values, and formats whose pattern would be no help to a
reader. Each problem is a line: key, what was found, what was expected, the fix. All are shown at
once.
*/}}
{{- define "retrace.validate" -}}
{{- $checks := list "retrace.checkImages" "retrace.checkStore" "retrace.checkPrefect" "retrace.checkMinio" "retrace.checkPods" "retrace.checkPresets" "retrace.checkNames" "retrace.checkObjects" -}}
{{- $problems := list -}}
{{- range $checks -}}
{{- range splitList "\n" (include . $) -}}
{{- with trim . -}}
{{- $problems = append $problems . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $problems -}}
{{- fail (printf "wrong values:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end }}

{{- define "retrace.checkImages" -}}
{{- range $name := list "flow" "rollout" "training" }}
{{- $image := index $.Values.images $name }}
{{- if not $image.repository }}
images.{{ $name }}.repository: found "", expected the image's name in your registry, such as registry.example.org/retrace/{{ $name }}; make and push it with `make images` (images/README.md)
{{- else if not (regexMatch "^[a-z0-9][a-zA-Z0-9._/:-]*$" $image.repository) }}
images.{{ $name }}.repository: found {{ $image.repository | quote }}, expected an image's name such as registry.example.org/retrace/{{ $name }}; write it without tag and digest
{{- else if regexMatch ":[^/]*$" $image.repository }}
images.{{ $name }}.repository: found {{ $image.repository | quote }}, expected a name without tag; put what follows the last colon into images.{{ $name }}.tag
{{- end }}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" $image.digest) }}
images.{{ $name }}.digest: found {{ $image.digest | quote }}, expected sha256: and 64 hexadecimal digits; copy it from the registry, or leave it empty and set images.{{ $name }}.tag
{{- end }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$" $image.tag) }}
images.{{ $name }}.tag: found {{ $image.tag | quote }}, expected a tag (letters, digits, . _ -); a digest goes into images.{{ $name }}.digest
{{- end }}
{{- end }}
{{- end }}

{{- define "retrace.checkStore" -}}
{{- $store := .Values.store }}
{{- if .Values.minio.enabled }}
{{- range $key := list "uri" "endpoint" }}
{{- if get $store $key }}
store.{{ $key }}: found {{ get $store $key | quote }} beside minio.enabled=true, expected one store; leave store.{{ $key }} empty, or set minio.enabled=false
{{- end }}
{{- end }}
{{- else if not $store.uri }}
store.uri: found "", expected s3://BUCKET/PREFIX; set store.uri, or minio.enabled=true for a trial
{{- else if not (hasPrefix "s3://" $store.uri) }}
store.uri: found {{ $store.uri | quote }}, expected s3://BUCKET/PREFIX; pods share no disk, so runs need an object store
{{- else if not (regexMatch "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/?#\\s]+)*/?$" $store.uri) }}
store.uri: found {{ $store.uri | quote }}, expected s3://BUCKET or s3://BUCKET/PREFIX, with a bucket of 3 to 63 of a-z, 0-9, - and .; correct it
{{- end }}
{{- if not (regexMatch "^(https?://[^/\\s?#@]+/?)?$" $store.endpoint) }}
store.endpoint: found {{ $store.endpoint | quote }}, expected http:// or https:// with host and port; the bucket belongs to store.uri, credentials to store.existingSecret
{{- end }}
{{- if and $store.caBundle.configMap $store.caBundle.secret }}
store.caBundle: found configMap {{ $store.caBundle.configMap | quote }} and secret {{ $store.caBundle.secret | quote }}, expected one of them; leave the other empty
{{- end }}
{{- end }}

{{- define "retrace.checkPrefect" -}}
{{- $prefect := .Values.prefect }}
{{- if $prefect.server.enabled }}
{{- if $prefect.apiUrl }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }} beside prefect.server.enabled=true, expected one server; leave prefect.apiUrl empty, or set prefect.server.enabled=false
{{- end }}
{{- if and $prefect.server.database.existingSecret $prefect.server.persistence.enabled }}
prefect.server.persistence.enabled: found true beside prefect.server.database.existingSecret={{ $prefect.server.database.existingSecret | quote }}, expected one place for the history of runs; set prefect.server.persistence.enabled=false for PostgreSQL, or leave the Secret empty for SQLite on a volume
{{- end }}
{{- else }}
{{- if not $prefect.apiUrl }}
prefect.apiUrl: found "" with prefect.server.enabled=false, expected the URL of another server's API; set prefect.apiUrl (https://HOST/api), or prefect.server.enabled=true
{{- end }}
{{- if and $prefect.auth.enabled (not $prefect.auth.existingSecret) }}
prefect.auth.existingSecret: found "" with prefect.server.enabled=false, expected the Secret with the other server's "user:password"; set it, or prefect.auth.enabled=false if that server asks for none
{{- end }}
{{- end }}
{{- if contains "api.prefect.cloud" $prefect.apiUrl }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }}, expected a Prefect server of your own: Prefect Cloud asks for an API key, which the chart does not pass on; set prefect.server.enabled=true
{{- else if not (regexMatch "^(https?://[^\\s?#@]+/api(/[^\\s?#]*)?)?$" $prefect.apiUrl) }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }}, expected http:// or https:// and a path with /api (https://HOST/api); copy the value of PREFECT_API_URL
{{- end }}
{{- end }}

{{- define "retrace.checkMinio" -}}
{{- if .Values.minio.enabled }}
{{- if not (regexMatch "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$" .Values.minio.bucket) }}
minio.bucket: found {{ .Values.minio.bucket | quote }}, expected a bucket's name (3 to 63 of a-z, 0-9, - and .); choose another
{{- end }}
{{- end }}
{{- end }}

{{- define "retrace.isQuantity" -}}
{{- if regexMatch "^[0-9]+(\\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$" (toString .) }}true{{ end }}
{{- end }}

{{- define "retrace.checkPods" -}}
{{- range $key := list "rollout" "training" "flow" "worker" "janitor" "prefect.server" "minio" }}
{{- $pods := ternary $.Values.prefect.server (index $.Values $key) (eq $key "prefect.server") }}
{{- range $kind, $amounts := $pods.resources }}
{{- range $resource, $amount := $amounts }}
{{- if not (include "retrace.isQuantity" $amount) }}
{{ $key }}.resources.{{ $kind }}.{{ $resource }}: found {{ $amount | quote }}, expected a quantity such as 500m, 4 or 16Gi
{{- end }}
{{- if and $.Values.gpuResource (eq $resource $.Values.gpuResource) }}
{{ $key }}.resources.{{ $kind }}: found {{ $resource }}, expected CPU and memory; GPUs are set by gpus, for requests and limits alike
{{- end }}
{{- end }}
{{- end }}
{{- range $size := list "shmSize" "tmpSize" }}
{{- if and (get $pods $size) (not (include "retrace.isQuantity" (get $pods $size))) }}
{{ $key }}.{{ $size }}: found {{ get $pods $size | quote }}, expected a quantity such as 16Gi
{{- end }}
{{- end }}
{{- if hasKey $pods "persistence" }}
{{- if not (include "retrace.isQuantity" $pods.persistence.size) }}
{{ $key }}.persistence.size: found {{ $pods.persistence.size | quote }}, expected a quantity such as 5Gi
{{- end }}
{{- end }}
{{- range $label, $text := $pods.podLabels | default dict }}
{{- if regexMatch "^(app\\.kubernetes\\.io|retrace\\.dev|prefect\\.io|batch\\.kubernetes\\.io)/" $label }}
{{ $key }}.podLabels: found {{ $label }}, which Retrace, Prefect and Kubernetes tell pods apart by; choose another domain
{{- end }}
{{- end }}
{{- if hasKey $pods "volumeMounts" }}
{{- $volumes := list }}
{{- range $pods.volumes }}
{{- $volumes = append $volumes .name }}
{{- if has .name (list "tmp" "shm" "ca" "cluster" "presets") }}
{{ $key }}.volumes: found the name {{ .name | quote }}, which the chart uses itself; choose another
{{- end }}
{{- end }}
{{- range $pods.volumeMounts }}
{{- if not (has .name $volumes) }}
{{ $key }}.volumeMounts: found {{ .name | quote }} at {{ .mountPath }}, expected one of {{ $key }}.volumes ({{ join ", " $volumes | default "none" }}); add the volume there
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "retrace.checkPresets" -}}
{{- range $name, $settings := .Values.presets }}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$" $name) }}
presets: found the name {{ $name | quote }}, expected a DNS label (a-z, 0-9 and -, at most 63); rename it
{{- end }}
{{- if not $settings }}
presets.{{ $name }}: found nothing, expected a run configuration as `retrace run` takes it; write its settings, or remove the name
{{- end }}
{{- end }}
{{- end }}

{{/* The value at a dotted path. Argument: (list values path) */}}
{{- define "retrace.at" -}}
{{- $value := index . 0 }}
{{- range splitList "." (index . 1) }}
{{- $value = index $value . }}
{{- end }}
{{- $value }}
{{- end }}

{{- define "retrace.checkNames" -}}
{{- range $key := list "nameOverride" "fullnameOverride" }}
{{- if not (regexMatch "^([a-z]([a-z0-9-]{0,38}[a-z0-9])?)?$" (index $.Values $key)) }}
{{ $key }}: found {{ index $.Values $key | quote }}, expected a DNS label (a-z, 0-9 and -, at most 40, a letter first); choose another
{{- end }}
{{- end }}
{{- range $key := list "store.existingSecret" "store.caBundle.configMap" "store.caBundle.secret"
    "prefect.auth.existingSecret" "prefect.server.database.existingSecret"
    "prefect.server.persistence.storageClass" "minio.persistence.storageClass" "jobs.queueName"
    "rollout.priorityClassName" "rollout.runtimeClassName" "training.priorityClassName"
    "training.runtimeClassName" "scheduling.priorityClassName" }}
{{- $name := include "retrace.at" (list $.Values $key) }}
{{- if not (regexMatch "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$" $name) }}
{{ $key }}: found {{ $name | quote }}, expected the name of an object in Kubernetes (a-z, 0-9, - and .); correct it
{{- end }}
{{- end }}
{{- $pool := .Values.worker.workPool }}
{{- if not (and (regexMatch "^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$" $pool) (le (len $pool) 63)) }}
worker.workPool: found {{ $pool | quote }}, expected at most 63 letters and digits with single -, _ or . between them, as it becomes a label; choose another
{{- end }}
{{- if not (regexMatch "^([a-z0-9.-]+/[A-Za-z0-9._-]+)?$" .Values.gpuResource) }}
gpuResource: found {{ .Values.gpuResource | quote }}, expected a resource with its domain; write nvidia.com/gpu, or "" for a trial on CPU
{{- end }}
{{- end }}

{{/* Secrets and ConfigMaps that values name, as they are in the cluster. `helm template` sees none. */}}
{{- define "retrace.checkObjects" -}}
{{- /*
Every namespace has this ConfigMap. Without it, the namespace is not there yet (--create-namespace), so
nothing that values name is; or there is no cluster to look at.
*/}}
{{- if or (lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt") (lookup "v1" "Namespace" "" "kube-system") }}
{{- $values := .Values }}
{{- $full := include "retrace.fullname" . }}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items | default list }}
{{- $labels := .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/name") "retrace") (eq (get $labels "app.kubernetes.io/component") "worker") (ne (get $labels "app.kubernetes.io/instance") $full) }}
the namespace {{ .metadata.namespace }}: found the installation {{ get $labels "app.kubernetes.io/instance" }}, expected none beside {{ $full }}, as Prefect's worker watches all flow pods of its namespace; choose another namespace
{{- end }}
{{- end }}
{{- with $values.store.existingSecret }}
{{- include "retrace.checkObject" (list $ "Secret" "store.existingSecret" . (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY")) }}
{{- end }}
{{- with $values.store.caBundle.secret }}
{{- include "retrace.checkObject" (list $ "Secret" "store.caBundle.secret" . (list $values.store.caBundle.key)) }}
{{- end }}
{{- with $values.store.caBundle.configMap }}
{{- include "retrace.checkObject" (list $ "ConfigMap" "store.caBundle.configMap" . (list $values.store.caBundle.key)) }}
{{- end }}
{{- range $values.images.pullSecrets }}
{{- include "retrace.checkObject" (list $ "Secret" "images.pullSecrets" . list) }}
{{- end }}
{{- if and $values.prefect.auth.enabled $values.prefect.auth.existingSecret }}
{{- include "retrace.checkObject" (list $ "Secret" "prefect.auth.existingSecret" $values.prefect.auth.existingSecret (list $values.prefect.auth.key)) }}
{{- end }}
{{- if and $values.prefect.server.enabled $values.prefect.server.database.existingSecret }}
{{- $database := $values.prefect.server.database }}
{{- include "retrace.checkObject" (list $ "Secret" "prefect.server.database.existingSecret" $database.existingSecret (list $database.key)) }}
{{- $url := get ((lookup "v1" "Secret" .Release.Namespace $database.existingSecret).data | default dict) $database.key | b64dec }}
{{- if and $url (not (hasPrefix "postgresql+asyncpg://" $url)) }}
prefect.server.database.existingSecret: found a URL of {{ (splitList "://" $url | first) | quote }} in Secret {{ $database.existingSecret }}, expected postgresql+asyncpg://USER:PASSWORD@HOST:5432/DATABASE; write it so in the Secret
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Argument: (list root kind value-key name keys) */}}
{{- define "retrace.checkObject" -}}
{{- $namespace := (index . 0).Release.Namespace }}
{{- $kind := index . 1 }}
{{- $key := index . 2 }}
{{- $name := index . 3 }}
{{- $object := lookup "v1" $kind $namespace $name }}
{{- if not $object }}
{{ $key }}: found {{ $name | quote }}, but namespace {{ $namespace }} has no such {{ $kind }}; create it first, or correct the name
{{- else }}
{{- range index . 4 }}
{{- if not (hasKey ($object.data | default dict) .) }}
{{ $key }}: {{ $kind }} {{ $name }} has the keys {{ keys ($object.data | default dict) | sortAlpha | join ", " | default "(none)" }}, expected {{ . }}; add it
{{- end }}
{{- end }}
{{- end }}
{{- end }}
