{{- /* Mistakes that no schema can know: each names the value and what to do. */ -}}
{{- define "kvlane.checks" -}}
{{- $root := . -}}
{{- $config := .Values.config -}}
{{- $is_node := eq .Values.workers.layout "node" -}}
{{- $node := .Values.workers.node -}}
{{- $pools := splitList " " (include "kvlane.pools" .) -}}
{{- $ours := dict "cluster.host" "" "cluster.port" "" "cluster.local_ray" "" "cluster.worker_metrics_ports" "" "router.api_key_file" "serve.apiKeys" "router.tls_cert_file" "serve.tls" "router.tls_key_file" "serve.tls" -}}
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
{{- if and (ne .Values.tier.volume "none") (dig "kv" "tier" "directory" "" $config) -}}
{{- fail "config.kv.tier.directory: the chart passes it to serve with tier.volume; remove one of both" -}}
{{- end -}}
{{- range $path, $instead := $ours -}}
{{- $section := index $config (splitList "." $path | first) | default dict -}}
{{- if hasKey $section (splitList "." $path | last) -}}
{{- fail (printf "config.%s: the chart passes it to serve%s" $path (ternary "; remove it" (printf "; set %s" $instead) (empty $instead))) -}}
{{- end -}}
{{- end -}}
{{- $cluster := $config.cluster -}}
{{- $needed := addf (mulf 2 (addf (default 5 (get $cluster "drain_timeout_s")) (default 5 (get $cluster "stop_timeout_s")))) 30 | ceil | int -}}
{{- range $component := append $pools "serve" -}}
{{- $values := ternary $node (index $root.Values $component) (eq $component "node") -}}
{{- $component = ternary "workers.node" $component (eq $component "node") -}}
{{- if lt (int $values.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: config.cluster.drain_timeout_s needs %d" $component $needed) -}}
{{- end -}}
{{- end -}}
{{- range $component := concat $pools (list "head" "serve") -}}
{{- $values := ternary $node (index $root.Values $component) (eq $component "node") -}}
{{- if and $root.Values.networkPolicy.enabled (ternary (get $values "hostNetwork") $root.Values.pods.hostNetwork (hasKey $values "hostNetwork")) -}}
{{- fail "networkPolicy.enabled: it does not guard pods with hostNetwork, and shuts them out; set it to false, and close the ports of the nodes to others (deploy/NETWORKS.md)" -}}
{{- end -}}
{{- end -}}
{{- $kind := dig "transport" "kind" "auto" $config -}}
{{- $name := dig "transport" "name" "auto" $config -}}
{{- $near := and (ne $name "mixed") (or (has $kind (list "shm" "nvlink")) (eq $name "shm")) -}}
{{- if and $near (not (and $is_node (eq (int $node.replicas) 1))) -}}
{{- fail "config.transport: shm and nvlink do not reach from pod to pod; leave it out, set {name: mixed} or {name: mooncake, kind: rdma}, or have one pod for all workers (workers.layout: node)" -}}
{{- end -}}
{{- $cpus := 0 -}}
{{- $gpus := 0 -}}
{{- range $role := ternary (list "prefill" "decode") list $is_node -}}
{{- $values := index $root.Values $role -}}
{{- range $key, $_ := $values -}}
{{- if not (has $key (list "replicas" "cpus" "gpus")) -}}
{{- include "kvlane.unread" (dict "path" $role "values" $values "key" $key "why" (printf "is for the pods of workers.layout: role; set workers.node.%s" $key)) -}}
{{- end -}}
{{- end -}}
{{- $ofOne := mul $values.cpus (max 1 (int $values.gpus)) -}}
{{- if and (int $values.replicas) (gt (int $values.gpus) (int $node.gpus)) -}}
{{- fail (printf "%s.gpus: a worker stays in one pod, and workers.node.gpus is %d" $role (int $node.gpus)) -}}
{{- end -}}
{{- $cpus = add $cpus (mul $values.replicas $ofOne) -}}
{{- $gpus = add $gpus (mul $values.replicas $values.gpus) -}}
{{- end -}}
{{- range $key, $asked := ternary (dict "gpus" $gpus "cpus" $cpus) dict $is_node -}}
{{- $given := mul $node.replicas (index $node $key) -}}
{{- if gt (int $asked) (int $given) -}}
{{- fail (printf "workers.node.%s: workers ask for %d together, and %d pods have %d" $key (int $asked) (int $node.replicas) (int $given)) -}}
{{- end -}}
{{- end -}}
{{- if not $is_node -}}
{{- range $key, $_ := $node -}}
{{- include "kvlane.unread" (dict "path" "workers.node" "values" $node "key" $key "why" "is for workers.layout: node") -}}
{{- end -}}
{{- end -}}
{{- range $pool := $pools -}}
{{- $values := ternary $node (index $root.Values $pool) (eq $pool "node") -}}
{{- $pool = ternary "workers.node" $pool (eq $pool "node") -}}
{{- if and $values.rdma.enabled (ne $kind "rdma") -}}
{{- fail (printf "%s.rdma.enabled: config.transport.kind is %s, so KV would go over TCP; set config.transport {name: mooncake, kind: rdma}" $pool $kind) -}}
{{- end -}}
{{- if ne (dig "autoscaling" "kind" "none" $values) "none" -}}
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

{{- /* Refuses a value (dict path, values, key, why) that is not read and not as in values.yaml. */ -}}
{{- define "kvlane.unread" -}}
{{- $usual := fromYaml `
replicas: 1
cpus: 2
gpus: 0
gpuResource: nvidia.com/gpu
rdma: {enabled: false, resource: rdma/ib, count: 1}
resources: {requests: {cpu: "1", memory: 3Gi}, limits: {memory: 6Gi}}
terminationGracePeriodSeconds: 180
pdb: {enabled: false, maxUnavailable: 1}
autoscaling: {kind: none, maxReplicas: 4, waitingPerReplica: 8, keda: {serverAddress: "", pollingInterval: 15, cooldownPeriod: 300}}
` -}}
{{- if ne (index .values .key | toJson) (index $usual .key | toJson) -}}
{{- fail (printf "%s.%s: %s" .path .key .why) -}}
{{- end -}}
{{- end -}}
