{{- /* The pod template of a component: dict root, component (head, prefill, decode, node, serve), resource
(of a pool's nodes) and mark (of the head). */ -}}
{{- define "kvlane.podTemplate" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $has_tier := and (has $component (list "prefill" "decode" "node")) (ne $root.Values.tier.volume "none") -}}
{{- $ft := $root.Values.ray.gcsFaultTolerance -}}
{{- $values := ternary $root.Values.workers.node (index $root.Values $component) (eq $component "node") -}}
{{- $pod := mergeOverwrite (deepCopy $root.Values.pods) $values -}}
{{- $selector := include "kvlane.selector" $root | fromYaml -}}
{{- $_ := set $selector "app.kubernetes.io/component" $component -}}
metadata:
  labels:
    {{- mergeOverwrite (deepCopy $root.Values.commonLabels) $pod.labels $selector | toYaml | nindent 4 }}
    {{- with .mark }}
    kvlane/head: {{ quote . }}
    {{- end }}
  {{- $annotations := deepCopy $pod.annotations }}
  {{- if eq $component "serve" }}
  {{- /* The pod of serve begins anew with the pods of its workers, and with its configuration. */ -}}
  {{- $whole := list $root.Values.config (include "kvlane.mark" $root) | toJson }}
  {{- $_ := set $annotations "kvlane/config" (sha256sum $whole | trunc 16) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "kvlane.serviceAccount" $root }}
  automountServiceAccountToken: false
  {{- if $pod.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ int (ternary $root.Values.serve $values (eq $component "head")).terminationGracePeriodSeconds }}
  {{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" "nodeSelector" "affinity" "tolerations" }}
  {{- with index $pod $key }}
  {{ $key }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml (merge (dict) . (dict "labelSelector" (dict "matchLabels" $selector))) | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- if ne $component "head" }}
  {{- with include "kvlane.download" (dict "root" $root "component" $component "pod" $pod) }}
  {{- nindent 2 . }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ $component }}
      image: {{ include "kvlane.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- include (printf "kvlane.run.%s" (ternary "worker" $component (has $component (list "prefill" "decode" "node")))) . | nindent 6 }}
      env:
        {{- include "kvlane.env" $root | nindent 8 }}
        {{- if and (eq $component "head") $ft.enabled }}
        {{- with $ft.redis }}
        {{- if .address }}
        - {name: RAY_REDIS_ADDRESS, value: {{ .address | quote }}}
        - {name: RAY_external_storage_namespace, value: {{ include "kvlane.fullname" $root }}}
        {{- else }}
        - {name: RAY_gcs_storage, value: rocksdb}
        - {name: RAY_gcs_storage_path, value: /gcs}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pod.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- $resources := deepCopy $values.resources }}
      {{- $security := deepCopy $pod.containerSecurityContext }}
      {{- $devices := dict }}
      {{- with int $values.gpus }}
      {{- $_ := set $devices $values.gpuResource (toString .) }}
      {{- end }}
      {{- if dig "rdma" "enabled" false $values }}
      {{- $_ := set $devices $values.rdma.resource ($values.rdma.count | int | toString) }}
      {{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" (list "IPC_LOCK"))) }}
      {{- end }}
      {{- with $devices }}
      {{- $resources = mergeOverwrite $resources (dict "requests" (deepCopy .) "limits" (deepCopy .)) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      {{- with $security }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: ray-token, mountPath: /etc/kvlane-ray, readOnly: true}
        {{- if and (ne $component "head") (ne $root.Values.model.source "image") }}
        {{- include "kvlane.modelMount" $root | nindent 8 }}
        {{- end }}
        {{- if $has_tier }}
        - {name: tier, mountPath: /var/cache/kvlane}
        {{- end }}
        {{- if eq $component "serve" }}
        - {name: config, mountPath: /etc/kvlane, readOnly: true}
        {{- if $values.apiKeys.existingSecret }}
        - {name: keys, mountPath: /etc/kvlane-keys, readOnly: true}
        {{- end }}
        {{- if $values.tls.existingSecret }}
        - {name: tls, mountPath: /etc/kvlane-tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if and (eq $component "head") $ft.enabled (not $ft.redis.address) }}
        - {name: gcs, mountPath: /gcs}
        {{- end }}
        {{- if and (eq $component "head") $ft.redis.existingSecret }}
        - {name: redis, mountPath: /etc/kvlane-redis, readOnly: true}
        {{- end }}
        {{- with $pod.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pod.shmSize }}}}
    - {name: ray-token, secret: {secretName: {{ include "kvlane.tokenSecret" $root }}, items: [{key: {{ $root.Values.ray.token.key }}, path: token}]}}
    {{- if and (ne $component "head") (ne $root.Values.model.source "image") }}
    {{- include "kvlane.modelVolume" $root | nindent 4 }}
    {{- end }}
    {{- if $has_tier }}
    {{- include "kvlane.tierVolume" $root | nindent 4 }}
    {{- end }}
    {{- if eq $component "serve" }}
    - {name: config, configMap: {name: {{ include "kvlane.fullname" $root }}}}
    {{- with $values.apiKeys }}
    {{- if .existingSecret }}
    - {name: keys, secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: keys}]}}
    {{- end }}
    {{- end }}
    {{- with $values.tls.existingSecret }}
    - {name: tls, secret: {secretName: {{ . }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}}
    {{- end }}
    {{- end }}
    {{- if and (eq $component "head") $ft.redis.existingSecret }}
    - {name: redis, secret: {secretName: {{ $ft.redis.existingSecret }}, items: [{key: {{ $ft.redis.key }}, path: password}]}}
    {{- end }}
    {{- with $pod.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "kvlane.env" -}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /tmp/home}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /etc/kvlane-ray/token}
