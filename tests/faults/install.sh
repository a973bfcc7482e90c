#!/bin/sh
# Install what the tests of lost peers need: ip, of the distribution's package iproute2. Does nothing if it is there. Without root or
# apt it says so and succeeds: those tests then fail.
set -eu
PATH="$PATH:/usr/sbin:/sbin"

if command -v ip > /dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "install.sh: not here: ip; installing it takes root and apt-get" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install --no-install-recommends iproute2 > /dev/null
