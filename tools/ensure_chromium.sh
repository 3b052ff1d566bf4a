#!/usr/bin/env bash
# Finds a Chromium, or installs Debian's: the browser tests drive a real one.
set -euo pipefail

[ -n "${TORCHDEBUG_CHROMIUM:-}" ] && exit 0
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    command -v "$name" >/dev/null && exit 0
done
[ -e "/Applications/Google Chrome.app" ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "no Chromium here: installing it through apt"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
    command -v chromium >/dev/null && exit 0
fi
echo "The browser tests need Chromium: install it (Debian: sudo apt-get install chromium)," \
    "or set TORCHDEBUG_CHROMIUM to the path of a Chrome." >&2
exit 1