# Engines must not give way to other processes, nor be killed for memory that they were given.
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_memory_monitor_refresh_ms, value: "0"}
{{- with .Values.ray.healthCheck }}
- {name: RAY_health_check_initial_delay_ms, value: {{ .initialDelayMs | quote }}}
- {name: RAY_health_check_period_ms, value: {{ .periodMs | quote }}}
- {name: RAY_health_check_timeout_ms, value: {{ .timeoutMs | quote }}}
- {name: RAY_health_check_failure_threshold, value: {{ .failureThreshold | quote }}}
{{- end }}
{{- end -}}

{{- define "kvlane.run.head" -}}
command: [sh, -ec]
args:
  - |
    mkdir -p "$HOME"
    exec ray start --head --block --port=6379 --num-cpus=0 --num-gpus=0 --dashboard-host=0.0.0.0 \
      {{- if .root.Values.ray.gcsFaultTolerance.redis.existingSecret }}
      --redis-password="$(cat /etc/kvlane-redis/password)" \
      {{- end }}
      {{ include "kvlane.rayOptions" .root }}
{{- with .root.Values.config.cluster }}
# serve and its workers need this head while they drain.
lifecycle:
  preStop:
    exec:
      command: [sleep, "{{ addf 10 (default 5 (get . "drain_timeout_s")) (default 5 (get . "stop_timeout_s")) | ceil | int }}"]
{{- end }}
ports:
  - {name: ray-agent, containerPort: 52365}
  - {name: gcs, containerPort: 6379}
  - {name: dashboard, containerPort: 8265}
startupProbe:
  tcpSocket: {port: gcs}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  tcpSocket: {port: gcs}
livenessProbe:
  httpGet: {path: /api/gcs_healthz, port: dashboard}
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "kvlane.run.worker" -}}
{{- $is_node := eq .component "node" -}}
{{- $pool := ternary .root.Values.workers.node (index .root.Values .component) $is_node -}}
{{- $ranks := max 1 (int $pool.gpus) -}}
{{- $first := get .root.Values.config.cluster "worker_metrics_port" | int -}}
command: [sh, -ec]
args:
  - |
    mkdir -p "$HOME"
    exec ray start --block --address={{ include "kvlane.headAddress" .root }} \
      --num-cpus={{ ternary $pool.cpus (mul $pool.cpus $ranks) $is_node | int }} --num-gpus={{ int $pool.gpus }} \
      --resources='{"{{ .resource }}": {{ ternary $pool.cpus $ranks $is_node | int }}}' \
      {{ include "kvlane.rayOptions" .root }}
