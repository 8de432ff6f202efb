{{/*
Checks that the schema cannot express: rules that concern several values, and formats for which the schema's
error message, a bare pattern, would not help the user. One error lists all problems, one per line. Each line
contains the key, the value found, the value expected, and the fix.
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
{{- fail (printf "invalid values:\n  - %s\n" (join "\n  - " $problems)) -}}
{{- end -}}
{{- end }}

{{- define "retrace.checkImages" -}}
{{- range $name := list "flow" "rollout" "training" }}
{{- $image := index $.Values.images $name }}
{{- if not $image.repository }}
images.{{ $name }}.repository: found "", expected the image's name in your registry, such as registry.example.org/retrace/{{ $name }}; build and push it with `make images` (images/README.md)
{{- else if not (regexMatch "^[a-z0-9][a-zA-Z0-9._/:-]*$" $image.repository) }}
images.{{ $name }}.repository: found {{ $image.repository | quote }}, expected an image's name without a tag or digest, such as registry.example.org/retrace/{{ $name }}; correct it
{{- else if regexMatch ":[^/]*$" $image.repository }}
images.{{ $name }}.repository: found {{ $image.repository | quote }}, expected a name without a tag; move the part after the last colon to images.{{ $name }}.tag
{{- end }}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" $image.digest) }}
images.{{ $name }}.digest: found {{ $image.digest | quote }}, expected sha256: and 64 hexadecimal digits; copy it from the registry, or leave it empty and set images.{{ $name }}.tag
{{- end }}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$" $image.tag) }}
images.{{ $name }}.tag: found {{ $image.tag | quote }}, expected a tag of letters, digits, ".", "_" and "-"; correct it, or set images.{{ $name }}.digest for a digest
{{- end }}
{{- end }}
{{- end }}

{{- define "retrace.checkStore" -}}
{{- $store := .Values.store }}
{{- if .Values.minio.enabled }}
{{- range $key := list "uri" "endpoint" }}
{{- if get $store $key }}
store.{{ $key }}: found {{ get $store $key | quote }} with minio.enabled=true, expected only one store; leave store.{{ $key }} empty, or set minio.enabled=false
{{- end }}
{{- end }}
{{- else if not $store.uri }}
store.uri: found "", expected s3://BUCKET/PREFIX; set store.uri, or minio.enabled=true for a trial
{{- else if not (hasPrefix "s3://" $store.uri) }}
store.uri: found {{ $store.uri | quote }}, expected s3://BUCKET/PREFIX; set the URI of a bucket, because pods share no disk
{{- else if not (regexMatch "^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/?#\\s]+)*/?$" $store.uri) }}
store.uri: found {{ $store.uri | quote }}, expected s3://BUCKET or s3://BUCKET/PREFIX, with a bucket name of 3 to 63 characters (a-z, 0-9, "-", "."); correct it
{{- end }}
{{- if not (regexMatch "^(https?://[^/\\s?#@]+/?)?$" $store.endpoint) }}
store.endpoint: found {{ $store.endpoint | quote }}, expected http:// or https:// followed by only a host and a port; set the bucket in store.uri and credentials in store.existingSecret
{{- end }}
{{- if and $store.caBundle.configMap $store.caBundle.secret }}
store.caBundle: found configMap {{ $store.caBundle.configMap | quote }} and secret {{ $store.caBundle.secret | quote }}, expected at most one of them; leave the other empty
{{- end }}
{{- end }}

{{- define "retrace.checkPrefect" -}}
{{- $prefect := .Values.prefect }}
{{- if $prefect.server.enabled }}
{{- if $prefect.apiUrl }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }} with prefect.server.enabled=true, expected only one server; leave prefect.apiUrl empty, or set prefect.server.enabled=false
{{- end }}
{{- if and $prefect.server.database.existingSecret $prefect.server.persistence.enabled }}
prefect.server.persistence.enabled: found true with prefect.server.database.existingSecret={{ $prefect.server.database.existingSecret | quote }}, expected only one place for the run history; set prefect.server.persistence.enabled=false for PostgreSQL, or leave the Secret's name empty for SQLite on a volume
{{- end }}
{{- else }}
{{- if not $prefect.apiUrl }}
prefect.apiUrl: found "" with prefect.server.enabled=false, expected the URL of an existing server's API; set prefect.apiUrl (https://HOST/api), or prefect.server.enabled=true
{{- end }}
{{- if and $prefect.auth.enabled (not $prefect.auth.existingSecret) }}
prefect.auth.existingSecret: found "" with prefect.server.enabled=false, expected the name of a Secret with the existing server's "user:password"; set it, or prefect.auth.enabled=false if that server requires no password
{{- end }}
{{- end }}
{{- if contains "api.prefect.cloud" $prefect.apiUrl }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }}, expected a self-hosted Prefect server: Prefect Cloud requires an API key, which the chart cannot pass to its pods; set prefect.server.enabled=true
{{- else if not (regexMatch "^(https?://[^\\s?#@]+/api(/[^\\s?#]*)?)?$" $prefect.apiUrl) }}
prefect.apiUrl: found {{ $prefect.apiUrl | quote }}, expected an http:// or https:// URL whose path contains /api (https://HOST/api); copy the value of PREFECT_API_URL
{{- end }}
{{- end }}

