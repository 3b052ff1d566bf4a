#!/usr/bin/env bash
# Rewrites a constraints file with the newest releases: lock.sh PYTHON CONSTRAINTS KEEP-PATTERN WHAT-TO-INSTALL...
# The pins that match KEEP-PATTERN, and the comments, stay as they are.
set -euo pipefail
python=$1 constraints=$2 keep=$3
shift 3

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -Ei "$keep" "$constraints" > "$work/kept"
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint "$work/kept" "$@"
{
    grep '^#' "$constraints"
    "$work/venv/bin/python" -m pip freeze --quiet --exclude torchdebug-magics --exclude setuptools --exclude pip |
        sed -E 's/\+[a-z0-9.]+$//' | LC_ALL=C sort -f
} > "$work/new"
cat "$work/new" > "$constraints"
