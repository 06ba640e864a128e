#!/usr/bin/env bash
# Make ./.venv from constraints.txt, with an interpreter that every user of the cluster can run:
# a venv keeps a link to its interpreter, and one under root's home (mode 0700) is of no use to a
# job that runs as somebody else.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

reachable() { # every folder above the interpreter may be entered by others
    local path
    path=$(readlink -f "$1") || return 1
    while [ "$path" != / ]; do
        path=$(dirname "$path")
        case $(stat -c %A "$path") in *x | *t) ;; *) return 1 ;; esac
    done
}

usable() { # new enough for torch, and able to make a venv
    [ -x "$1" ] && "$1" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} /usr/bin/python3 /usr/local/bin/python3 \
        $(command -v python3.13 python3.12 python3.11 python3.10 python3 || true); do
        if usable "$candidate" && { [ "$(id -u)" != 0 ] || reachable "$candidate"; }; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

if ! python=$(find_python); then
    if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ]; then
        echo "setup: installing python3-venv from Debian" >&2
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        python=$(find_python)
    else
        echo "setup: error: no Python 3.10 or newer with venv that all users can run;" \
            "install one (Debian: python3-venv) or name it: make setup PYTHON=/path/to/python3" >&2
        exit 1
    fi
fi

echo "setup: $venv from $python ($("$python" -V)); torch and the rest take a minute or more" >&2
umask 022 # jobs run as other users
if [ ! -e "$venv/.complete" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv" # what an interrupted set-up or another interpreter left
    "$python" -m venv "$venv"
fi
# torch is asked for by its exact pin: a range may resolve to another build of several GB.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    "$(grep '^torch==' constraints.txt)" -e '.[train,tokenizers,dev]'
touch "$venv/.complete"
