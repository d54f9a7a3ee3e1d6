#!/bin/bash
{% for line in job.header %}
# {{ line }}
{% endfor %}
# The job that a running Ray cluster is given:
#   ray job submit --no-wait --runtime-env-json {{ runtime_env | json | quote }} -- bash {{ script | quote }}
# It takes {{ bundles.text }}, one placement group, and starts the run's ranks there.
cd {{ job.workdir | quote }} || exit
{% for line in job.cluster.setup %}
{{ line }}
{% endfor %}
exec {{ program }} {{ words | join_quoted }}
