# {{ job.typed }}
# What runs on each host. Its place and the run's secret come on its standard input.
cd {{ job.workdir | quote }} || exit
{% for line in job.cluster.setup %}
{{ line }}
{% endfor %}
{% for name, value in job.cluster.environment.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
{% for name, path in job.cluster.secrets.items() %}
export {{ name }}="$(< {{ path | file }})"
{% endfor %}
export PHALANX_RANKS_PER_NODE={{ job.cluster.ranks }}
{% if job.cluster.interface %}
export PHALANX_INTERFACE={{ job.cluster.interface | quote }}
{% endif %}
export PHALANX_RANK_LOGS={{ logs | quote }}/ranks
exec {{ program }} launch-node {{ words | join_quoted }}
