"""The jobs of `optigpu bench`: what a machine does with matrix products, with attention and with decoding. "quick"
takes about two minutes on two cores, "full" about five: more sizes, three processes of each variant, and the same
precision by the layers of a compiled model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.job.plan import default_beside
from optigpu.job.spec import Beside, JobSpec
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.vocabulary import BenchMode, DeviceKind, Precision


@dataclass(frozen=True)
class Sizes:
    """The shapes for one kind of device: sides of matrices, their dtypes, lengths of sequences."""

    sides: tuple[int, ...]
    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]


SIZES: Mapping[tuple[DeviceKind, BenchMode], Sizes] = {
    (DeviceKind.CPU, BenchMode.QUICK): Sizes((512, 1024), ("float32",), (1024,)),
    (DeviceKind.CPU, BenchMode.FULL): Sizes((512, 1024, 2048), ("float32", "bfloat16"), (512, 2048)),
    (DeviceKind.CUDA, BenchMode.QUICK): Sizes((4096,), ("float32", "bfloat16"), (4096,)),
    (DeviceKind.CUDA, BenchMode.FULL): Sizes(
        (2048, 4096, 8192), ("float32", "tf32", "float16", "bfloat16"), (2048, 8192)
    ),
}
PACKED: Mapping[Precision, str] = {Precision.BF16: "bf16", Precision.INT8: "w8", Precision.INT4: "w4"}
"""The weights of native_decode in each precision; eager PyTorch decodes in fp32."""
LAYERS: Mapping[Precision, str] = {
    Precision.BF16: "bf16",
    Precision.INT8: "int8_weight_only",
    Precision.INT4: "int4_weight_only",
}
"""The technique that stores a library's layers in each precision."""
MEASURE: Mapping[BenchMode, Mapping[str, object]] = {
    BenchMode.QUICK: {"replicates": 1, "min_seconds": 2, "max_seconds": 10, "rel_ci": 0.1},
    BenchMode.FULL: {"replicates": 3, "min_seconds": 2, "max_seconds": 10, "rel_ci": 0.05},
}


def brief(mode: BenchMode) -> dict[str, Mapping[str, object]]:
    return {"measure": MEASURE[mode], "limits": {"wait_for_quiet_s": 10}}


def bench_specs(
    environment: Environment, device: DeviceKind, mode: BenchMode, precision: Precision, model: str
) -> tuple[JobSpec, ...]:
    """Matrix products, attention, decoding. Raises SpecError for a model that cannot decode."""
    sizes = SIZES[DeviceKind.CPU if device is DeviceKind.CPU else DeviceKind.CUDA, mode]
    dtypes = sizes.dtypes
    if Ability.TF32 in KINDS[device].lacks:
        dtypes = tuple(name for name in dtypes if name != "tf32")
    shared = {"device": device, **brief(mode), "tags": ["bench", str(mode)]}
    products = {"kind": "matmul", "sizes": sizes.sides, "dtypes": dtypes}
    attention = {"kind": "attention", "lengths": sizes.lengths}
    generate = {"kind": "generate", "prompt_tokens": 32, "new_tokens": 16}
    decoding = {
        "workload": generate,
        "model": model,
        "plan": "ladder",
        "name": f"bench: decoding, {precision}",
    }
    own = JobSpec.model_validate(decoding | shared)
    return (
        JobSpec.model_validate({"workload": products, "name": "bench: matrix products"} | shared),
        JobSpec.model_validate({"workload": attention, "name": "bench: attention"} | shared),
        own.model_copy(update={"beside": tuple(_stacks(environment, own, mode, precision))}),
    )


def _stacks(
    environment: Environment, spec: JobSpec, mode: BenchMode, precision: Precision
) -> Iterator[Beside]:
    """What decodes in this precision beside eager fp32: compiled layers in full mode, and native_decode."""
    if mode is BenchMode.FULL:
        names = (*([LAYERS[precision]] if precision in LAYERS else []), "torch_compile")
        if all(spec.device in TECHNIQUES[name].devices for name in names):
            yield Beside.model_validate({"stack": [{"name": name} for name in names]})
    if precision not in PACKED:
        return
    for each in default_beside(environment, spec.device, spec.workload, spec.backend, spec.model):
        packed = tuple(
            technique.model_copy(update={"weights": PACKED[precision]})
            for technique in each.stack
            if isinstance(technique, NativeDecode)
        )
        if packed:
            yield each.model_copy(update={"stack": packed})