{{- define "retrace.checkMinio" -}}
{{- if .Values.minio.enabled }}
{{- if not (regexMatch "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$" .Values.minio.bucket) }}
minio.bucket: found {{ .Values.minio.bucket | quote }}, expected a bucket name of 3 to 63 characters (a-z, 0-9, "-", "."); choose a different name
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
{{ $key }}.resources.{{ $kind }}.{{ $resource }}: found {{ $amount | quote }}, expected a quantity such as 500m, 4 or 16Gi; correct it
{{- end }}
{{- if and $.Values.gpuResource (eq $resource $.Values.gpuResource) }}
{{ $key }}.resources.{{ $kind }}: found {{ $resource }}, expected CPU and memory; remove it, because the key gpus sets the GPU requests and limits
{{- end }}
{{- end }}
{{- end }}
{{- range $size := list "shmSize" "tmpSize" }}
{{- if and (get $pods $size) (not (include "retrace.isQuantity" (get $pods $size))) }}
{{ $key }}.{{ $size }}: found {{ get $pods $size | quote }}, expected a quantity such as 16Gi; correct it
{{- end }}
{{- end }}
{{- if hasKey $pods "persistence" }}
{{- if not (include "retrace.isQuantity" $pods.persistence.size) }}
{{ $key }}.persistence.size: found {{ $pods.persistence.size | quote }}, expected a quantity such as 5Gi; correct it
{{- end }}
{{- end }}
{{- range $label, $text := $pods.podLabels | default dict }}
{{- if regexMatch "^(app\\.kubernetes\\.io|retrace\\.dev|prefect\\.io|batch\\.kubernetes\\.io)/" $label }}
{{ $key }}.podLabels: found {{ $label }}, expected a label outside the domains that Retrace, Prefect and Kubernetes use to identify pods; choose a different domain
{{- end }}
{{- end }}
{{- if hasKey $pods "volumeMounts" }}
{{- $volumes := list }}
{{- range $pods.volumes }}
{{- $volumes = append $volumes .name }}
{{- if has .name (list "tmp" "shm" "ca" "cluster" "presets") }}
{{ $key }}.volumes: found the name {{ .name | quote }}, expected a name that the chart does not use; choose a different name
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
presets: found the name {{ $name | quote }}, expected a DNS label (at most 63 characters: a-z, 0-9, "-"); rename it
{{- end }}
{{- if not $settings }}
presets.{{ $name }}: found no settings, expected a run configuration as for `retrace run`; add its settings, or remove the name
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
{{ $key }}: found {{ index $.Values $key | quote }}, expected a DNS label (at most 40 characters: a-z, 0-9, "-", starting with a letter); choose a different name
{{- end }}
{{- end }}
{{- range $key := list "store.existingSecret" "store.caBundle.configMap" "store.caBundle.secret"
    "prefect.auth.existingSecret" "prefect.server.database.existingSecret"
    "prefect.server.persistence.storageClass" "minio.persistence.storageClass" "jobs.queueName"
    "rollout.priorityClassName" "rollout.runtimeClassName" "training.priorityClassName"
    "training.runtimeClassName" "scheduling.priorityClassName" }}
{{- $name := include "retrace.at" (list $.Values $key) }}
{{- if not (regexMatch "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$" $name) }}
{{ $key }}: found {{ $name | quote }}, expected the name of a Kubernetes object (a-z, 0-9, "-", "."); correct it
{{- end }}
{{- end }}
{{- $pool := .Values.worker.workPool }}
{{- if not (and (regexMatch "^[A-Za-z0-9]+([._-][A-Za-z0-9]+)*$" $pool) (le (len $pool) 63)) }}
worker.workPool: found {{ $pool | quote }}, expected at most 63 letters and digits, with single "-", "_" or "." between them, because the name becomes a label; choose a different name
{{- end }}
{{- if not (regexMatch "^([a-z0-9.-]+/[A-Za-z0-9._-]+)?$" .Values.gpuResource) }}
gpuResource: found {{ .Values.gpuResource | quote }}, expected a resource name with its domain; set nvidia.com/gpu, or "" for a trial on CPU
{{- end }}
{{- end }}

