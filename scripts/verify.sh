#!/bin/sh
# Replays every trace in tests/traces under its recorded policy and limit, and compares the address of each
# allocation with PyTorch's. $1 is the cushion command. Fails if an address differs.
set -u
here=$(dirname "$0")/../tests/traces
told=$(mktemp) || exit 2
trap 'rm -f "$told"' EXIT
worst=0
verify() {
    "$1" replay --verify --json "$2" ${3:+--capacity "$3"} >/dev/null 2>>"$told"
    # Exit code 1 means that PyTorch's recorded out-of-memory error occurred again.
    case $? in 0 | 1) ;; *) worst=1 ;; esac
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
sed "s|^cushion: .*tests/traces/||" "$told"
sed -n "s/.*: \([0-9]*\) of \([0-9]*\) allocations at PyTorch's address/\1 \2/p" "$told" |
    awk '{ same += $1; all += $2 } END { printf "%d of %d allocations at the address PyTorch chose, %d traces\n", same, all, NR }'
exit $worst
