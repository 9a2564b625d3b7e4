"""The kinds of files that are known, one entry of FORMATS each: another one is another entry.

Definitions are those of the tools' documentation and source; docs/serving.md has them side by side, with links.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from optigpu.documents.fields import parse_json, read_bytes
from optigpu.documents.others import OthersFile, Statistic
from optigpu.others.reading import About, Counted, Format, Part, at, moment, objects, text

Statistics = Mapping[Statistic, str]
WHOLE: Statistics = MappingProxyType({"whole": ""})
FROM_SENDING = "counts from when the request was sent, ours under load from when it was to be sent"
OWN_COUNT = "counts the tokens of the text by a tokenizer, unless it was told to take the server's count"
TO_STREAM_END = f"{FROM_SENDING}; ends with the stream, ours with the last token"


def _guidellm_parts(document: object) -> Iterator[Part]:
    in_requests: Statistics = {
        "mean": "mean", "median": "median", "p90": "percentiles.p90", "p95": "percentiles.p95",
        "p99": "percentiles.p99",
    }  # fmt: skip
    counted = (
        Counted("ttft_s", "time_to_first_token_ms.successful.{}", in_requests, 1e-3, FROM_SENDING),
        Counted(
            "tpot_s",
            "inter_token_latency_ms.successful.{}",
            in_requests,
            1e-3,
            "a request counts once for each of its tokens after the first, with ours once",
        ),
        Counted("requests_per_s", "requests_per_second.successful.mean", WHOLE),
        Counted("tokens_per_s", "output_tokens_per_second.successful.mean", WHOLE),
    )
    others = {
        "request_latency": "counts from when the request was sent: request_scheduled_latency was taken",
        "time_per_output_token_ms": "includes the first token, which our tpot_s does not",
        "tokens_per_second": "counts prompt tokens too",
    }
    for benchmark in objects(document, "benchmarks"):
        metrics = at(benchmark, "metrics")
        if isinstance(metrics, Mapping):
            path, differs = "request_latency.successful.{}", TO_STREAM_END
            if at(metrics, "request_scheduled_latency.successful.mean") is not None:
                path, differs = (
                    "request_scheduled_latency.successful.{}",
                    "ends with the stream, ours with the last token",
                )
            latency = Counted("latency_s", path, in_requests, 1.0, differs)
            strategy = text(benchmark, "config.strategy.kind") or text(benchmark, "config.strategy.type_")
            load = f"{strategy or 'load unknown'}, {_counts(metrics, 'request_totals.{}')}"
            yield Part(load, metrics, (*counted, latency), others)


def _counts(document: object, path: str) -> str:
    """How many requests of a load were answered, and how many failed."""
    answered, failed = (text(document, path.format(name)) for name in ("successful", "errored"))
    return f"{answered or '?'} requests, {failed or '?'} failed"


def _aiperf_parts(document: object) -> Iterator[Part]:
    in_requests: Statistics = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
    counted = (
        Counted("ttft_s", "time_to_first_token.{}", in_requests, None, FROM_SENDING),
        Counted("tpot_s", "inter_token_latency.{}", in_requests, None, OWN_COUNT),
        Counted("latency_s", "request_latency.{}", in_requests, None, FROM_SENDING),
        Counted("requests_per_s", "request_throughput.avg", WHOLE, None),
        Counted("tokens_per_s", "output_token_throughput.avg", WHOLE, None, OWN_COUNT),
    )
    others = {
        "inter_chunk_latency": "between chunks of the stream, whatever each holds",
        "output_token_throughput_per_user": "1 over inter_token_latency",
    }
    failed = text(document, "error_request_count.avg") or "0"
    answered = text(document, "request_count.avg") or "?"
    if isinstance(document, Mapping):
        yield Part(f"{answered} requests, {failed} failed", document, counted, others)


def _vllm_parts(document: object) -> Iterator[Part]:
    if not isinstance(document, Mapping):
        return
    in_requests: dict[Statistic, str] = {"mean": "mean", "median": "median", "p99": "p99"}
    in_requests |= {each: each for each in ("p90", "p95") if f"{each}_ttft_ms" in document}
    with_latency = any("_e2el_ms" in name for name in document)  # it is written where it was asked for
    latency = (Counted("latency_s", "{}_e2el_ms", in_requests, 1e-3, FROM_SENDING),) if with_latency else ()
    counted = (
        Counted("ttft_s", "{}_ttft_ms", in_requests, 1e-3, FROM_SENDING),
        Counted("tpot_s", "{}_tpot_ms", in_requests, 1e-3),
        *latency,
        Counted("requests_per_s", "request_throughput", WHOLE),
        Counted("tokens_per_s", "output_throughput", WHOLE),
    )
    others = {
        f"{name}_itl_ms": "between chunks of the stream, of all requests together"
        for name in (*in_requests.values(), "std")
    }
    others["total_token_throughput"] = "counts prompt tokens too"
    rate, answered, failed = (text(document, name) or "?" for name in ("request_rate", "completed", "failed"))
    at_once = text(document, "max_concurrency") or "any number"
    yield Part(
        f"{rate} requests/s, {at_once} at once, {answered} answered, {failed} failed",
        document,
        counted,
        others,
    )


def _benchy_parts(document: object) -> Iterator[Part]:
    counted = (
        Counted("ttft_s", "e2e_ttft.{}", {"mean": "mean"}, 1e-3, FROM_SENDING),
        Counted(
            "tokens_per_s",
            "tg_throughput.mean",
            WHOLE,
            differs="from the first token of any request to the last of all, without each request's first token; "
            "ours counts all tokens from the begin of the run",
        ),
        Counted(
            "prefill_tokens_per_s",
            "pp_throughput.mean",
            WHOLE,
            differs="with several requests at once, to the latest first token of all of them",
        ),
    )
    others = {
        "ttfr": "to the first chunk of any kind, which may hold no token",
        "est_ppt": "ttfr without the estimated latency of the network",
        "tg_req_throughput": "1 over the time per token, averaged as a rate",
        "peak_throughput": "of the best second",
        "peak_req_throughput": "of the best second of a request",
    }
    for run in objects(document, "benchmarks"):
        sizes = {name: text(run, name) or "?" for name in ("prompt_size", "response_size", "concurrency")}
        prompt, answer, at_once = sizes.values()
        depth = text(run, "context_size")
        behind = f" behind {depth}" if depth not in (None, "0") else ""
        measured = {name: value for name, value in run.items() if isinstance(value, Mapping)}
        yield Part(f"pp{prompt} tg{answer}{behind}, {at_once} at once", measured, counted, others)


def _llama_bench_parts(document: object) -> Iterator[Part]:
    for test in objects(document):
        prompt, generated = at(test, "n_prompt"), at(test, "n_gen")
        measured = {
            name: test[name] for name in ("avg_ts", "avg_ns", "stddev_ts", "stddev_ns") if name in test
        }
        depth = f" @ d{text(test, 'n_depth')}" if at(test, "n_depth") else ""
        label = f"pp{prompt} tg{generated}{depth}, {text(test, 'n_threads') or '?'} threads"
        others = {"avg_ns": "of a test without sampling, and without the other half of a request"}
        if prompt and generated:
            yield Part(label, measured, (), {**others, "avg_ts": "counts prompt and new tokens together"})
        elif prompt:
            why = "the passes over the prompt alone, of random tokens, without the choice of a token"
            metric = "prefill_tokens_per_s"
            yield Part(label, measured, (Counted(metric, "avg_ts", {"mean": ""}, differs=why),), others)
        elif generated:
            why = "from an empty context unless it has a depth, fed with random tokens, with the first one"
            yield Part(
                label, measured, (Counted("tokens_per_s", "avg_ts", {"mean": ""}, differs=why),), others
            )


def _optimum_parts(document: object) -> Iterator[Part]:
    spread: Statistics = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
    memory = Counted("host_peak_bytes", "memory.max_ram", WHOLE, None)
    known = {
        "prefill": (Counted("ttft_s", "latency.{}", spread, None),),
        "decode": (Counted("tokens_per_s", "throughput.value", WHOLE, None),),
        "per_token": (
            Counted("tpot_s", "latency.{}", spread, None, "of each token by itself, ours of each request"),
        ),
        "generate": (Counted("latency_s", "latency.{}", spread, None),),
    }
    report = at(document, "report") or document
    for name, target in report.items() if isinstance(report, Mapping) else ():
        found = {kind: at(target, kind) for kind in ("latency", "throughput", "memory", "energy")}
        measured = {kind: value for kind, value in found.items() if isinstance(value, Mapping)}
        counted = (*known.get(name, ()), *([memory] if "memory" in measured and name in known else ()))
        others = {"throughput": "samples over the latency"} if name in ("prefill", "generate") else {}
        yield Part(name, measured, counted, others, f"{name}.")


def _lm_eval_parts(document: object) -> Iterator[Part]:
    results = at(document, "results")
    for task, figures in results.items() if isinstance(results, Mapping) else ():
        if not isinstance(figures, Mapping):
            continue
        shots = text(document, f"n-shot.{task}")
        label = f"{task}, {shots} shots" if shots else task
        filters = [name.removeprefix("acc,") for name in figures if name.startswith("acc,")]
        summed = "by the sum of an ending's log-probabilities, ours by their mean over its characters"
        counted, others = [], {}
        for name in filters:
            if f"acc_norm,{name}" in figures:
                counted.append(Counted("accuracy", f"acc_norm,{name}", WHOLE))
                others[f"acc,{name}"] = summed
            else:
                counted.append(Counted("accuracy", f"acc,{name}", WHOLE, differs=summed))
        yield Part(label, figures, tuple(counted), others, f"{task}.")


def _has(*paths: str) -> Callable[[object], bool]:
    """Whether a document has something at all of these paths."""
    return lambda document: all(at(document, path) is not None for path in paths)


def _optimum_begins(document: object) -> bool:
    report = at(document, "report") or document
    return any(
        at(report, f"{name}.latency.stdev_") is not None for name in ("prefill", "forward", "load_model")
    )


FORMATS = (
    Format(
        "GuideLLM",
        _has("metadata.guidellm_version", "benchmarks"),
        lambda found: About(
            version=text(found, "metadata.guidellm_version"),
            measured_at=moment(at(found, "benchmarks.0.start_time")),
            model=text(found, "benchmarks.0.config.backend.model"),
        ),
        _guidellm_parts,
    ),
    Format(
        "AIPerf",
        _has("input_config", "request_latency.unit"),
        lambda found: About(
            version=text(found, "aiperf_version"),
            measured_at=moment(at(found, "start_time")),
            model=text(found, "input_config.models.items.0.name"),
        ),
        _aiperf_parts,
    ),
    Format(
        "vllm bench serve",
        _has("request_throughput", "mean_ttft_ms", "tokenizer_id"),
        lambda found: About(model=text(found, "model_id")),
        _vllm_parts,
    ),
    Format(
        "llama-benchy",
        _has("latency_mode", "benchmarks.0.response_size"),
        lambda found: About(version=text(found, "version"), model=text(found, "model")),
        _benchy_parts,
    ),
    Format(
        "llama-bench",
        _has("0.build_commit", "0.avg_ts", "0.n_gen"),
        lambda found: About(
            version=text(found, "0.build_number") if at(found, "0.build_number") else None,
            measured_at=moment(at(found, "0.test_time")),
            model=text(found, "0.model_type"),
            hardware=text(found, "0.gpu_info") or text(found, "0.cpu_info"),
        ),
        _llama_bench_parts,
    ),
    Format(
        "optimum-benchmark",
        _optimum_begins,
        lambda found: About(
            version=text(found, "config.environment.optimum_benchmark_version"),
            model=text(found, "config.backend.model"),
            hardware=text(found, "config.environment.gpu.0") or text(found, "config.environment.cpu"),
        ),
        _optimum_parts,
    ),
    Format(
        "lm-evaluation-harness",
        _has("results", "n-shot", "versions"),
        lambda found: About(
            version=text(found, "lm_eval_version"),
            measured_at=moment(at(found, "date")),
            model=text(found, "model_name"),
        ),
        _lm_eval_parts,
    ),
)


def read(path: Path) -> OthersFile | None:
    """What the file of another tool holds; None for a file that is none of them. Raises SpecError if it cannot be read,
    or has no figure that is one of ours."""
    document = parse_json(read_bytes(path), str(path), strict=False)
    for known in FORMATS:
        if known.begins(document):
            return known.read(document)
    return None