# serve drains before it ends its workers; a node that went first would cut their requests off.
lifecycle:
  preStop:
    exec:
      command: [sh, -c, "while grep -qszE '^ray::(Worker|Rank)Actor' /proc/[0-9]*/cmdline; do sleep 1; done"]
ports:
  {{- if $first }}
  {{- range $i, $name := splitList " " (include "kvlane.metricsPorts" .root) }}
  - {name: {{ $name }}, containerPort: {{ add $first $i }}}
  {{- end }}
  {{- end }}
  - {name: ray-agent, containerPort: 52365}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
  periodSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: ray-agent}
  timeoutSeconds: 5
  failureThreshold: 12
{{- end -}}

{{- define "kvlane.run.serve" -}}
{{- $probe := .root.Values.serve.startupProbe -}}
{{- $scheme := include "kvlane.scheme" .root | upper -}}
command: [sh, -ec]
args:
  - |
    {{- include "kvlane.serveCommand" .root | nindent 4 }}
# Time for the Service to stop sending requests here; then SIGTERM drains.
lifecycle:
  preStop:
    exec:
      command: [sleep, "5"]
ports:
  - {name: ray-agent, containerPort: 52365}
  - {name: http, containerPort: 8000}
startupProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: {{ int $probe.periodSeconds }}
  failureThreshold: {{ int $probe.failureThreshold }}
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /live, port: http, scheme: {{ $scheme }}}
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- /* Shell: a Ray node without room for workers, and serve in the foreground, which gets the signals. */ -}}
{{- define "kvlane.serveCommand" -}}
{{- $root := . -}}
mkdir -p "$HOME"
ray start --address={{ include "kvlane.headAddress" . }} --num-cpus=0 --num-gpus=0 \
  {{ include "kvlane.rayOptions" . }}
exec kvlane serve --address={{ include "kvlane.headAddress" . }} --config=/etc/kvlane/config.yaml \
  --host=0.0.0.0 --port=8000
{{- with include "kvlane.modelPath" . }} --model={{ . }}{{ end }}
{{- with .Values.model }}
{{- if and (eq .source "hf") (not (dig "model" "served_name" "" $root.Values.config)) }} \
  --set=model.served_name={{ .hf.name }}
{{- end }}
{{- end }}
{{- if .Values.serve.apiKeys.existingSecret }} \
  --api-key-file=/etc/kvlane-keys/keys
{{- end }}
{{- if .Values.serve.tls.existingSecret }} \
  --set=router.tls_cert_file=/etc/kvlane-tls/tls.crt --set=router.tls_key_file=/etc/kvlane-tls/tls.key
{{- end }}
{{- if ne .Values.tier.volume "none" }} \
  --set=kv.tier.directory=/var/cache/kvlane/kv
{{- end }}
{{- $is_node := eq .Values.workers.layout "node" }}
{{- if $is_node }} \
  --set=cluster.worker_metrics_ports={{ include "kvlane.workersOfAPod" . }}
{{- end }}
{{- range $pool := list "prefill" "decode" }}
{{- $values := index $root.Values $pool }}
{{- $resource := include "kvlane.resource" (dict "root" $root "pool" (ternary "node" $pool $is_node)) }} \
  --{{ $pool }}={{ int $values.replicas }} --set={{ $pool }}.tp={{ max 1 (int $values.gpus) }} \
  --set={{ $pool }}.num_cpus={{ int $values.cpus }} --set={{ $pool }}.num_gpus={{ min 1 (int $values.gpus) }} \
  --set='{{ $pool }}.resources={"{{ $resource }}": 1}'
{{- end }}
{{- end -}}
