#!/bin/sh
# Makes the README's picture: the top of the demo's report, drawn by headless Chromium. $1 is the report, $2
# the picture.
set -eu
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
    { echo 'picture: no Chromium found' >&2; exit 1; }
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --hide-scrollbars --user-data-dir="$profile" \
    --window-size=1180,1660 --screenshot="$2" "file://$(realpath "$1")" >/dev/null 2>&1
ls -l "$2"
