#!/bin/sh
# An hour of roles under load, or as many minutes as are given: scripts/soak.sh 5
exec "$(dirname "$0")/../.venv/bin/python" -m phalanx.testing.soak --minutes "${1:-60}"
