#!/usr/bin/env bash
# Makes a virtual environment, or brings one up to date: make_venv.sh PYTHON FOLDER CONSTRAINTS WHAT-TO-INSTALL...
# FOLDER/.complete is written last; a folder without it was cut short and is made anew, as is one of another Python.
set -euo pipefail
python=$1 folder=$2 constraints=$3
shift 3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$("$python" -V) is too old for the pinned stack: say which to use, such as  make PYTHON=python3.12 ..." >&2
    exit 1
}
version='import sys; print(sys.version_info[:2])'
if [ ! -e "$folder/.complete" ] || [ "$("$folder/bin/python" -c "$version" 2>/dev/null)" != "$("$python" -c "$version")" ]; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi
rm -f "$folder/.complete"
echo "installing into $folder: a minute or two"
"$folder/bin/python" -m pip install -qq --no-compile --constraint "$constraints" "$@"
"$folder/bin/python" -m pip check
"$folder/bin/python" -W ignore "$(dirname "$0")/compile_imports.py"
touch "$folder/.complete"
