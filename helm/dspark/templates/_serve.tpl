{{/*
What the chart reads in the Serve configuration. It refuses what can't work in its pods, where the only sign would be an
engine that never starts or a service that asks nobody for a key. All else is for the application to judge.
*/}}

{{/* The Serve configuration, as JSON. */}}
{{- define "dspark.serve" -}}
{{- $text := required "serveConfigV2 is empty: take a preset (-f values-cpu.yaml) or --set-file serveConfigV2=FILE" .Values.serveConfigV2 | trim -}}
{{- if regexMatch "^[^\\s{]+$" $text -}}
{{- fail (printf "serveConfigV2 is the one word %s: if it is a file's name, --set-file serveConfigV2=%s" $text $text) -}}
{{- end -}}
{{- $serve := fromYaml $text -}}
{{- if $serve.Error }}{{ fail (printf "serveConfigV2 is no mapping in YAML: %s" $serve.Error) }}{{ end -}}
{{- if not (and (kindIs "slice" $serve.applications) $serve.applications) -}}
{{- fail "serveConfigV2 has no list of applications, so nothing would be served: see a preset's" -}}
{{- end -}}
{{- range $i, $application := $serve.applications -}}
{{- if not (kindIs "map" $application) }}{{ fail (printf "serveConfigV2: applications[%d] must be a mapping" $i) }}{{ end -}}
{{- end -}}
{{- toJson $serve -}}
{{- end -}}

{{/* A mapping inside of another, as JSON; {} where there is none. Arguments: the outer one, its path with a dot, the inner one's path in it. */}}
{{- define "dspark.section" -}}
{{- $section := index . 0 -}}
{{- $outer := index . 1 -}}
{{- $keys := list -}}
{{- range splitList "." (index . 2) -}}
{{- $section = default dict (get $section .) -}}
{{- $keys = append $keys . -}}
{{- if not (kindIs "map" $section) }}{{ fail (printf "serveConfigV2: %s%s must be a mapping" $outer (join "." $keys)) }}{{ end -}}
{{- end -}}
{{- toJson $section -}}
{{- end -}}

{{/* The HTTP port; refuses a host that no other pod could reach. */}}
{{- define "dspark.port" -}}
{{- $http := include "dspark.section" (list (include "dspark.serve" . | fromJson) "" "http_options") | fromJson -}}
{{- $host := default "127.0.0.1" $http.host -}}
{{- if ne $host "0.0.0.0" -}}
{{- fail (printf "serveConfigV2: http_options.host is %s, which no other pod reaches: write 0.0.0.0, as the presets do" $host) -}}
{{- end -}}
{{- default 8000 $http.port -}}
{{- end -}}

{{- define "dspark.apiKeysFile" -}}/etc/dspark/api-keys/keys{{- end -}}

{{/*
The applications, as a JSON array: name, prefix of its paths, whether it asks for API keys, and whether it is one of this
project that asks nobody. Refuses keys that nobody checks, and checks without keys.
*/}}
{{- define "dspark.applications" -}}
{{- $mounted := include "dspark.apiKeysFile" . -}}
{{- $secret := .Values.apiKeys.secretName -}}
{{- $applications := list -}}
{{- $files := list -}}
{{- range $i, $application := (include "dspark.serve" . | fromJson).applications -}}
{{- $place := include "dspark.section" (list $application (printf "applications[%d]." $i) "args.http_config.api_keys") | fromJson -}}
{{- $files = append $files $place.file -}}
{{- $prefix := default "/" $application.route_prefix | trimSuffix "/" -}}
{{- $isOpen := and (empty $place) (eq (toString $application.import_path) "deployments.app:build") -}}
{{- $applications = append $applications (dict "name" (default "default" $application.name) "prefix" $prefix "asks" (not (empty $place)) "isOpen" $isOpen) -}}
{{- end -}}
{{- if and $secret (not (has $mounted $files)) -}}
{{- fail (printf "apiKeys.secretName is set, but no application reads the keys: serveConfigV2 needs applications[].args.http_config.api_keys.file: %s" $mounted) -}}
{{- end -}}
{{- if and (has $mounted $files) (not $secret) -}}
{{- fail (printf "serveConfigV2 reads API keys from %s: name their secret in apiKeys.secretName" $mounted) -}}
{{- end -}}
{{- toJson $applications -}}
{{- end -}}

{{/* CPUs as Ray counts them: whole ones, rounded up. Empty when the quantity is none that this understands. */}}
{{- define "dspark.cpus" -}}
{{- $quantity := toString . -}}
{{- if regexMatch "^[0-9.]+m$" $quantity }}{{ divf (trimSuffix "m" $quantity) 1000 | ceil }}
{{- else if regexMatch "^[0-9.]+$" $quantity }}{{ ceil $quantity }}
{{- end -}}
{{- end -}}

