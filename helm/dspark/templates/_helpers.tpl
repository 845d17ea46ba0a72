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

{{/* The HTTP port of the Serve configuration; refuses one that no other pod could reach. */}}
{{- define "dspark.port" -}}
{{- $text := required "serveConfigV2 is empty: take a preset (-f values-cpu.yaml) or --set-file serveConfigV2=FILE" .Values.serveConfigV2 -}}
{{- $serve := fromYaml $text -}}
{{- if $serve.Error }}{{ fail (printf "serveConfigV2 is not YAML: %s" $serve.Error) }}{{ end -}}
{{- $http := default dict $serve.http_options -}}
{{- if ne (default "127.0.0.1" $http.host) "0.0.0.0" -}}
{{- fail "serveConfigV2: http_options.host must be 0.0.0.0, else no other pod reaches the service" -}}
{{- end -}}
{{- default 8000 $http.port -}}
{{- end -}}

{{- define "dspark.apiKeysFolder" -}}/etc/dspark/api-keys{{- end -}}

{{/* Refuses keys that nobody checks, and checks without keys. */}}
{{- define "dspark.checkApiKeys" -}}
{{- $file := printf "%s/keys" (include "dspark.apiKeysFolder" .) -}}
{{- $asked := contains $file .Values.serveConfigV2 -}}
{{- if and .Values.apiKeys.secretName (not $asked) -}}
{{- fail (printf "apiKeys.secretName is set, but serveConfigV2 has no http_config.api_keys.file: %s" $file) -}}
{{- end -}}
{{- if and $asked (not .Values.apiKeys.secretName) -}}
{{- fail (printf "serveConfigV2 reads API keys from %s: name their secret in apiKeys.secretName" $file) -}}
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
        - {name: api-keys, mountPath: {{ include "dspark.apiKeysFolder" $root }}, readOnly: true}
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
