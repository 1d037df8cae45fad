#!/usr/bin/env bash
# many_gpus.sh PART NUM OUT: what NUM GPUs of one host show, four or eight. PART: tests, steps or served, of at most ten
# minutes each. None has run on GPUs yet.
# SMALL=1: the same of small shapes on a CPU, that everything runs.
set -uo pipefail
failed=0
part=$1 num=$2 out=$3 models=benchmarks/models
mkdir -p "$out"
on=() cut=() kind=nvlink gpus=$num large=llama-3.3-70b sparse=qwen3-235b-a22b served=qwen3-32b
rates=8,16,32 chats=(--concurrency 128 --prompt-len 4096 --output-len 2048 --duration 10)
steps=(--batch 1,32,128 --output-len 64) prompts=(--tokens 2048,8192 --chunk 8192 --graph piecewise --repeat 5)
eight=(--weights fp8)
if [ "${SMALL:-}" ]; then
    on=(--device cpu --sizes 8192 --rows 1 --hidden 256 --calls 1 --replays 1) eight=() kind=shm gpus=0
    cut=(--dtype float32 --page-size 16 --repeat 1) large=small sparse=small-moe served=small
    rates=2,3,4 chats=(--concurrency 8 --prompt-len 256 --output-len 16 --duration 4)
    steps=(--batch 1 --prompt-len 16 --output-len 12) prompts=(--tokens 16,32)
    [ "$num" = 8 ] && sparse=small # of eight heads
fi
limited() { # SECONDS NAME COMMAND...: its end in NAME.log; one that fails or hangs leaves the rest
    echo "== $2"
    timeout --kill-after 20 "$1" "${PYTHON:-python}" -m "${@:3}" >"$out/$2.log" 2>&1
    local code=$?
    echo "exit $code"
    tail -n 12 "$out/$2.log"
    [ $code = 0 ] || failed=1
    return $code
}
engine() { # NAME SHAPE OPTION...
    local shape=$models/$2.json name=$1
    limited 200 "$name" benchmarks.engine --model-config "$shape" --tp "$num" --cached "${steps[@]}" --repeat 2 \
        "${cut[@]}" "${@:3}" --json "$out/$name.json"
    limited 120 "$name-prompts" benchmarks.engine --model-config "$shape" --tp "$num" --phase prefill --batch 1 \
        "${prompts[@]}" "${cut[@]}" "${@:3}" --json "$out/$name-prompts.json"
}
cluster() { # NAME OPTION...
    limited 190 "$1" benchmarks.gpu_cluster --gpus "$gpus" --kind "$kind" --model-config "$models/$served.json" \
        "${chats[@]}" --rates "$rates" --out "$out/$1" "${@:2}"
}
case $part in
tests)
    limited 540 ranks pytest -p no:cacheprovider -rs -k "4 or all_reduce" --durations 9 \
        tests/gpu/test_{all_reduce,ranks}_on_cuda.py tests/contract/test_collective.py & # they take little memory
    beside=$!
    limited 540 clusters pytest -p no:cacheprovider -rs -k "4 or 2-nvlink or (ranks and nvlink)" --durations 9 \
        tests/gpu/test_{cluster,kills}_on_cuda.py
    wait $beside || failed=1
    ;;
steps)
    limited 120 all-reduce benchmarks.all_reduce --ranks "$num" "${on[@]}" --json "$out/all-reduce.json"
    engine dense "$large"
    engine experts "$sparse" "${eight[@]}"
    ;;
served)
    p=$((num * 3 / 8)) two=$((num / 4))
    [ "$num" = 4 ] && p=2
    cluster divided --set prefill.replicas=$p --set "decode.replicas=$((num - p))" \
        --rates "$rates,12" --turn ,,,decode-1=prefill # under the last one
    cluster ranks --set prefill.replicas=$two --set prefill.tp=2 --set decode.replicas=$two --set decode.tp=2
    cluster both --mode never --set prefill.replicas=0 --set "decode.replicas=$num"
    ;;
esac
exit $failed
