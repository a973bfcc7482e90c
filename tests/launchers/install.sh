#!/bin/sh
# Install what the tests of srun and mpirun need: Slurm, MUNGE and Open MPI, from the distribution's packages. Does nothing if they
# are there. Without root or apt it says so and succeeds: those tests are then skipped, which in CI is a failure.
set -eu
PATH="$PATH:/usr/sbin"

missing=""
for program in munged slurmctld slurmd srun mpirun; do
    command -v "$program" > /dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "install.sh: not here:$missing; installing them takes root and apt-get" >&2
    exit 0
fi

# The tests start their own daemons: the runlevel keeps the packages from starting theirs.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get -qq update
apt-get -qq install --no-install-recommends munge slurm-wlm openmpi-bin > /dev/null
