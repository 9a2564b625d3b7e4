from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.cpu import cpu_features
from optigpu.hardware.device_kinds import Ability
from optigpu.models.described import StoredWeights
from optigpu.ops.decode.cpu import SOURCES
from optigpu.ops.decode.program import FEW_BITS, CacheKind, Program
from optigpu.ops.library_file import is_built
from optigpu.techniques.base import (
    ON_TEXT,
    Choice,
    Expected,
    Forward,
    Loop,
    Model,
    Notes,
    Phase,
    Technique,
    Trial,
)
from optigpu.techniques.decoding.native_decode import prediction
from optigpu.techniques.decoding.native_decode.prediction import MAX_KLD
from optigpu.vocabulary import DeviceKind, UnsupportedError

if TYPE_CHECKING:
    from optigpu.ops.decode.cpu.decoder import CpuDecoder
    from optigpu.techniques.decoding.native_decode.loop import NativeLoop

_OWN_CACHE = "native_decode has its own key-value cache"
_OWN_BLOCKS = (
    "native_decode runs whole blocks by itself, so changes to the model's blocks would have no effect"
)
_OWN_STEP = "native_decode replaces the decode step, so there is none left to change"


PACK_S = {"self": 7e-8, "sequential": 4.5e-7}
"""Of each weight of 3 to 6 bits on two cores with AVX-512: 9.6 s for SmolLM2-135M."""
CHOOSE_S = 7e-8
"""Of each weight, to choose its bits."""
BUILD_S = 25.0
"""Compiling the operator, once on a machine."""
NARROW_TIMES = 4.0
"""As long with AVX2 alone."""


