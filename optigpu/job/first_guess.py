"""How long a variant's parts take before any run of its stack, by the size of its model and what its workload does.

Measured on two cores with AVX-512, SmolLM2-135M, 128 tokens after 128; figures of GPUs are assumptions of ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from optigpu.backends.torch.stack import load_options, overriding
from optigpu.job.spec import Variant
from optigpu.meters.base import QualityOptions
from optigpu.meters.latency import LONG_S
from optigpu.models.described import Size, size_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Choice
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import DecodeShape, PrefillShape

IMPORT_S, OPERATOR_IMPORT_S = 2.5, 2.0
"""Of a process that will load a model, and of one that has none, until its libraries are there."""
ROUGH_LOOK_S, ROUGH_QUALITY_S = 2.0, 2.0
"""In which a variant's first process shows a rough speed, and predicts a few tokens to show their quality."""
LOAD_BYTES_PER_S = 1e9
CPU_BYTES_PER_S, GPU_BYTES_PER_S = 2e10, 1e12
"""At which a step reads the weights."""
CPU_FLOP_PER_S, GPU_FLOP_PER_S = 2e11, 5e13
MATRIX_S, OWN_LOOP_MATRIX_S = 6e-5, 2e-6
"""Of a step for each matrix beside reading it: by torch's modules, and compiled, or by an engine or a loop of its own.
A plain step of SmolLM2-135M takes 40 ms."""
WIDTHS: Mapping[str, float] = {"bfloat16": 2.0, "float16": 2.0}
FLOAT_BYTES, QUANTIZED_BYTES = 4.0, 0.75
COMPILE_S, COMPILE_MATRIX_S = 12.0, 0.13
"""torch.compile took 20 to 50 s for the 211 matrices of SmolLM2-135M."""
COMPILED_AGAIN, PACKED_AGAIN = 0.6, 0.1
"""The share of that, and of packing, that the next run takes: torch traces a model again before it finds its code."""
UNKNOWN = Size(100_000_000, 150)
"""Of a model that is not described here, or not on this machine: about GPT-2 small."""
REQUEST_S, CALL_S = 0.5, 0.05
"""Of a request that is no pass of a decoder, and of an operator."""
TEXT_TOKENS = 128
"""Of a prompt whose tokens only a run knows."""
OBSERVE_S, CHECKED_S, WARM_UP_S, AUDIT_S = 1.0, 2.0, 5.0, 4.0
"""What a process does beside its requests, and how long it checks an output, warms up and audits if they are short."""
METER_S, PASSES = 1.0, 4.0
"""Of a meter beside its request; quality is read by passes so many times as fast as steps."""
LONG_METERS_S = {"highest_rate": 60.0}
"""A search over rates has some ten of them, with several runs each."""


def made_again(variant: Variant) -> float:
    """The share of what a variant's first process made that the next run takes to find it."""
    return COMPILED_AGAIN if variant.compiles else PACKED_AGAIN


@dataclass(frozen=True)
class FirstGuess:
    """Of one variant."""

    variant: Variant

    @cached_property
    def size(self) -> Size:
        model = self.variant.model
        return (size_of(parse_reference(model)) if model else Size(0, 0)) or UNKNOWN

    @property
    def load_s(self) -> float:
        return FLOAT_BYTES * self.size.parameters / LOAD_BYTES_PER_S

    @property
    def make_s(self) -> float:
        """Compiling, and what the stack makes of the weights."""
        variant, size = self.variant, self.size
        compile_s = COMPILE_S + COMPILE_MATRIX_S * size.matrices if variant.compiles else 0.0
        return compile_s + sum(each.applying_s(size.parameters, variant.device) for each in variant.stack)

    @cached_property
    def request_s(self) -> float:
        if self.variant.model is None:
            return CALL_S
        match self.variant.workload.shape_after(TEXT_TOKENS):
            case DecodeShape() as shape:
                prompt_s = self._pass_s(shape.prompt_tokens * shape.batch_size)
                return prompt_s + shape.new_tokens * self._pass_s(shape.batch_size)
            case PrefillShape() as shape:
                return self._pass_s(shape.prompt_tokens * shape.batch_size)
            case _:
                return REQUEST_S

    @property
    def start_s(self) -> float:
        """Loading, a checked request, and the warm-up."""
        is_long = self.request_s >= LONG_S  # one is enough
        warm_up_s = self.request_s if is_long else min(4 * self.request_s, WARM_UP_S)
        return self.load_s + OBSERVE_S + self._check_s + warm_up_s

    @property
    def audit_s(self) -> float:
        return max(2 * self.request_s, min(16 * self.request_s, AUDIT_S)) + self._check_s

    def meter_s(self, meter: str, quality: QualityOptions) -> float:
        if meter == "quality":
            return METER_S + min(quality.most_seconds, quality.tokens * self._pass_s(1) / PASSES)
        return LONG_METERS_S.get(meter, METER_S + self.request_s)

    def reference_s(self, quality: QualityOptions) -> float:
        """Of the process that makes the reference for this model, which writes the text itself, or reads one."""
        return IMPORT_S + self.load_s + METER_S + 2 * quality.tokens * self._pass_s(1) / PASSES

    @property
    def kept_reference_s(self) -> float:
        return IMPORT_S + self.load_s + METER_S

    @property
    def _check_s(self) -> float:
        return min(self.request_s, CHECKED_S)

    def _pass_s(self, tokens: int) -> float:
        """Of so many tokens at once."""
        stack, on_cpu = self.variant.stack, self.variant.device is DeviceKind.CPU
        is_quantized = any(Choice.WEIGHTS in each.chosen() for each in stack)
        width = QUANTIZED_BYTES if is_quantized else WIDTHS.get(load_options(stack).dtype, FLOAT_BYTES)
        has_own_loop = self.variant.backend != "torch" or bool(overriding(stack, "loop"))
        reading_s = width * self.size.parameters / (CPU_BYTES_PER_S if on_cpu else GPU_BYTES_PER_S)
        computing_s = 2.0 * self.size.parameters * tokens / (CPU_FLOP_PER_S if on_cpu else GPU_FLOP_PER_S)
        each_s = OWN_LOOP_MATRIX_S if has_own_loop or self.variant.compiles else MATRIX_S
        return max(reading_s, computing_s) + each_s * self.size.matrices
