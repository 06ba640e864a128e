#!/bin/sh
# Prolog of slurm.conf, before a job: a sick node is drained, and the job goes elsewhere.
#     Prolog=/opt/ftslurm/site/prolog.sh
# With a script of your own: call this one from it and hand on its exit code. Arguments go to
# `ftslurm-health prolog`, e.g. --settings FILE.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
"$(dirname "$(readlink -f "$0")")/../bin/ftslurm-health" prolog "$@"
code=$?
# Slurm drains the node for anything but 0. 86 alone says that it is sick; all else is a look that
# has broken (1: Python itself could not start), and that takes no node out of service.
[ $code -eq 86 ] && exit 1
[ $code -eq 0 ] || timeout 2 logger -t ftslurm-health "prolog: the look broke, exit code $code"
exit 0
