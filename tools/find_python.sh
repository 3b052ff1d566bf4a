#!/usr/bin/env bash
# Prints a Python of a version that really runs: find_python.sh VERSION OTHERWISE
# pyenv's shim `python3.12` is on the path even where that version is not selected, so each candidate is tried.
set -euo pipefail
version=$1 otherwise=$2

pyenv=${PYENV_ROOT:-$(pyenv root 2>/dev/null || true)}
for candidate in "python$version" "${pyenv:-/nonexistent}/versions/$version"*/bin/python "$otherwise"; do
    found=$("$candidate" -c 'import sys; print(sys.executable, "%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    if [ "${found##* }" = "$version" ]; then
        echo "${found% *}"
        exit
    fi
done
echo "no Python $version found: the Colab-like stack runs on $("$otherwise" -V 2>&1); Colab itself runs on Python $version" >&2
echo "$otherwise"
