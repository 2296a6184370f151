#!/bin/sh
# Install the programs of programs.txt that this machine lacks: what the tests call.
#
#   setup-system.sh            without those that only trials call
#   setup-system.sh --trials   all of them
#
# Does nothing where they are all there. Without the right to install it only says what is missing:
# the tests that need the program fail, and say so themselves.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
PATH=$PATH:/usr/sbin:/sbin # where nft and ip are, which not every user has in the PATH
missing=
while read -r program package caller; do
    case $program in '' | '#'*) continue ;; esac
    [ "$caller" != trial ] || [ "${1-}" = --trials ] || continue
    command -v "$program" >/dev/null && continue
    case " $missing " in *" $package "*) ;; *) missing="$missing $package" ;; esac
done < "$here/programs.txt"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    echo "Missing Debian packages, and no right to install them:$missing" >&2
    exit 0
fi
# One apt at a time: setup-venv.sh may install Python's venv module meanwhile. What packages start
# would inherit the lock without -o.
# shellcheck disable=SC2086  # lists of words
flock -o "$here" $as_root sh -c "apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $missing"
