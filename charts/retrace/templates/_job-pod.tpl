{{/*
The pod template of rollout or training. It is complete except for the parts that depend on the run:
command, labels of the run, GPUs, restart policy and host name. Argument: (list root component)
*/}}
{{- define "retrace.jobPod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $pods := index $root.Values $component -}}
metadata:
  labels:
    app.kubernetes.io/name: retrace
    {{- with $pods.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pods.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "retrace.fullname" $root }}-job
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with include "retrace.pullSecrets" $root }}{{ trim . | nindent 2 }}{{ end }}
  terminationGracePeriodSeconds: 30
  {{- with $pods.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pods.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pods.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "retrace.podSecurityOf" $pods.runAsUser | nindent 4 }}
  volumes:
    {{- include "retrace.tmpVolume" $pods.tmpSize | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pods.shmSize }}
    {{- with include "retrace.caVolume" $root }}{{ trim . | nindent 4 }}{{ end }}
    {{- with $pods.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  containers:
    - name: {{ $component }}
      image: {{ include "retrace.image" (list $root (index $root.Values.images $component)) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      env:
        - name: HOME
          value: /tmp
        {{- with $pods.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      envFrom: {{- include "retrace.storeEnvFrom" $root | nindent 8 }}
      resources: {{- toYaml $pods.resources | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- with include "retrace.caMount" $root }}{{ trim . | nindent 8 }}{{ end }}
        {{- with $pods.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "retrace.containerSecurity" $root | nindent 8 }}
        {{- with $pods.capabilities }}
          add: {{ toJson . }}
        {{- end }}
{{- end }}
