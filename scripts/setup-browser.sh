#!/bin/sh
# Installs Chromium for the test of the report, if that needs no questions: as root, on a machine with
# apt-get. Never fails: without a browser, that test says that it is skipped, and why.
for name in chromium chromium-browser google-chrome-stable google-chrome chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
say() { echo "setup-browser: $*" >&2; }
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    say 'there is no Chromium, and it cannot be installed here: install it by hand to test the report in a browser'
    exit 0
fi
say 'installing Chromium (five minutes at most)'
export DEBIAN_FRONTEND=noninteractive
limited() { timeout "$@" </dev/null >/dev/null 2>&1; }
if limited 300 apt-get install -y -q --no-install-recommends chromium ||
    { limited 120 apt-get update -q && limited 300 apt-get install -y -q --no-install-recommends chromium; }; then
    say 'installed'
else
    say 'Chromium could not be installed: the test of the report in a browser will be skipped'
fi
exit 0
