#!/bin/sh
# setup.sh EXTRAS STAMP: put hicache with these extras into .venv, and leave STAMP when all of it is there.
# Says on stderr what it does, and how to mend a Python that cannot do it.
set -eu

extras=$1
stamp=$2

say() { echo "setup: $*" >&2; }

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" && echo "$PYTHON" && return
        say "PYTHON=$PYTHON is not a Python 3.11 or newer that runs here"
        return 1
    fi
    for name in python3 python python3.14 python3.13 python3.12 python3.11; do
        is_new_enough "$name" && echo "$name" && return
    done
    say "hicache needs Python 3.11 or newer and found none."
    say "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python) or say PYTHON=/path/to/python."
    return 1
}

make_venv() {
    python=$(find_python)
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "this Python ($python) has no venv or no pip to put into one."
        say "Debian, Ubuntu: apt install python$version-venv; Fedora: dnf install python3-pip; then run make again."
        return 1
    fi
    say "making .venv with $python"
    "$python" -m venv --clear .venv >&2
}

# A .venv that was left half made, or whose Python is gone, is made again.
.venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv

say "installing hicache[$extras] into .venv; the first time takes some minutes"
if ! .venv/bin/python -m pip install -qq --disable-pip-version-check \
    --constraint constraints.txt --editable ".[$extras]" >&2; then
    say "the installation failed: pip says above what it lacks. What is there already is kept; run make again once it can go on."
    exit 1
fi
touch "$stamp"
