#!/bin/sh
# Install what these tests need: Prometheus with promtool, from the distribution's package. Does nothing if they are there. Without root or
# apt it says so and succeeds: the tests are then skipped, which in CI is a failure.
set -eu

missing=""
for program in prometheus promtool; do
    command -v "$program" > /dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "install.sh: not here:$missing; installing them takes root and apt-get" >&2
    exit 0
fi

# The tests start a Prometheus of their own: the package is kept from starting one. Where the machine has a policy, that one holds.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get -qq update
apt-get -qq install --no-install-recommends prometheus > /dev/null
