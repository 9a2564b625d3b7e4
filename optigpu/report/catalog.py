"""Tables of techniques, of models, of this machine and of jobs, and several reports as one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

from optigpu.backends import BACKENDS
from optigpu.documents.result import Accelerator, CpuSetup, Environment
from optigpu.documents.views import JobPage, JobSummary
from optigpu.hardware.device_kinds import no_device
from optigpu.models.bring import is_brought
from optigpu.models.families import family_of
from optigpu.models.held import held_models
from optigpu.models.reference import (
    BUNDLED,
    IMAGE_PRESETS,
    PRESETS,
    TRAINED,
    bundled_config,
    bundled_parameters,
)
from optigpu.report.formats import MISSING, Grid, columns, short, tabulated
from optigpu.report.leaderboard import asked_text
from optigpu.report.rows import heading
from optigpu.selftest import kept
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique, conflict_between
from optigpu.vocabulary import DeviceKind, Document, SpecError
from optigpu.workloads import kinds_with


def technique_facts(environment: Environment, device: DeviceKind) -> list[Document]:
    """Every technique as plain JSON, and whether it works on a machine. `problem` says why it cannot run there, null
    when it can; `suits` whether a ladder without a named stack tries it."""
    facts: list[Document] = []
    failed = kept.read(environment, device).failed_techniques
    for name, kind in TECHNIQUES.items():
        problem = _problem(kind, environment, device) or failed.get(name)
        suits = problem is None and kind(name=name).suits(environment, device)
        facts.append(technique_fact(kind) | {"device": str(device), "problem": problem, "suits": suits})
    return facts


def technique_fact(kind: type[Technique]) -> dict[str, Any]:
    """The facts of a technique; `parameters` hold the values or the type of each, and its default."""
    return {
        "name": kind.model_fields["name"].default,
        "layer": str(kind.layer),
        "summary": kind.summary,
        "expected": [
            {"basis": str(each.basis), "text": each.text, "source": each.source} for each in kind.expected
        ],
        "citation": kind.citation,
        "version": kind.version,
        "requires": list(kind.requires),
        "conflicts": {  # one may be declared on either side
            name: why
            for name, other in TECHNIQUES.items()
            if other is not kind and (why := conflict_between(kind, other))
        },
        "compared_with": list(kind.compared_with),
        "workloads": list(kinds_with(kind.tasks)),
        "backends": list(kind.backends),
        "devices": [str(device) for device in kind.devices],
        "elsewhere": {str(device): reason for device, reason in kind.elsewhere().items()},
        "cautionary": kind.cautionary,
        "parameters": {
            name: {"values": _values(field.annotation), "default": field.default}
            for name, field in kind.model_fields.items()
            if name != "name"
        },
    }


def _values(annotation: object) -> list[str] | str:
    """The values of a Literal, or the name of a type."""
    is_literal = get_origin(annotation) is Literal
    return [str(value) for value in get_args(annotation)] if is_literal else _type_name(annotation)


def _type_name(annotation: object) -> str:
    """ "str | None"."""
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    return " | ".join(map(_type_name, get_args(annotation))) or str(annotation)


def _problem(kind: type[Technique], environment: Environment, device: DeviceKind) -> str | None:
    name = kind.model_fields["name"].default
    if not environment.has(device):
        return f"{no_device(device, environment)}."
    if device not in kind.devices:
        return kind(name=name).not_on(device)
    missing = [BACKENDS[backend].missing(environment) for backend in kind.backends]
    return missing[0] if all(missing) else kind(name=name).check(environment, device, None)


def techniques_grid(facts: Sequence[Document]) -> Grid:
    """The techniques, and whether each works on the machine of the facts."""
    device = facts[0]["device"]
    return tabulated(
        f"Techniques, on this machine's {device}",
        facts,
        {
            "name": lambda fact: fact["name"],
            "layer": lambda fact: fact["layer"],
            "what it does": lambda fact: fact["summary"],
            "needs": lambda fact: ", ".join(fact["requires"]),
            "excludes": lambda fact: ", ".join(fact["conflicts"]),
            f"works on {device}": lambda fact: (
                fact["problem"] or ("yes" if fact["suits"] else "when asked for")
            ),
        },
        [f"{fact['name']}: {parameters_text(fact)}" for fact in facts if fact["parameters"]],
        faint=lambda fact: bool(fact["problem"]),
    )


def parameters_text(fact: Document) -> str:
    """`mode = default | reduce-overhead (default: default)`"""
    texts = []
    for name, parameter in fact["parameters"].items():
        values = parameter["values"]
        choices = " | ".join(values) if isinstance(values, list) else values
        texts.append(f"{name} = {choices} (default: {parameter['default']})")
    return "; ".join(texts)


def environment_grid(environment: Environment) -> Grid:
    """The hardware and software of a machine. What the system does not report is "unknown"."""
    source = environment.host_id_source
    driver = environment.driver or "none"
    container = environment.container or "none detected"
    facts = {
        "hardware class": environment.hardware_class,
        "hardware fingerprint": environment.hardware_fingerprint or "unknown",
        "host id": environment.host_id + (f" (from the {source.replace('_', ' ')})" if source else ""),
        "CPU": f"{environment.cpu_model}, {environment.cpu_cores} cores",
        "CPU features": " ".join(environment.cpu_features) or "none that kernels use",
        "CPU setup": _cpu_setup(environment.cpu_setup),
        "memory": f"{environment.memory_bytes / 2**30:.1f} GiB",
        "GPUs": "; ".join(map(_gpu, environment.accelerators)) or "none",
        "GPU driver": f"{driver}, CUDA up to {environment.cuda}"
        if environment.driver and environment.cuda
        else driver,
        "C++ compiler": environment.compiler or "none: torch_compile on the CPU needs one",
        "system": environment.os,
        "container": f"{container}, image {environment.image}" if environment.image else container,
        "code": _code(environment),
        "software": ", ".join(f"{name} {version}" for name, version in environment.software.items()),
        "software fingerprint": environment.software_fingerprint or "unknown",
    }
    return Grid("This machine", columns("what", "value"), tuple(facts.items()))


def _cpu_setup(setup: CpuSetup) -> str:
    facts = {
        "base": _clock(setup.base_hz),
        "maximum": _clock(setup.max_hz),
        "limit": _clock(setup.limit_hz),
        "governor": setup.governor,
        "boost": _switch(setup.boost),
        "SMT": _switch(setup.smt),
        "NUMA nodes": setup.numa_nodes,
        "hypervisor": {True: "yes", False: "no", None: None}[setup.hypervisor],
    }
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
    unknown = ", ".join(name for name, value in facts.items() if value is None)
    return "; ".join(filter(None, (known, unknown and f"unknown: {unknown}")))


def _gpu(gpu: Accelerator) -> str:
    facts = {
        "architecture": gpu.architecture,
        "SM clock up to": _clock(gpu.clock_max_hz),
        "memory clock up to": _clock(gpu.memory_clock_max_hz),
        "power limit": None if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W",
        "persistence mode": _switch(gpu.persistence_mode),
    }
    known = (f"{name} {value}" for name, value in facts.items() if value is not None)
    return ", ".join([gpu.name, f"{gpu.memory_bytes / 2**30:.0f} GiB", *known])


def _code(environment: Environment) -> str:
    if environment.git_revision is None:
        return "commit unknown"
    changed = {True: ", changed since", False: ", unchanged", None: ""}[environment.git_dirty]
    return f"commit {environment.git_revision[:12]}{changed}"


def _clock(clock_hz: int | None) -> str | None:
    return None if clock_hz is None else f"{clock_hz / 1e9:.2f} GHz"


def _switch(state: bool | None) -> str | None:
    return None if state is None else ("on" if state else "off")


def jobs_grid(page: JobPage) -> Grid:
    cells: dict[str, Callable[[JobSummary], str]] = {
        "id": lambda job: job.id,
        "name": lambda job: job.name or "",
        "state": lambda job: str(job.state),
        "workload": lambda job: job.workload,
        "model": lambda job: job.model or "",
        "plan": lambda job: job.plan,
        "device": lambda job: str(job.device),
        "created (UTC)": lambda job: f"{job.created_at:%Y-%m-%d %H:%M:%S}",
        "reason": lambda job: job.reason or "",
    }
    return tabulated("Jobs, the newest first", page.jobs, cells).without_empty_columns()


def runs_grid(runs: Sequence[Document]) -> Grid:
    """The summaries of kept runs."""
    cells: dict[str, Callable[[Document], str]] = {
        "id": lambda run: run["id"],
        "name": lambda run: run["name"] or "",
        "workload": asked_text,
        "plan": lambda run: run["plan"],
        "results": lambda run: str(run["results"]),
        "best": lambda run: run["best"] or "",
        "measured (UTC)": lambda run: _moment(run["created_at"]),
        "stopped": lambda run: run["stopped"] or "",
    }
    return tabulated("Kept runs, the newest first", runs, cells).without_empty_columns()


def _moment(written: object) -> str:
    """Without what is less than a second, and the time zone."""
    return str(written)[:19].replace("T", " ")


def job_title(spec: Document, results: Sequence[Document]) -> str:
    """The heading of a job's table: its name, the workload, the model and the hardware."""
    name = f"{spec['name']}: " if spec.get("name") else ""
    classes = sorted({result["environment"]["hardware_class"] for result in results})
    where = f" on {', '.join(classes)}" if classes else ""
    return f"{name}{asked_text(spec)}{where}"


