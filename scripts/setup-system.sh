#!/bin/sh
# Install the programs that the tests call and that a bare Debian may lack.
#
# Does nothing where they are all there. Without the right to install it only says what is missing:
# the tests that need the program say so themselves.
set -eu

PATH=$PATH:/usr/sbin:/sbin # where nft and ip are, which not every user has in the PATH
missing=
# program:package
for pair in ps:procps etcd:etcd-server ip:iproute2 nft:nftables faketime:faketime openssl:openssl \
    strace:strace \
    mpirun:openmpi-bin srun:slurm-client slurmctld:slurmctld slurmd:slurmd; do
    command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "Missing Debian packages, and no right to install them:$missing" >&2
    exit 0
fi
$as_root apt-get update -q
# shellcheck disable=SC2086  # a list of words
$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing
