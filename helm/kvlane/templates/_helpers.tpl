{{- define "kvlane.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $both .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* What selects the pods of this release, of all components. */ -}}
{{- define "kvlane.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvlane.labels" -}}
{{ include "kvlane.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvlane.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "kvlane.serviceAccount" -}}
{{ default (ternary (include "kvlane.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end -}}

{{- define "kvlane.tokenSecret" -}}
{{ default (printf "%s-ray" (include "kvlane.fullname" .)) .Values.ray.token.existingSecret }}
{{- end -}}

{{- /* Where the model lies in the pods; empty: config.model.path says it. */ -}}
{{- define "kvlane.modelPath" -}}
{{- with .Values.model -}}
{{- if eq .source "hf" -}}/models/{{ required "model.hf.name: which model?" .hf.name }}
{{- else if eq .source "s3" -}}/models/{{ required "model.s3.uri: which model?" .s3.uri | trimSuffix "/" | base }}
{{- else if eq .source "pvc" -}}/models/{{ .pvc.path | trimAll "/" }}
{{- else if eq .source "hostPath" -}}/models/{{ required "model.hostPath.path: which directory?" .hostPath.path | trimSuffix "/" | base }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Pools of pods, with spaces between. */ -}}
{{- define "kvlane.pools" -}}
{{ ternary "node" "prefill decode" (eq .Values.workers.layout "node") }}
{{- end -}}

{{- /* Ray's resource that a pool's pods have and its workers ask for. Whatever changes these pods
changes its name, so that after an upgrade no worker starts on a pod that is about to end. */ -}}
{{- define "kvlane.resource" -}}
{{ .pool }}-{{ include "kvlane.podTemplate" (dict "root" .root "component" .pool) | sha256sum | trunc 8 }}
{{- end -}}

{{- /* Workers that a pod may hold, and so its ports of metrics: Ray gives each pod the same number of both
roles if it can. */ -}}
{{- define "kvlane.workersOfAPod" -}}
{{- $all := add .Values.prefill.replicas .Values.decode.replicas -}}
{{- $pods := .Values.workers.node.replicas -}}
{{- $divides := not (or (mod .Values.prefill.replicas $pods) (mod .Values.decode.replicas $pods)) -}}
{{ eq .Values.workers.layout "node" | ternary (ternary (div $all $pods) $all $divides) 1 }}
{{- end -}}

{{- /* Names of these ports, with spaces between. */ -}}
{{- define "kvlane.metricsPorts" -}}
{{- range $i := include "kvlane.workersOfAPod" . | int | until -}}
{{- if $i }} metrics-{{ $i }}{{ else }}metrics{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The same for the head: after an upgrade its Service leads to the new one only. */ -}}
{{- define "kvlane.mark" -}}
{{ include "kvlane.podTemplate" (dict "root" . "component" "head") | sha256sum | trunc 8 }}
{{- end -}}

{{- /* Shell: the options of `ray start` of every node, which would else wait 15 s at most for its
       agents to say which ports they took, and end where they are slower. */ -}}
{{- define "kvlane.rayOptions" -}}
--dashboard-agent-grpc-port=52366 --runtime-env-agent-port=52367 \
      --node-ip-address="$POD_IP" --object-store-memory={{ int64 .Values.ray.objectStoreBytes }} --temp-dir=/tmp/ray --disable-usage-stats
{{- end -}}

{{- define "kvlane.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.serve.tls.existingSecret)) }}
{{- end -}}

{{- define "kvlane.headAddress" -}}
{{ include "kvlane.fullname" . }}-head:6379
{{- end -}}
