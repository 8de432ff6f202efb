{{/* Names, labels, images, and the parts that pods share. */}}

{{- define "retrace.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Selector labels, which must not change, because a Deployment's selector is immutable. Argument: (list root component) */}}
{{- define "retrace.selector" -}}
app.kubernetes.io/name: retrace
app.kubernetes.io/instance: {{ include "retrace.fullname" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* All labels of an object. Argument: (list root component) */}}
{{- define "retrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "retrace.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image's name with its digest or tag. Argument: (list root image) */}}
{{- define "retrace.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{- define "retrace.flowImage" -}}
{{ include "retrace.image" (list . .Values.images.flow) }}
{{- end }}

{{- define "retrace.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "retrace.scheduling" -}}
{{- with .Values.scheduling.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.scheduling.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.scheduling.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.scheduling.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Pod Security level "restricted". The images run as user 10001. */}}
{{- define "retrace.podSecurity" -}}
{{ include "retrace.podSecurityOf" 10001 }}
{{- end }}

{{/* The same for another user. Argument: the user id */}}
{{- define "retrace.podSecurityOf" -}}
runAsNonRoot: {{ ne (int .) 0 }}
runAsUser: {{ int . }}
runAsGroup: {{ int . }}
fsGroup: {{ int . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "retrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "retrace.apiUrl" -}}
{{- if .Values.prefect.server.enabled -}}
http://{{ include "retrace.fullname" . }}-server.{{ .Release.Namespace }}.svc:4200/api
{{- else -}}
{{ .Values.prefect.apiUrl }}
{{- end -}}
{{- end }}

{{- define "retrace.authSecret" -}}
{{ default (printf "%s-auth" (include "retrace.fullname" .)) .Values.prefect.auth.existingSecret }}
{{- end }}

{{/* Environment of the pods that call the Prefect API. Flow pods get this secretKeyRef from the worker. */}}
{{- define "retrace.authEnv" -}}
{{- if .Values.prefect.auth.enabled }}
- name: PREFECT_API_AUTH_STRING
  valueFrom:
    secretKeyRef:
      name: {{ include "retrace.authSecret" . }}
      key: {{ .Values.prefect.auth.key }}
{{- end }}
{{- end }}

{{- define "retrace.storeUri" -}}
{{- if .Values.minio.enabled -}}
s3://{{ .Values.minio.bucket }}/runs
{{- else -}}
{{ .Values.store.uri }}
{{- end -}}
{{- end }}

{{- define "retrace.storeEndpoint" -}}
{{- if .Values.minio.enabled -}}
http://{{ include "retrace.fullname" . }}-minio.{{ .Release.Namespace }}.svc:9000
{{- else -}}
{{ .Values.store.endpoint }}
{{- end -}}
{{- end }}

{{/* The name of the Secret that contains the store's credentials; empty with web identity. */}}
{{- define "retrace.storeSecret" -}}
{{- if .Values.store.existingSecret -}}
{{ .Values.store.existingSecret }}
{{- else if .Values.minio.enabled -}}
{{ include "retrace.fullname" . }}-store
{{- end -}}
{{- end }}

{{- define "retrace.storeEnvFrom" -}}
- configMapRef:
    name: {{ include "retrace.fullname" . }}-store
{{- with include "retrace.storeSecret" . }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- end }}

{{- define "retrace.caVolume" -}}
{{- $ca := .Values.store.caBundle }}
{{- if $ca.configMap }}
- name: ca
  configMap:
    name: {{ $ca.configMap }}
    items:
      - key: {{ $ca.key }}
        path: {{ $ca.key }}
{{- else if $ca.secret }}
- name: ca
  secret:
    secretName: {{ $ca.secret }}
    items:
      - key: {{ $ca.key }}
        path: {{ $ca.key }}
{{- end }}
{{- end }}

{{- define "retrace.caMount" -}}
{{- if or .Values.store.caBundle.configMap .Values.store.caBundle.secret }}
- name: ca
  mountPath: /etc/retrace/ca
  readOnly: true
{{- end }}
{{- end }}

{{/* The scratch volume of every pod. Argument: its size limit; with "", only the node's disk limits it. */}}
{{- define "retrace.tmpVolume" -}}
- name: tmp
  emptyDir:
    {{- with . }}
    sizeLimit: {{ . }}
    {{- else }} {}
    {{- end }}
{{- end }}

{{/*
Volumes of the pods that run the flow's code: flow, registration, janitor, helm test.
Argument: (list root limit-of-/tmp)
*/}}
{{- define "retrace.flowVolumes" -}}
{{- $root := index . 0 -}}
{{ include "retrace.tmpVolume" (index . 1) }}
- name: cluster
  configMap:
    name: {{ include "retrace.fullname" $root }}-cluster
- name: presets
  configMap:
    name: {{ include "retrace.fullname" $root }}-presets
{{- include "retrace.caVolume" $root }}
{{- end }}

{{- define "retrace.flowMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cluster
  mountPath: /etc/retrace/cluster
  readOnly: true
- name: presets
  mountPath: /etc/retrace/presets
  readOnly: true
{{- include "retrace.caMount" . }}
{{- end }}

{{/* A volume claim that outlives the release. Argument: (list root component persistence) */}}
{{- define "retrace.claim" }}
{{- $root := index . 0 }}
{{- $persistence := index . 2 }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "retrace.fullname" $root }}-{{ index . 1 }}
  labels: {{- include "retrace.labels" (list $root (index . 1)) | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: [ReadWriteOnce]
  {{- with $persistence.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ $persistence.size }}
{{- end }}
