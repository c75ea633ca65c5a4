#!/bin/sh
# The quality table of the demonstration model: magnitude against calibrated, on the same documents.
#
#     tests/bench/quality.sh OUTPUT [cpu|cuda]
#
# About 80 minutes of one core on a CPU. A run that was stopped goes on where it was; what is in
# OUTPUT with another calibration file is refused.
set -eu
output=$1 device=${2:-cpu} m=pruner=magnitude c=pruner=calibrated
here=$(dirname "$0")
run() {
    hs-runtime eval --device "$device" --pruner magnitude --output "$output" "$@"
}
run --suite kl@3072 --scored-prompt 0 --arms "dense,decode=1/1+$m,decode=1/0+$m,decode=0/1+$m" \
    --arms "decode=1/1+$c,decode=1/0+$c,decode=0/1+$c"
run --suite copy --documents 20 --arms "dense,decode=1/1+$m,decode=1/1+$c" # 64 tokens a document
run --suite passkey --arms "dense,decode=1/1+$m,decode=1/1+$c"
run --suite kl@6144 --steps 16 --arms "prefill=1/1+$m,prefill=0/1+$m,prefill=1/0+$m" \
    --arms "prefill=1/1+$c,prefill=0/1+$c,prefill=1/0+$c"
run --suite kl@6144 --steps 16 --arms "max+$m+anchor=chunk+chunk=1024"
if [ "$device" = cpu ]; then # it is simulated
    run --suite kl@3072 --scored-prompt 0 --arms decode=1/1+pruner=unstructured
else # no CPU has it
    run --suite kl@3072 --scored-prompt 0 --arms fp8
fi
python "$here/bench_quality.py" --results "$output" --output "$here/results/$device/quality.jsonl"
