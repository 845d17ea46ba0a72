{{/* Name of the release's objects. KubeRay appends to it, so it is kept short. */}}
{{- define "dspark.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the release's pods. KubeRay sets app.kubernetes.io/name itself. */}}
{{- define "dspark.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dspark.labels" -}}
{{ include "dspark.selector" . }}
app.kubernetes.io/part-of: dspark
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Refuses values that contradict each other. */}}
{{- define "dspark.check" -}}
{{- $worker := .Values.worker -}}
{{- if and .Values.autoscaling.enabled (or (lt (int $worker.replicas) (int $worker.minReplicas)) (gt (int $worker.replicas) (int $worker.maxReplicas))) -}}
{{- fail (printf "worker.replicas (%v) must lie between worker.minReplicas (%v) and worker.maxReplicas (%v)" $worker.replicas $worker.minReplicas $worker.maxReplicas) -}}
{{- end -}}
{{- if eq .Values.modelCache.type "emptyDir" -}}
{{- range $key := list "existingClaim" "storageClassName" -}}
{{- if get $.Values.modelCache $key -}}
{{- fail (printf "modelCache.%s is set, but modelCache.type is emptyDir: set it to persistentVolumeClaim" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $monitoring := .Values.monitoring -}}
{{- if and $monitoring.podMonitor.enabled $monitoring.prometheusRule.enabled (gt ($monitoring.podMonitor.interval | trimSuffix "s" | int) 15) -}}
{{- fail (printf "monitoring.podMonitor.interval is %s: the alert on a stuck engine, which monitoring.prometheusRule brings, needs 15s or less" $monitoring.podMonitor.interval) -}}
{{- end -}}
{{- end -}}

{{- define "dspark.cacheClaim" -}}
{{- default (printf "%s-model-cache" (include "dspark.name" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* An httpGet probe. Arguments: port, path, failures, and the probes' values. */}}
{{- define "dspark.probe" -}}
httpGet:
  port: {{ .port }}
  path: {{ .path }}
periodSeconds: {{ .probes.periodSeconds }}
timeoutSeconds: {{ .probes.timeoutSeconds }}
failureThreshold: {{ .failures }}
{{- end -}}

{{/* The pod template of the head and of the workers. Arguments: root, component (head or worker), port. */}}
{{- define "dspark.pod" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $group := index $values .component -}}
{{- $isHead := eq .component "head" -}}
metadata:
  labels:
    {{- include "dspark.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if not (and $isHead $values.autoscaling.enabled) }}
  automountServiceAccountToken: false
  {{- end }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.topologySpread }}
  topologySpreadConstraints:
    - topologyKey: {{ .topologyKey }}
      maxSkew: {{ .maxSkew }}
      whenUnsatisfiable: {{ .whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "dspark.selector" $root | nindent 10 }}
          app.kubernetes.io/component: worker
  {{- end }}
  containers:
    - name: ray-{{ .component }}
      image: "{{ $values.image.repository }}:{{ default $root.Chart.AppVersion $values.image.tag }}"
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      resources:
        {{- toYaml $group.resources | nindent 8 }}
      ports:
        - {name: serve, containerPort: {{ .port }}}
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
      livenessProbe:
        {{- include "dspark.probe" (dict "port" 52365 "path" "/api/local_raylet_healthz" "failures" $values.probes.livenessFailureThreshold "probes" $values.probes) | nindent 8 }}
      readinessProbe:
        {{- $port := ternary 8265 (int .port) $isHead }}
        {{- $path := ternary "/api/gcs_healthz" "/-/healthz" $isHead }}
        {{- include "dspark.probe" (dict "port" $port "path" $path "failures" $values.probes.readinessFailureThreshold "probes" $values.probes) | nindent 8 }}
      env:
        - {name: XDG_CACHE_HOME, value: /var/cache/dspark}
        - {name: HOME, value: /tmp}
        {{- with $values.hubToken }}
        {{- if .secretName }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .secretName }}, key: {{ .secretKey }}}
        {{- end }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model-cache, mountPath: /var/cache/dspark}
        {{- if $values.apiKeys.secretName }}
        - {name: api-keys, mountPath: {{ include "dspark.apiKeysFile" $root | dir }}, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: model-cache
      {{- if eq $values.modelCache.type "emptyDir" }}
      emptyDir: {sizeLimit: {{ $values.modelCache.size }}}
      {{- else }}
      persistentVolumeClaim: {claimName: {{ include "dspark.cacheClaim" $root }}}
      {{- end }}
    {{- with $values.apiKeys }}
    {{- if .secretName }}
    - name: api-keys
      secret:
        secretName: {{ .secretName }}
        items: [{key: {{ .secretKey }}, path: keys}]
    {{- end }}
    {{- end }}
{{- end -}}
