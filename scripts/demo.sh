#!/bin/sh
# Replays recorded runs, under every policy, on simulated devices that are too small for PyTorch's
# default allocator, and writes a report. $1 is the cushion command, $2 the folder for the report.
set -u
here=$(dirname "$0")/../tests/traces
out=$2
say() { printf '\n%s\n' "$*"; }
# Runs a command and fails unless it has the expected exit code.
expect() {
    code=$1; shift
    "$@"
    got=$?
    if [ $got -ne "$code" ]; then
        echo "demo: exit code $got, not $code: $*" >&2
        exit 1
    fi
}

say 'A Llama model was trained with batches of many lengths, under a limit of 24 GiB. It ran out of memory.'
say "1. A replay of what PyTorch did, compared address by address, up to its out-of-memory error:"
expect 1 "$1" replay "$here/llama_varlen.capped24.pickle.gz" --policy segments --capacity 24GiB --verify
say '2. The same requests on the same card under every policy, and the smallest card each needs:'
expect 1 "$1" replay "$here/llama_varlen.capped24.pickle.gz" --capacity 24GiB --min-capacity
say '3. A server with CUDA graphs, with 4.5 GiB of a card:'
expect 1 "$1" replay "$here/graphs_serving.pickle.gz" --capacity 4.5GiB --min-capacity
say '4. A report on each run, on one page:'
mkdir -p "$out"
expect 0 "$1" report "$here/llama_varlen.capped24.pickle.gz" --capacity 24GiB -o "$out/llama_varlen.html"
expect 0 "$1" report "$here/graphs_serving.pickle.gz" --capacity 4.5GiB -o "$out/graphs_serving.html"
say 'Your own run: torch.cuda.memory._record_memory_history(); ...; torch.cuda.memory._dump_snapshot("run.pickle")'
echo "then:         $1 report run.pickle --capacity 24GiB"
