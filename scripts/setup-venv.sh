#!/bin/sh
# Make the virtual environment of this checkout, without any packages: setup-venv.sh PYTHON DIRECTORY
#
# One that is already there is removed.
set -eu

python=$1 venv=$2
cd "$(dirname "$0")/.."

$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "elaunch needs Python 3.10 or newer; $python is $($python -V 2>&1)." >&2
    echo "Name another one: make PYTHON=python3.12 ..." >&2
    exit 1
}

# Debian ships Python's venv module without ensurepip; it comes with the package python3-venv.
create() {
    rm -rf "$venv"
    if $python -c 'import ensurepip, venv' 2>/dev/null && $python -m venv "$venv"; then
        return
    fi
    rm -rf "$venv"
    if $python -m pip --version >/dev/null 2>&1; then
        tool=$(mktemp -d)
        if $python -m pip install --quiet --target "$tool" virtualenv &&
            PYTHONPATH=$tool $python -m virtualenv --quiet "$venv"; then
            rm -rf "$tool"
            return
        fi
        rm -rf "$tool"
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        flock -o scripts sh -c \
            'apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy python3-venv'
        $python -m venv "$venv" && return
    fi
    echo "No virtual environment could be made with $python. On Debian or Ubuntu:" >&2
    echo "    sudo apt-get install python3-venv" >&2
    exit 1
}

create
