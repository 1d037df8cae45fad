{{- /* Mistakes that no schema can know: each names the value and what to do. */ -}}
{{- define "kvlane.checks" -}}
{{- $root := . -}}
{{- $config := .Values.config -}}
{{- $ours := dict "cluster.host" "" "cluster.port" "" "cluster.local_ray" "" "router.api_key_file" "serve.apiKeys" "router.tls_cert_file" "serve.tls" "router.tls_key_file" "serve.tls" -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $_ := set $ours (printf "%s.replicas" $pool) (printf "%s.replicas" $pool) -}}
{{- $_ := set $ours (printf "%s.num_cpus" $pool) (printf "%s.cpus" $pool) -}}
{{- $_ := set $ours (printf "%s.num_gpus" $pool) (printf "%s.gpus" $pool) -}}
{{- $_ := set $ours (printf "%s.tp" $pool) (printf "%s.gpus" $pool) -}}
{{- $_ := set $ours (printf "%s.resources" $pool) "" -}}
{{- $_ := set $ours "routers.num_cpus" "" -}}
{{- $_ := set $ours "routers.resources" "" -}}
{{- end -}}
{{- if ne .Values.model.source "image" -}}
{{- $_ := set $ours "model.path" "model.source" -}}
{{- $_ := set $ours "model.revision" "model.hf.revision" -}}
{{- end -}}
{{- range $path, $instead := $ours -}}
{{- $section := index $config (splitList "." $path | first) | default dict -}}
{{- if hasKey $section (splitList "." $path | last) -}}
{{- fail (printf "config.%s: the chart passes it to serve%s" $path (ternary "; remove it" (printf "; set %s" $instead) (empty $instead))) -}}
{{- end -}}
{{- end -}}
{{- $cluster := $config.cluster -}}
{{- $needed := addf (mulf 2 (addf (default 5 (get $cluster "drain_timeout_s")) (default 5 (get $cluster "stop_timeout_s")))) 30 | ceil | int -}}
{{- range $component := list "prefill" "decode" "serve" -}}
{{- if lt (index $root.Values $component "terminationGracePeriodSeconds" | int) $needed -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: config.cluster.drain_timeout_s needs %d" $component $needed) -}}
{{- end -}}
{{- end -}}
{{- $kind := dig "transport" "kind" "auto" $config -}}
{{- if or (has $kind (list "shm" "nvlink")) (eq (dig "transport" "name" "auto" $config) "shm") -}}
{{- fail "config.transport: shm and nvlink do not reach from pod to pod; leave it out (TCP) or set {name: mooncake, kind: rdma}" -}}
{{- end -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $values := index $root.Values $pool -}}
{{- if and $values.rdma.enabled (ne $kind "rdma") -}}
{{- fail (printf "%s.rdma.enabled: config.transport.kind is %s, so KV would go over TCP; set config.transport {name: mooncake, kind: rdma}" $pool $kind) -}}
{{- end -}}
{{- if ne $values.autoscaling.kind "none" -}}
{{- if eq $root.Values.cluster.kind "kuberay" -}}
{{- fail (printf "%s.autoscaling: the pods of cluster.kind kuberay are KubeRay's; set kind: none" $pool) -}}
{{- end -}}
{{- if lt (int $values.autoscaling.maxReplicas) (int $values.replicas) -}}
{{- fail (printf "%s.autoscaling.maxReplicas: is below %s.replicas" $pool $pool) -}}
{{- end -}}
{{- if and (eq $values.autoscaling.kind "keda") (not $values.autoscaling.keda.serverAddress) -}}
{{- fail (printf "%s.autoscaling.keda.serverAddress: where is Prometheus?" $pool) -}}
{{- end -}}
{{- if not $root.Values.monitoring.podMonitor.enabled -}}
{{- fail (printf "%s.autoscaling: it reads metrics of the workers; set monitoring.podMonitor.enabled" $pool) -}}
{{- end -}}
{{- end -}}
{{- if and $values.pdb.enabled (ge (int $values.pdb.maxUnavailable) (int $values.replicas)) -}}
{{- fail (printf "%s.pdb.maxUnavailable: %s.replicas is %d, so it would guard nothing" $pool $pool (int $values.replicas)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring -}}
{{- if and .prometheusRule.enabled (not (and .serviceMonitor.enabled .podMonitor.enabled)) -}}
{{- fail "monitoring.prometheusRule: alerts read metrics of routers and workers; enable serviceMonitor and podMonitor" -}}
{{- end -}}
{{- $guarded := and $root.Values.serve.apiKeys.existingSecret (ne (dig "router" "admin_access" "auto" $config) "open") -}}
{{- if and .serviceMonitor.enabled $guarded (not .serviceMonitor.apiKey.existingSecret) -}}
{{- fail "monitoring.serviceMonitor.apiKey: with serve.apiKeys, /metrics asks for a key; name a Secret that holds one, or set config.router.admin_access: open" -}}
{{- end -}}
{{- if and .podMonitor.enabled (not (get $cluster "worker_metrics_port" | int)) -}}
{{- fail "config.cluster.worker_metrics_port: monitoring.podMonitor needs a fixed port" -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.cluster.kind "kuberay" -}}
{{- if .Values.ray.gcsFaultTolerance.enabled -}}
{{- fail "ray.gcsFaultTolerance: only with cluster.kind plain" -}}
{{- end -}}
{{- if ne .Values.ray.token.key "auth_token" -}}
{{- fail "ray.token.key: KubeRay reads auth_token" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: which Gateway?" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: which names?" -}}
{{- end -}}
{{- end -}}
