"""The decision guide as data: which optimization suits which memory, task and hardware, and why."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from optigpu.vocabulary import DeviceKind

GUIDE = "the founding documents' decision guide, a claim"


class GuideTask(StrEnum):
    """What a model is to do."""

    TRAINING = "training"
    INFERENCE = "inference"
    EDGE = "edge"


class GuideHardware(StrEnum):
    """The kind of machine."""

    SERVER_GPU = "server_gpu"
    CONSUMER_GPU = "consumer_gpu"
    CPU = "cpu"
    EDGE = "edge"

    @property
    def device(self) -> DeviceKind:
        """What a technique must run on there."""
        gpus = (GuideHardware.SERVER_GPU, GuideHardware.CONSUMER_GPU)
        return DeviceKind.CUDA if self in gpus else DeviceKind.CPU


@dataclass(frozen=True)
class Scenario:
    """What somebody has, and what it is for."""

    vram_available_gb: float
    task: GuideTask
    accuracy_critical: bool
    hardware: GuideHardware

    @property
    def trains(self) -> bool:
        return self.task is GuideTask.TRAINING


@dataclass(frozen=True)
class Advice:
    """One line of the guide.

    `technique` is its name in this package, None for what is no technique of it. `claim` is the effect that the guide
    states; `for_speed` says that a machine where it is slower has no use for it.
    """

    title: str
    technique: str | None
    claim: str
    reason: str
    for_speed: bool = True


SMALL_TO_TRAIN_GB = 24
SMALL_TO_SERVE_GB = 16


def advice_for(scenario: Scenario) -> Iterator[Advice]:
    """The guide's lines for a scenario, the most important first."""
    yield from _always(scenario)
    yield from _training(scenario) if scenario.trains else _inference(scenario)


def _always(scenario: Scenario) -> Iterator[Advice]:
    yield Advice(
        "Mixed precision (BF16 or FP16)",
        "mixed_precision" if scenario.trains else "bf16",
        "half the bytes, 2 to 3 times the speed on a GPU since Ampere",
        "It is one line, and costs next to no quality.",
    )
    yield Advice(
        "Flash attention",
        "fused_attention",
        "2 to 8 times the speed of attention, memory that grows linearly with the length",
        "It computes the same, and pays for sequences of more than 512 tokens.",
    )
    yield Advice(
        "torch.compile",
        "compile_training" if scenario.trains else "torch_compile",
        "1.3 to 2.5 times the speed",
        "It is one line; the first passes take seconds to minutes.",
    )
    if not scenario.trains:
        yield Advice(
            "KV cache",
            "kv_cache",
            "10 to 50 times the speed of generation, for some memory",
            "A language model that generates would compute all tokens again for each new one.",
        )


def _training(scenario: Scenario) -> Iterator[Advice]:
    if scenario.vram_available_gb < SMALL_TO_TRAIN_GB:
        why = f"{scenario.vram_available_gb:g} GB is less than {SMALL_TO_TRAIN_GB} GB."
        yield Advice(
            "Gradient checkpointing",
            "gradient_checkpointing",
            "half of the memory, for a third more computation",
            f"{why} Activations take most of the memory of training.",
            for_speed=False,
        )
        yield Advice(
            "Gradient accumulation",
            "gradient_accumulation",
            "the gradient of a large batch, in the memory of a small one",
            f"{why} A batch that fits may be too small to converge well.",
            for_speed=False,
        )
    if scenario.hardware in (GuideHardware.CONSUMER_GPU, GuideHardware.EDGE):
        yield Advice(
            "QLoRA",
            "qlora",
            "fine-tuning on 4-bit weights, of which adapters alone are trained",
            "The optimizer's state of all weights does not fit such a machine.",
            for_speed=False,
        )


def _inference(scenario: Scenario) -> Iterator[Advice]:
    yield _int8(scenario) if scenario.accuracy_critical else _four_bits(scenario.hardware)
    if scenario.vram_available_gb < SMALL_TO_SERVE_GB:
        why = f"{scenario.vram_available_gb:g} GB is less than {SMALL_TO_SERVE_GB} GB."
        yield Advice(
            "Export ahead of time (ONNX or AOTInductor)",
            "export_aot",
            "20% to 40% less overhead of the runtime",
            f"{why} An exported step runs without Python.",
        )
        yield Advice(
            "Distillation",
            None,
            "a model of a tenth to a third of the size, for 5% to 15% of its accuracy",
            f"{why} A smaller model may serve where weights of fewer bits do not fit.",
            for_speed=False,
        )


def _int8(scenario: Scenario) -> Advice:
    on_cpu = scenario.hardware.device is DeviceKind.CPU
    return Advice(
        "INT8 weights" if on_cpu else "INT8 (bitsandbytes)",
        "int8_weight_only" if on_cpu else "llm_int8",
        "half the bytes of 16-bit weights, for 0% to 0.5% of accuracy",
        "Accuracy counts, and 8 bits lose the least.",
        for_speed=False,
    )


def _four_bits(hardware: GuideHardware) -> Advice:
    claim = (
        "a quarter of the bytes of 16-bit weights, 1.3 to 1.8 times the speed, for 0.5% to 1.5% of accuracy"
    )
    match hardware:
        case GuideHardware.SERVER_GPU:
            return Advice("GPTQ INT4", "gptq", claim, "It has the highest throughput on an NVIDIA GPU.")
        case GuideHardware.CONSUMER_GPU:
            return Advice(
                "AWQ INT4 (or GGUF Q4_K_M)", "awq", claim, "Its checkpoints serve many kinds of hardware."
            )
        case GuideHardware.CPU:
            return Advice("GGUF Q4_K_M (or AWQ INT4)", "gguf", claim, "llama.cpp is made for processors.")
        case GuideHardware.EDGE:
            return Advice("GGUF Q3_K_M or Q4_K_M", "gguf", claim, "It is what fits a board of a few GB.")