class NativeDecode(Technique):
    """Packs the weights and decodes by one operator: C++ on a CPU, Triton on CUDA.

    With `weights` auto each layer has the fewest bits, 3 to 8, that keep the model within `max_kld`: how far its next
    tokens diverge from the unpacked model's, in nats for each token, on text that the model wrote. Otherwise all layers
    have numbers of 3 to 6 or 8 bits, or bfloat16. `group` inputs of an output share a scale of 8 bits. The numbers of
    w3k and w4k stand for uneven values, denser where weights are: w4k costs a quarter less quality than w4 in the same
    bytes. Activations that meet such numbers are rounded to int8 by the same groups.
    `head` keeps the head, which often is the most sensitive matrix, in more bits. With `calibration` "self" the model
    first writes some text, and on what that gives its layers the errors of weights of 3 to 6 bits make up for each
    other: they cost half as much quality, and loading a model of 10^9 weights takes minutes the first time; once
    packed they are kept in the cache folder. With "sequential" each layer also makes up for what rounding the layers
    before it has changed: a tenth less again, for five to six times the time. `extra_bytes` is the share by which
    weights of 3 to 6 bits may grow so that layers have more, up to 8, where that leaves out the most of the error.
    `kv` is what keys and values are stored as; int4 is for a CPU alone. `tokens_at_once` are chosen within one call
    of the operator: they come together, so that a token has no time of its own. A tied embedding is looked up in the
    packed head, of which the rows of frequent tokens have twice its 3 to 6 bits; other tables have 8 bits, or 16 with
    bfloat16 weights. All sums are float32, whatever dtype the weights came in: bf16 and fp16 are where the weights
    are quantized from, and take half the memory for loading.
    """

    phase = Phase.DECODING
    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = (
        "one operator runs the whole decode step, on packed weights of 3 to 6, 8 or 16 bits and its own cache"
    )
    citation = (
        "Gerganov et al., llama.cpp, 2023, github.com/ggml-org/llama.cpp (int8 activations meet 4-bit weights in "
        "groups); gpt-fast, pytorch.org/blog/accelerating-generative-ai-2, 2023; Frantar et al., GPTQ, 2022, "
        "arXiv:2210.17323, and Li et al., GPTAQ, 2025, arXiv:2504.02692 (calibration)"
    )
    expected = (
        Expected(
            "measured here",
            "on two Zen 4 cores, with 4-bit weights: 2.43x [2.20, 2.68] llama.cpp's Q4_0 for GPT-2 and 1.59x "
            "[1.12, 2.26] for Llama 3.2 1B, in groups of 64 2.49x [2.31, 2.68] and 1.59x [1.18, 2.15], and "
            "24.99x [19.18, 32.57] eager fp32 for GPT-2",
            "results/README.md",
        ),
        Expected(
            "aim",
            "at batch 1 the speed of memory: 2.7x llama.cpp's Q4_0 and 25x eager fp32 for GPT-2 on a CPU; "
            "4-bit weights and int8 activations cost small models the most quality",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("no_kv_cache", "kv_cache", "static_kv_cache", "int8_kv_cache", "sliding_kv_cache"), _OWN_CACHE
        ),
        **dict.fromkeys(
            (
                "eager_attention",
                "fused_attention",
                "fused_layernorm",
                "fused_rmsnorm",
                "fused_gelu",
                "fused_swiglu",
                "fused_qkv",
            ),
            _OWN_BLOCKS,
        ),
        **dict.fromkeys(("torch_compile", "export_aot", "cuda_graphs"), _OWN_STEP),
        "autocast": "native_decode sums in float32, which autocast does not change",
        "cpu_offload": "native_decode needs all weights on the device",
        "grad_enabled": "packed weights have no gradient",
    }
    choices = (Choice.WEIGHTS, Choice.STEP)
    error_bound = 0.5
    serves = True
    trials = (
        Trial(error_bound=0.15),
        Trial({"weights": "w4"}),
        Trial({"weights": "w8", "kv": "int8"}, error_bound=0.15),
        Trial({"weights": "w4k"}),
        Trial({"weights": "w3k"}, error_bound=1.0),
        Trial({"weights": "w6"}, error_bound=0.15),
        Trial({"weights": "bf16"}, error_bound=0.1),
    )
    only_when_asked = True  # It costs quality, and how much is acceptable depends on the use

    later = ("max_kld",)

    name: Literal["native_decode"] = "native_decode"
    weights: prediction.Weights = "auto"
    group: Literal[32, 64, 128] = 32
    kv: CacheKind = "bf16"
    head: Literal["same", "w8", "bf16"] = "same"
    extra_bytes: float = Field(0.0, ge=0, le=1)
    calibration: prediction.Calibration = "self"
    tokens_at_once: int = Field(1, ge=1, le=2**20)
    max_kld: float = Field(MAX_KLD, gt=0, le=10)

    @model_validator(mode="after")
    def _options_that_fit(self) -> Self:
        if self.max_kld != MAX_KLD and self.weights != "auto":
            raise ValueError('max_kld needs weights "auto"; leave one of the two out')
        if self.extra_bytes and self.weights not in FEW_BITS:
            raise ValueError(
                f"extra_bytes needs weights of 3 to 6 bits; leave it out, or set weights to {', '.join(FEW_BITS)}"
            )
        return self

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} needs a C++ compiler on a CPU, and none was found; install g++."
        reason = self._refused_by(device) or (prediction.known_refusal(model, self._unit) if model else None)
        return f"{self.name} {reason}." if reason else None

    def as_alternative(
        self, environment: Environment, device: DeviceKind, model: ModelFacts | None, is_trained: bool
    ) -> Self | None:
        """Random weights have 4 bits: they have no quality to keep."""
        if self.check(environment, device, model) is not None:
            return None
        return self if is_trained else self.model_copy(update={"weights": "w4", "calibration": "none"})

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """Packed matrices and tables, and passes by the operator.

        With `extra_bytes` the sum may be below by less than a layer. Raises UnsupportedError for a model that the
        operator does not run.
        """
        reason = prediction.known_refusal(weights.facts, self._unit)
        if reason:
            raise UnsupportedError(f"{self.name} {reason}.")
        return prediction.packed_weights(weights, self._options, self.kv, device)

    def applying_s(self, parameters: int, device: DeviceKind) -> float:
        slower = 1.0 if "avx512bw" in cpu_features() else NARROW_TIMES
        is_calibrated = self.calibration != "none" and self.weights in ("auto", *FEW_BITS)
        pack_s = PACK_S[self.calibration] if is_calibrated else 0.0
        packing_s = parameters * slower * (pack_s + (CHOOSE_S if self.weights == "auto" else 0.0))
        return BUILD_S + packing_s if _compiles_on(device) else packing_s

    def modules(self, model: Model, notes: Notes) -> None:
        """Packs the linear layers in place, and has the model keep the program that the operator runs.

        Raises UnsupportedError, with the model left as it was, for a model that the operator does not run or that is
        quantized already, for weights that are NaN or infinite, for inputs that the groups do not divide, and where
        the operator cannot be built.
        """
        from optigpu.surgery.places import checked_places, require_unquantized
        from optigpu.techniques.decoding.native_decode import programs
        from optigpu.techniques.decoding.native_decode.loop import require_operator
        from optigpu.techniques.decoding.native_decode.packed_store import pack_or_restore

        require_unquantized(model, self.name)
        reason = self._refused_by(DeviceKind(model.device.type)) or programs.refusal(model)
        if reason:
            raise UnsupportedError(f"{self.name} {reason}.")
        places = checked_places(model, self.name, self._unit)
        if programs.has_mixtures(model) and (self.calibration == "sequential" or self.extra_bytes):
            raise UnsupportedError(
                f"{self.name} packs mixtures of experts with calibration self or none and without extra_bytes; choose "
                "these for this model."
            )
        if _compiles_on(DeviceKind(model.device.type)):
            notes.doing("compiling the operator, once on this machine")
        operator = require_operator(model.device)
        tied = programs.has_tied_head(model)
        facts = pack_or_restore(model, places, self._options, notes.doing)
        programs.exchange_tables(model, self._options.tables, self.group, tied=tied)
        programs.attach(model)
        notes.record(decode_operator=operator, decode_calibration=self.calibration, **facts)

    def loop(self, loop: Loop, model: Model, notes: Notes) -> Loop:
        return self._native_loop(model, notes)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        return self._native_loop(forward.model, notes).prefill  # type: ignore[attr-defined]

    def _native_loop(self, model: Model, notes: Notes) -> "NativeLoop":
        from optigpu.techniques.decoding.native_decode.loop import NativeLoop
        from optigpu.techniques.decoding.native_decode.programs import attached, new_decoder, placement_facts

        program = attached(model)
        decoder = new_decoder(program, self.kv)
        facts = self._facts(program) | placement_facts(decoder)
        return NativeLoop(decoder, self.tokens_at_once, facts, notes, self._drafted)

    def _refused_by(self, device: DeviceKind) -> str | None:
        """What the operator of CUDA does not read."""
        if device is DeviceKind.CPU or self.kv != "int4":
            return None
        return f"has kv int4 on a CPU alone; use int8 or bf16 on {device}"

    def _drafted(self, model: Model, beside: "CpuDecoder") -> "CpuDecoder":
        """The decoder of a draft model, which is packed in place with the same options."""
        from optigpu.ops.decode.cpu.decoder import CpuDecoder
        from optigpu.techniques.decoding.native_decode.programs import attached

        self.modules(model, Notes())
        return CpuDecoder(attached(model), self.kv, beside=beside)

    @property
    def _options(self) -> prediction.PackingOptions:
        return prediction.PackingOptions(
            self.weights, self.group, self.head, self.extra_bytes, self.calibration, self.max_kld
        )

    @property
    def _unit(self) -> int:
        """The inputs of every matrix must be a multiple of this; the operator reads four bfloat16 weights at once."""
        return 4 if self.weights == "bf16" and self.head != "w8" else self.group

    def _facts(self, program: Program) -> dict[str, Any]:
        """The facts of the decoder and its cache; the bytes of a token are those of one sequence."""
        half = {"bf16": 4, "int8": 2, "int4": 1}[self.kv]
        head_bytes = half * program.head_size // 2 + (0 if self.kv == "bf16" else 4)
        return {
            "decode_loop": "native operator",
            "attn_implementation": "native operator",
            "kv_cache": "native",
            "kv_cache_dtype": "bfloat16" if self.kv == "bf16" else self.kv,
            "kv_cache_bytes_per_token": 2 * len(program.blocks) * program.kv_heads * head_bytes,
        }


def _compiles_on(device: DeviceKind) -> bool:
    """Whether the operator has yet to be compiled; that of CUDA has nothing to compile beforehand."""
    return device is DeviceKind.CPU and not is_built(SOURCES)