def _software(report: Document) -> str:
    environment = report["results"][0]["environment"]
    version = (environment.get("software") or {}).get("torch", "unknown")
    return f"torch {version}, commit {(environment.get('git_revision') or 'unknown')[:10]}"


def _time(report: Document) -> str:
    return _moment(report["results"][0]["created_at"])


DIFFERENCES: tuple[Callable[[Document], str], ...] = (
    lambda report: report["spec"].get("name") or "",
    lambda report: asked_text(report["spec"]),
    lambda report: " and ".join(
        sorted({each["environment"]["hardware_class"] for each in report["results"]})
    ),
    _software,
    _time,
)
"""What may tell reports apart, what a reader looks for first."""


def combined(reports: Sequence[Document]) -> tuple[str, list[Document]]:
    """The title of a chart of one or more reports, and the results in it. Raises SpecError when there is nothing to
    draw, or when figures of different units would share an axis."""
    measured = [report for report in reports if report["results"]]
    if not measured:
        raise SpecError(
            "No report has a result to draw: run `optigpu ladder --model preset:gpt2 --stack int8_weight_only`. "
            "`optigpu show` prints why a run has none."
        )
    if len(measured) == 1:
        return job_title(measured[0]["spec"], measured[0]["results"]), list(measured[0]["results"])
    metrics = sorted({result["variant"]["primary_metric"] for each in measured for result in each["results"]})
    if len(metrics) > 1:
        raise SpecError(
            f"One chart has one unit, and these reports have {', '.join(map(heading, metrics))}; draw them apart."
        )
    names = _names(measured)
    results: list[Document] = [
        {**result, "variant": result["variant"] | {"label": f"{result['variant']['label']} ({name})"}}
        for report, name in zip(measured, names, strict=True)
        for result in report["results"]
    ]
    return " and ".join(dict.fromkeys(asked_text(each["spec"]) for each in measured)), results


