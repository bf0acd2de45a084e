{{/* The release's name, shortened: a pod's name is also a server's name, and has at most 63 characters. */}}
{{- define "stoker.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $both := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $both .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "stoker.account" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (include "stoker.fullname" .) "default") -}}
{{- end -}}

{{- define "stoker.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "stoker.runs" -}}
{{- default .Release.Namespace .Values.runs.namespace -}}
{{- end -}}

{{- define "stoker.claim" -}}
{{- default (include "stoker.fullname" .) .Values.persistence.existingClaim -}}
{{- end -}}

{{/* Pods of this chart: no root, writes to volumes only, the runtime's default system calls. */}}
{{- define "stoker.podSecurity" -}}
runAsNonRoot: true
{{- if not .Values.platformAssignsUser }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "stoker.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "stoker.pull" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* config.toml. Values are written in JSON, which is valid TOML for text, numbers and lists. */}}
{{- define "stoker.config" -}}
{{- $name := include "stoker.fullname" . -}}
{{- $hosts := list $name -}}
{{- range list "" ".svc" (printf ".svc.%s" .Values.clusterDomain) -}}
{{- $hosts = append $hosts (printf "%s.%s%s" $name $.Release.Namespace .) -}}
{{- end -}}
{{- if .Values.ingress.enabled -}}{{- $hosts = append $hosts .Values.ingress.host -}}{{- end -}}
{{- $server := dict "host" "0.0.0.0" "port" 7380 "cluster" .Values.cluster.name "allowed_hosts" (concat $hosts .Values.allowedHosts | uniq) -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "server" (merge $server (default dict $config.server)) -}}
{{- if not $config.local -}}{{- $_ := set $config "local" (dict "enabled" false) -}}{{- end -}}
{{- range $section := keys $config | sortAlpha -}}
[{{ $section }}]
{{- range $key := keys (get $config $section) | sortAlpha }}
{{ $key }} = {{ get (get $config $section) $key | toJson }}
{{- end }}
{{ end -}}
{{- end -}}

{{/* Settings of the cluster: one `key=value` a line, with values in JSON. */}}
{{- define "stoker.cluster" -}}
{{- $ours := .Values.cluster.stokerImage | default (include "stoker.image" .) -}}
{{- $settings := dict
  "kubeconfig" "in-cluster"
  "namespace" (include "stoker.runs" .)
  "stoker_image" (eq $ours "none" | ternary "" $ours)
  "default_image" .Values.cluster.defaultImage
  "pull_secrets" .Values.runs.pullSecrets
  "pools" .Values.cluster.pools -}}
{{- $settings = merge $settings .Values.cluster.settings -}}
{{- range $key := keys $settings | sortAlpha -}}
{{ $key }}={{ get $settings $key | toJson }}
{{ end -}}
{{- end -}}
