"""Queries that public documents put to vLLM's metrics; what is made for them should find ours.

Variables of dashboards are replaced: the model is `tiny`, the interval a minute. Labels that
Prometheus adds (job, namespace, pod, instance) are left out.
"""

import re
from collections.abc import Iterator

MODEL = "tiny"
OF_MODEL = f'{{model_name="{MODEL}"}}'
KEDA = "vllm-project/production-stack, docs/source/use_cases/autoscaling-keda.rst"
KSERVE = "kserve.github.io, autoscaling of generative inference with KEDA"
KEDA_KV = "docs.cloudeka.ai, KEDA configuration example by KV cache usage"
RULES = "vllm-project/vllm, examples/online_serving/prometheus_grafana/k8s-monitoring"
GRAFANA = "vllm-project/vllm, examples/online_serving/prometheus_grafana/grafana.json"
LLM_D = "llm-d.ai, PromQL query reference"
DRAFTS = "vllm-project/vllm, vllm/v1/spec_decode/metrics.py: what to ask Prometheus for"
WVA = "llm-d workload-variant-autoscaler, saturation metrics"


def _rate(name: str, labels: str = "") -> str:
    return f"rate(vllm:{name}{labels}[1m])"


def _dashboard() -> Iterator[str]:
    """vLLM's example dashboard: old and new names of it."""
    for name in ("e2e_request_latency", "time_per_output_token", "time_to_first_token",
                 "inter_token_latency"):  # fmt: skip
        buckets, total, count = (
            _rate(f"{name}_seconds_{part}", OF_MODEL) for part in ("bucket", "sum", "count")
        )
        yield f"histogram_quantile(0.99, sum by(le) ({buckets}))"
        yield f"{total} / {count}"
    for name in ("running", "swapped", "waiting"):
        yield f"vllm:num_requests_{name}{OF_MODEL}"
    for name in ("gpu", "cpu", "kv"):
        yield f"vllm:{name}_cache_usage_perc{OF_MODEL}"
    for name in ("prompt", "generation"):
        yield _rate(f"{name}_tokens_total", OF_MODEL)
        yield f"sum by(le) (increase(vllm:request_{name}_tokens_bucket{OF_MODEL}[1m]))"
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds",
                 "max_num_generation_tokens"):  # fmt: skip
        yield _rate(f"request_{name}_sum", OF_MODEL)
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{OF_MODEL}[1m]))"


ACCEPTED, OF_ALL = "spec_decode_num_accepted_tokens_total", "histogram_quantile(0.99, sum by"
# (where it is asked, what is asked)
QUERIES: tuple[tuple[str, str], ...] = (
    (KEDA, "vllm:num_requests_waiting"),
    (KEDA, "sum(rate(vllm:num_incoming_requests_total[1m]) > bool 0)"),
    (KSERVE, "vllm:num_requests_running"),
    (KEDA_KV, f"vllm:gpu_cache_usage_perc{OF_MODEL}"),
    (RULES, "vllm:kv_cache_usage_perc"),
    (RULES, f"{OF_ALL} (le, model_name) ({_rate('inter_token_latency_seconds_bucket')}))"),
    (LLM_D, f"{OF_ALL}(le, model_name) ({_rate('time_to_first_token_seconds_bucket')}))"),
    (LLM_D, f"sum({_rate('prefix_cache_hits_total')})"),
    (LLM_D, f"sum({_rate('prefix_cache_queries_total')})"),
    (WVA, f"max_over_time(vllm:kv_cache_usage_perc{OF_MODEL}[1m])"),
    (WVA, f"max_over_time(vllm:num_requests_waiting{OF_MODEL}[1m])"),
    (WVA, "max by (num_gpu_blocks, block_size) (vllm:cache_config_info)"),
    (WVA, " / ".join(_rate(f"request_generation_tokens_{part}", OF_MODEL)
                     for part in ("sum", "count"))),
    (DRAFTS, f"{_rate(ACCEPTED)} / {_rate('spec_decode_num_draft_tokens_total')}"),
    (DRAFTS, f"1 + {_rate(ACCEPTED)} / {_rate('spec_decode_num_drafts_total')}"),
    (DRAFTS, "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
    *((GRAFANA, each) for each in _dashboard()),
)  # fmt: skip

# What an endpoint picker of the Gateway API Inference Extension reads off a page by itself: one
# series of each (kubernetes-sigs/gateway-api-inference-extension, pkg/epp/backend/metrics).
PICKED = {
    "vllm:num_requests_waiting": set[str](),
    "vllm:num_requests_running": set[str](),
    "vllm:kv_cache_usage_perc": set[str](),
    "vllm:gpu_cache_usage_perc": set[str](),  # its releases before vLLM renamed it
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}
SERIES = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby\s*\(([^)]*)\)")


def asked(query: str) -> tuple[set[str], set[str]]:
    """The names of series, and of labels, that a query asks for."""
    found = SERIES.findall(query)
    labels = {each.partition("=")[0].strip() for _, inside in found for each in inside.split(",")}
    grouped = {each.strip() for inside in GROUPED.findall(query) for each in inside.split(",")}
    return {name for name, _ in found}, (labels | grouped) - {""}
