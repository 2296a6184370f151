#!/bin/sh
# Make the virtual environment of this checkout: setup-venv.sh PYTHON DIRECTORY STAMP
#
# An environment that is already there is brought up to date, unless it was made for another place
# or another Python. STAMP is created last, so that an interrupted run is done again.
set -eu

python=$1 venv=$2 stamp=$3
here=$(cd "$(dirname "$0")/.." && pwd)
cd "$here"
origin="$here $($python -c 'import sys; print(sys.version.replace(chr(10), " "))')"

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
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy python3-venv
        $python -m venv "$venv" && return
    fi
    echo "No virtual environment could be made with $python. On Debian or Ubuntu:" >&2
    echo "    sudo apt-get install python3-venv" >&2
    exit 1
}

if [ "$(cat "$venv/.origin" 2>/dev/null)" != "$origin" ]; then
    create
    echo "$origin" > "$venv/.origin"
fi

echo "Installing into $venv: torch and the tools of constraints.txt; this takes minutes once."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e '.[test,dev,examples]'
rm -f "$venv"/.installed-*
touch "$stamp"
