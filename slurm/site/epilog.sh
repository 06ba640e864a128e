#!/bin/sh
# Epilog of slurm.conf, after a job, before its node is free again: a sick node is drained.
#     Epilog=/opt/ftslurm/site/epilog.sh
# With a script of your own: call this one from it and hand on its exit code. Arguments go to
# `ftslurm-health epilog`, e.g. --settings FILE.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
"$(dirname "$(readlink -f "$0")")/../bin/ftslurm-health" epilog "$@"
code=$?
# Slurm drains the node for anything but 0. 86 alone says that it is sick; all else is a look that
# has broken (1: Python itself could not start), and that takes no node out of service.
[ $code -eq 86 ] && exit 1
[ $code -eq 0 ] || timeout 2 logger -t ftslurm-health "epilog: the look broke, exit code $code"
exit 0
