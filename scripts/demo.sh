#!/bin/sh
# The main job on a machine with no GPU: a training run that died on a 24 GiB card, replayed under
# each policy. $1 is the cushion command.
set -u
here=$(dirname "$0")/../tests/traces
say() { printf '\n%s\n' "$*"; }
# Runs cushion and insists on the exit code that the story needs.
expect() {
    code=$1; shift
    "$@"
    got=$?
    if [ $got -ne "$code" ]; then
        echo "demo: exit code $got, not $code: $*" >&2
        exit 1
    fi
}

say 'A recorded run (a Llama model, batches of many lengths) under a limit of 24 GiB.'
say "1. What PyTorch's default did, followed address by address, to its out-of-memory error:"
expect 1 "$1" replay "$here/llama_varlen.capped24.pickle.gz" --policy segments --capacity 24GiB --verify
say '2. The same requests on the same card under every policy:'
expect 1 "$1" replay "$here/llama_varlen.capped24.pickle.gz" --capacity 24GiB
say '3. Other recorded runs, on a device with no limit: what each policy holds at its peak.'
expect 0 "$1" replay "$here/vision_multires.pickle.gz" "$here/stream_offload.pickle.gz" \
    "$here/graphs_serving.pickle.gz"
say 'Your own: torch.cuda.memory._record_memory_history(); ...; torch.cuda.memory._dump_snapshot("run.pickle")'
echo "then:     $1 replay run.pickle --capacity 24GiB"
