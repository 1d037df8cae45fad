{{- define "kvlane.modelMount" -}}
{{- if eq .Values.model.source "hostPath" -}}
- {name: model, mountPath: {{ include "kvlane.modelPath" . }}, readOnly: true}
{{- else -}}
- {name: model, mountPath: /models, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "kvlane.modelVolume" -}}
{{- with .Values.model -}}
{{- $claim := ternary .pvc.existingClaim .download.existingClaim (eq .source "pvc") -}}
{{- if eq .source "hostPath" -}}
- {name: model, hostPath: {path: {{ .hostPath.path }}, type: Directory}}
{{- else if eq .source "pvc" -}}
- {name: model, persistentVolumeClaim: {claimName: {{ required "model.pvc.existingClaim: which claim?" $claim }}, readOnly: true}}
{{- else if $claim -}}
- {name: model, persistentVolumeClaim: {claimName: {{ $claim }}}}
{{- else -}}
- {name: model, emptyDir: {sizeLimit: {{ .download.sizeLimit }}}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Where the workers of a pod keep KV in files. */ -}}
{{- define "kvlane.tierVolume" -}}
{{- with .Values.tier -}}
{{- if eq .volume "emptyDir" -}}
- {name: tier, emptyDir: {sizeLimit: {{ .emptyDir.sizeLimit }}}}
{{- else if eq .volume "pvc" -}}
- {name: tier, persistentVolumeClaim: {claimName: {{ required "tier.pvc.existingClaim: which claim?" .pvc.existingClaim }}}}
{{- else -}}
- {name: tier, hostPath: {path: {{ required "tier.hostPath.path: which directory?" .hostPath.path }}, type: Directory}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The init container that fetches the model; serve, whose routers tokenize, needs no weights. */ -}}
{{- define "kvlane.download" -}}
{{- $root := .root -}}
{{- $model := $root.Values.model -}}
{{- $path := include "kvlane.modelPath" $root -}}
{{- $whole := ne .component "serve" -}}
{{- if has $model.source (list "hf" "s3") -}}
initContainers:
  - name: download
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- if eq $model.source "hf" }}
    image: {{ include "kvlane.image" $root }}
    command: [sh, -ec]
    args:
      - |
        mkdir -p "$HOME"
        hf download {{ $model.hf.name }}{{ with $model.hf.revision }} --revision={{ . }}{{ end }} --local-dir={{ $path }} \
          --include='*.json' --include='*.jinja'{{ if $whole }} --include='*.safetensors'{{ end }} \
          --exclude='*/*' --exclude='consolidated*'
    env:
      - {name: HOME, value: /tmp/home}
      {{- with $model.hf.endpoint }}
      - {name: HF_ENDPOINT, value: {{ . | quote }}}
      {{- end }}
      {{- with $model.hf.tokenSecret }}
      {{- if .name }}
      - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}}
      {{- end }}
      {{- end }}
    {{- else }}
    image: {{ $model.s3.image.repository }}:{{ $model.s3.image.tag }}
    command: [sh, -ec]
    args:
      - |
        mkdir -p "$HOME"
        aws s3 sync {{ $model.s3.uri }} {{ $path }} --no-progress{{ if not $whole }} --exclude='*.safetensors'{{ end }}
    env:
      - {name: HOME, value: /tmp/home}
      {{- with $model.s3.endpointURL }}
      - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
      {{- end }}
    {{- with $model.s3.secret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    {{- end }}
    {{- with .pod.containerSecurityContext }}
    securityContext:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: model, mountPath: /models}
{{- end -}}
{{- end -}}
