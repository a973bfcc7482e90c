#!/bin/sh
# install.sh "PROGRAM ..." "PACKAGE ...": install the distribution's packages if one of the programs is missing. Without root or apt it
# says so and succeeds: the tests that need them then skip or fail, and in CI a skip is a failure.
set -eu
PATH="$PATH:/usr/sbin:/sbin"

missing=""
for program in $1; do
    command -v "$program" > /dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "install.sh: not here:$missing; installing takes root and apt-get" >&2
    exit 0
fi

# The tests start what they need themselves: neither policy nor runlevel lets a package start its service.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get -qq update
# shellcheck disable=SC2086 # several words
apt-get -qq install --no-install-recommends $2 > /dev/null