{{/* Check that the Secrets and ConfigMaps named in the values exist. `helm template` has no access to a cluster, so it skips these checks. */}}
{{- define "retrace.checkObjects" -}}
{{- /*
Every namespace has the ConfigMap kube-root-ca.crt. If it is missing, either the namespace does not exist yet
(--create-namespace), so none of the objects named in the values exist, or there is no cluster to check.
*/}}
{{- if or (lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt") (lookup "v1" "Namespace" "" "kube-system") }}
{{- $values := .Values }}
{{- $full := include "retrace.fullname" . }}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items | default list }}
{{- $labels := .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/name") "retrace") (eq (get $labels "app.kubernetes.io/component") "worker") (ne (get $labels "app.kubernetes.io/instance") $full) }}
namespace {{ .metadata.namespace }}: found the installation {{ get $labels "app.kubernetes.io/instance" }}, expected no installation except {{ $full }}, because Prefect's worker watches all flow pods in its namespace; choose a different namespace
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
prefect.server.database.existingSecret: found a URL with the scheme {{ (splitList "://" $url | first) | quote }} in Secret {{ $database.existingSecret }}, expected postgresql+asyncpg://USER:PASSWORD@HOST:5432/DATABASE; correct the URL in the Secret
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Check that an object exists and contains the keys. Argument: (list root kind value-key name keys) */}}
{{- define "retrace.checkObject" -}}
{{- $namespace := (index . 0).Release.Namespace }}
{{- $kind := index . 1 }}
{{- $key := index . 2 }}
{{- $name := index . 3 }}
{{- $object := lookup "v1" $kind $namespace $name }}
{{- if not $object }}
{{ $key }}: found {{ $name | quote }}, expected the name of a {{ $kind }} in namespace {{ $namespace }}; create the {{ $kind }} first, or correct the name
{{- else }}
{{- range index . 4 }}
{{- if not (hasKey ($object.data | default dict) .) }}
{{ $key }}: found the keys {{ keys ($object.data | default dict) | sortAlpha | join ", " | default "(none)" }} in {{ $kind }} {{ $name }}, expected the key {{ . }}; add this key
{{- end }}
{{- end }}
{{- end }}
{{- end }}
