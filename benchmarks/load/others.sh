#!/usr/bin/env bash
# others.sh TOOL: 20 requests of a load tool of others, or vllm-router, as its users start it. README.md explains its
# figures. Of the environment: URL; MODEL and TOKENIZER (a directory), by default as /v1/models tells.
set -euo pipefail
URL=${URL:-http://127.0.0.1:8000}
card() {
    curl --fail --silent --show-error "$URL/v1/models" |
        python3 -c "import json, sys; print(json.load(sys.stdin)['data'][0]['$1'])"
}
MODEL=${MODEL:-$(card id)}
TOKENIZER=${TOKENIZER:-$(card root)}
unset HF_HUB_OFFLINE # with it aiperf 0.13 takes no directory
set -x
case ${1:-} in
guidellm)
    exec guidellm run --backend "kind=openai_http,target=$URL" --profile kind=concurrent,streams=4 \
        --constraint kind=max_requests,count=20 --tokenizer "kind=hf_auto,model=$TOKENIZER" \
        --data kind=synthetic_text,prompt_tokens=64,output_tokens=32 --output kind=json,path=guidellm.json
    ;;
aiperf)
    exec aiperf profile --url "$URL" --model "$MODEL" --tokenizer "$TOKENIZER" --endpoint-type chat --streaming \
        --use-server-token-count --synthetic-input-tokens-mean 64 --output-tokens-mean 32 \
        --extra-inputs ignore_eos:true --request-count 20 --concurrency 4 --ui-type none --no-gpu-telemetry \
        --artifact-dir aiperf
    ;;
vllm)
    exec vllm bench serve --base-url "$URL" --model "$MODEL" --tokenizer "$TOKENIZER" --dataset-name random \
        --random-input-len 64 --random-output-len 32 --num-prompts 20 --max-concurrency 4 \
        --save-result --result-filename vllm.json
    ;;
inference-perf)
    exec inference-perf --server.type vllm --server.base_url "$URL" --server.model_name "$MODEL" \
        --server.ignore_eos true --tokenizer.pretrained_model_name_or_path "$TOKENIZER" \
        --api.type completion --api.streaming true --data.type random \
        --data.input_distribution.type fixed --data.input_distribution.mean 64 \
        --data.output_distribution.type fixed --data.output_distribution.mean 32 \
        --load.type concurrent --load.stages '[{"num_requests": 20, "concurrency_level": 4}]'
    ;;
vllm-router)
    exec vllm-router --port 30000 --worker-urls "$URL" --disable-retries --disable-circuit-breaker \
        --health-check-endpoint /ready
    ;;
*)
    exec kvlane bench --url "$URL" --num 20 --warmup 0 --concurrency 4 --json kvlane.json
    ;;
esac
