#!/bin/sh
# HealthCheckProgram of slurm.conf, every few minutes on all nodes: what shows between jobs, and the
# lifting of our own drains.
#     HealthCheckProgram=/opt/ftslurm/site/healthcheck.sh
#     HealthCheckInterval=300
#     HealthCheckNodeState=ANY,CYCLE
# NONDRAINED_IDLE would never see a node that is drained, and so never lift a drain. Slurm ends this
# after 60 s and looks at no exit code.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
"$(dirname "$(readlink -f "$0")")/../bin/ftslurm-health" periodic "$@"
code=$?
[ $code -eq 0 ] || timeout 2 logger -t ftslurm-health "periodic: the look broke, exit code $code"
exit 0