{{/*
The applications of this project, as a JSON array: name, whether autoscaling_config decides how many engines there are, how
many there may be, and how many the workers hold. Refuses engines that could not run on the workers, or not end there.
*/}}
{{- define "dspark.engines" -}}
{{- $values := .Values -}}
{{- $limits := default dict $values.worker.resources.limits -}}
{{- $podsKey := ternary "worker.maxReplicas" "worker.replicas" $values.autoscaling.enabled -}}
{{- $pods := ternary $values.worker.maxReplicas $values.worker.replicas $values.autoscaling.enabled | int -}}
{{- $engines := list -}}
{{- range $i, $application := (include "dspark.serve" . | fromJson).applications -}}
{{/* Others have other args, and where Serve's `deployments` overrule ours, args don't say what counts. */}}
{{- if and (eq (toString $application.import_path) "deployments.app:build") (not $application.deployments) -}}
{{- $at := printf "applications[%d]." $i -}}
{{- $args := include "dspark.section" (list $application $at "args") | fromJson -}}
{{- $engine := include "dspark.section" (list $application $at "args.engine_kwargs") | fromJson -}}
{{- $placed := include "dspark.section" (list $application $at "args.placement_group_config") | fromJson -}}
{{- $deployment := include "dspark.section" (list $application $at "args.deployment_config") | fromJson -}}
{{- $scaling := include "dspark.section" (list $application $at "args.deployment_config.autoscaling_config") | fromJson -}}
{{- $reserved := include "dspark.section" (list $application $at "args.deployment_config.ray_actor_options") | fromJson -}}
{{- $error := printf "serveConfigV2: %sargs.deployment_config" $at -}}
{{- if and $deployment.num_replicas $scaling -}}
{{- fail (printf "%s has num_replicas and autoscaling_config: remove one of them" $error) -}}
{{- end -}}
{{- $numCpus := float64 (default 0 $reserved.num_cpus) -}}
{{- if not (or $numCpus $args.accelerator_type $placed.bundles) -}}
{{- fail (printf "%s.ray_actor_options.num_cpus is missing, so an engine could start on the head: write what num_threads is" $error) -}}
{{- end -}}
{{- $graceful := dig "graceful_shutdown_timeout_s" 10 $deployment -}}
{{- if ge (float64 $graceful) (float64 $values.terminationGracePeriodSeconds) -}}
{{- fail (printf "%s.graceful_shutdown_timeout_s is %v, but pods are killed after terminationGracePeriodSeconds (%v): make that more, or this less" $error $graceful $values.terminationGracePeriodSeconds) -}}
{{- end -}}
{{/* Ranks that a worker holds: at first more than any does. */}}
{{- $ranks := 1000000 -}}
{{- $cpus := include "dspark.cpus" $limits.cpu -}}
{{- if and $numCpus $cpus -}}
{{- $ranks = divf $cpus $numCpus | int -}}
{{- if not $ranks -}}
{{- fail (printf "%s.ray_actor_options.num_cpus is %v, and no worker has so many: worker.resources.limits.cpu is %v" $error $numCpus $limits.cpu) -}}
{{- end -}}
{{- end -}}
{{- if $args.accelerator_type -}}
{{- $gpus := 0 -}}
{{- range $device, $number := $limits -}}
{{- if hasSuffix "gpu" $device }}{{ $gpus = int (toString $number) }}{{ end -}}
{{- end -}}
{{- if not $gpus -}}
{{- fail (printf "serveConfigV2: %sargs.accelerator_type is %s, and no worker has a GPU: worker.resources.limits needs nvidia.com/gpu" $at $args.accelerator_type) -}}
{{- end -}}
{{- $ranks = min $ranks $gpus -}}
{{- end -}}
{{- $size := max 1 (int $engine.tensor_parallel_size) -}}
{{- $holds := div (mul $pods $ranks) $size -}}
{{- $least := coalesce $deployment.num_replicas $scaling.min_replicas $engine.data_parallel_size 1 | int -}}
{{- if lt (int $holds) $least -}}
{{- fail (printf "%s asks for %d engines (ranks of each: %d), and the workers hold %d: raise %s (%d) or worker.resources" $error $least $size $holds $podsKey $pods) -}}
{{- end -}}
{{- $engines = append $engines (dict "name" (default "default" $application.name) "scales" (not (empty $scaling)) "most" (default $least $scaling.max_replicas) "holds" $holds) -}}
{{- end -}}
{{- end -}}
{{- toJson $engines -}}
{{- end -}}
