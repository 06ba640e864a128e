#!/bin/sh
# The nodes' own copy of `ftslurm health`: installed as PREFIX/bin/ftslurm-health, run by root.
# Nothing of the caller's environment is handed on but what Slurm says of the job, so that neither
# PYTHONPATH nor LD_LIBRARY_PATH nor the folder it is called in decides what is executed.

# What the installation found here: the interpreter that it has checked, and Slurm where that is not
# in its usual place, since a HealthCheckProgram is told nothing but SLURMD_NODENAME.
python=/usr/bin/python3
slurm_bin=
slurm_conf=

PATH=${slurm_bin:+$slurm_bin:}/usr/sbin:/usr/bin:/sbin:/bin
export PATH
prefix=$(dirname "$(dirname "$(readlink -f "$0")")")
cd / || exit 3
SLURM_CONF=${SLURM_CONF:-$slurm_conf}
exec env -i PATH="$PATH" LC_ALL=C \
    ${SLURM_CONF:+SLURM_CONF="$SLURM_CONF"} \
    ${SLURMD_NODENAME:+SLURMD_NODENAME="$SLURMD_NODENAME"} \
    ${SLURM_JOB_ID:+SLURM_JOB_ID="$SLURM_JOB_ID"} \
    ${SLURM_JOB_USER:+SLURM_JOB_USER="$SLURM_JOB_USER"} \
    ${SLURM_JOB_UID:+SLURM_JOB_UID="$SLURM_JOB_UID"} \
    ${SLURM_JOB_GPUS:+SLURM_JOB_GPUS="$SLURM_JOB_GPUS"} \
    ${SLURM_JOB_PARTITION:+SLURM_JOB_PARTITION="$SLURM_JOB_PARTITION"} \
    "$python" -I -S "$prefix/lib/ftslurm/health/start.py" "$@"