def _names(reports: Sequence[Document]) -> list[str]:
    """The first difference that all reports differ in; where there is none, their numbers too."""
    for difference in DIFFERENCES:
        names = [difference(report) for report in reports]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{number}: {_time(report)}" for number, report in enumerate(reports, 1)]


WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight in each dtype that the table has."""
HERE = "here"


def model_facts() -> list[Document]:
    """Each model as plain JSON: what it does, its family, how many weights it has, their bytes by dtype, and how it is
    had: "here", or the command that brings it. What nobody brought and nobody described is null."""
    facts = []
    for name, each in TRAINED.items():
        how = HERE if is_brought(each) else f"optigpu models get {name}"
        fact = _facts(f"path:{name}", "text", each.family, each.parameters, True, each.original)
        facts.append({**fact, "licence": each.licence, "had": how})
    named = {fact["model"] for fact in facts}
    others = [held for held in held_models() if held.startswith("path:") and held not in named]
    unknown = dict.fromkeys(facts[0])
    return [*facts, *({**unknown, "model": held, "had": HERE} for held in others), *_packaged()]


def _packaged() -> list[Document]:
    facts = []
    for name, folder in BUNDLED.items():
        family, parameters = family_of(bundled_config(name)["model_type"]).title, bundled_parameters(name)
        source = f"{folder.name}/MODEL_CARD.md"
        facts.append(_facts(f"bundled:{name}", "text", family, parameters, True, source))
    for does, presets in (("text", PRESETS), ("images", IMAGE_PRESETS)):
        for name, each in presets.items():
            family = family_of(each.model_type).title
            facts.append(_facts(f"preset:{name}", does, family, each.parameters, False, each.source))
    return facts


def _facts(model: str, does: str, family: str, parameters: int, trained: bool, source: str) -> Document:
    return {
        "model": model,
        "for": does,
        "family": family,
        "parameters": parameters,
        **{f"{dtype}_bytes": width * parameters for dtype, width in WIDTHS.items()},
        "trained": trained,
        "source": source,
        "licence": None,
        "had": HERE,
    }


def models_grid(facts: Sequence[Document]) -> Grid:
    """The models, with the bytes of their weights."""
    return tabulated(
        "Models",
        facts,
        {
            "model": lambda fact: fact["model"],
            "for": lambda fact: fact["for"] or MISSING,
            "family": lambda fact: fact["family"] or MISSING,
            "parameters:": lambda fact: MISSING if fact["parameters"] is None else f"{fact['parameters']:,}",
            **{f"{dtype} (MB):": partial(_megabytes, f"{dtype}_bytes") for dtype in WIDTHS},
            "weights": lambda fact: {True: "trained", False: "random", None: MISSING}[fact["trained"]],
            "to be had by": lambda fact: fact["had"],
            "source": lambda fact: fact["source"] or MISSING,
        },
        (
            "Random weights are right for speed and memory, and have no quality.",
            "path:NAME lies in the models folder, OPTIGPU_MODELS_DIR or `models` in the data folder, where you may put "
            "others; any model of the hub is hub:ORG/NAME@REVISION.",
        ),
    )


def _megabytes(name: str, fact: Document) -> str:
    return MISSING if fact[name] is None else short(fact[name] * 1e-6)
