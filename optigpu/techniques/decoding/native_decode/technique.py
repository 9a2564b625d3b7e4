"""native_decode: a whole decode step by one operator of our own, on weights that are packed for it."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from optigpu.documents.result import Environment
from optigpu.models.facts import ModelFacts
from optigpu.ops.decode.program import CacheKind, Program, WeightKind
from optigpu.surgery.bit_allocation import Decision, decide, least_bytes, table, total_bytes
from optigpu.surgery.places import Place, checked_places, require_unquantized, weight_of
from optigpu.techniques.base import ON_TEXT, Choice, Forward, Loop, Notes, Phase, Technique
from optigpu.techniques.decoding.native_decode.families import HEAD, known_refusal, refusal
from optigpu.techniques.decoding.native_decode.layers import (
    candidates_of,
    exchange_embedding,
    exchange_linears,
    packed_tensors,
    restore_linears,
)
from optigpu.techniques.decoding.native_decode.packed_store import Kept, key_of, most_bytes
from optigpu.techniques.decoding.native_decode.packed_store import load as load_kept
from optigpu.techniques.decoding.native_decode.packed_store import save as keep
from optigpu.techniques.decoding.native_decode.programs import attach, attached, embedding_place
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

_OWN_CACHE = "its operator has a key-value cache of its own"
_OWN_BLOCKS = "its operator runs whole blocks by itself, and what is changed in the model's would not run"
_OWN_STEP = "its operator is the whole decode step, and none is left for another technique"


class NativeDecode(Technique):
    """Packs the weights and decodes by one operator: C++ on a CPU, Triton on CUDA.

    `weights` are 4-bit or 8-bit numbers of which `group` inputs of an output share a scale of 8 bits, or bfloat16.
    Activations that meet 4-bit or 8-bit weights are rounded to int8 by the same groups. `head` keeps the head, which
    often is the most sensitive matrix, in more bits. With `calibration` "self" the model first writes some text, and on
    what that gives its layers the errors of 4-bit weights make up for each other: they cost half as much quality, and
    loading a model of 10^9 weights takes minutes the first time; packed 4-bit weights are kept in the cache folder
    (decode_store.py). `extra_bytes` is the share by which 4-bit weights may grow so that those layers have 8 bits where
    that leaves out the most of the error. `kv` is what keys and values are stored as.
    `tokens_at_once` are chosen within one call of the operator: they come together, so that a token has no time of its
    own. The embedding becomes bfloat16, also where a tied head is packed. All sums are float32, whatever dtype the
    weights came in: bf16 and fp16 are where the weights are quantized from, and take half the memory for loading.
    """

    layer: ClassVar[Layer] = Layer.DECODING
    phase: ClassVar[Phase] = Phase.DECODING
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    summary: ClassVar[str] = (
        "one operator runs the whole decode step, on packed 4-bit, 8-bit or bfloat16 weights and a cache of its own"
    )
    citation: ClassVar[str] = (
        "Gerganov et al., llama.cpp, 2023, github.com/ggml-org/llama.cpp (int8 activations meet 4-bit weights in "
        "groups); gpt-fast, pytorch.org/blog/accelerating-generative-ai-2, 2023; Frantar et al., GPTQ, 2022, "
        "arXiv:2210.17323 (calibration)"
    )
    expected: ClassVar[str] = (
        "at batch 1 the speed of memory: on a CPU 15x to 20x of eager fp32 with 4-bit weights, 1.2x to 2.7x of "
        "llama.cpp's Q4_0; costs the quality of 4-bit weights and int8 activations, the more the smaller the model"
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
        "speculative_decoding": "guesses are verified by passes of the library's model, which its operator replaces",
        "autocast": "its operator computes in float32, and autocast does not reach it",
        "cpu_offload": "its operator reads all weights where they lie",
        "grad_enabled": "packed weights have no gradient",
    }
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS, Choice.STEP)

    name: Literal["native_decode"] = "native_decode"
    weights: WeightKind = "w4"
    group: Literal[32, 64, 128] = 32
    kv: CacheKind = "bf16"
    head: Literal["same", "w8", "bf16"] = "same"
    extra_bytes: float = Field(0.0, ge=0, le=1)
    calibration: Literal["self", "none"] = "self"
    tokens_at_once: int = Field(1, ge=1, le=2**20)

    @model_validator(mode="after")
    def _bytes_for_four_bits(self) -> Self:
        if self.extra_bytes and self.weights != "w4":
            raise ValueError(
                "extra_bytes is what 4-bit weights may grow by: leave it out, or ask for weights w4"
            )
        return self

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The family must be one that the operator runs, the groups must divide, and a CPU needs a compiler."""
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} is a C++ operator on a CPU and there is no compiler; install g++."
        reason = known_refusal(model, self._unit) if model else None
        return f"{self.name}: {reason}." if reason else None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """It rounds weights and activations, and how much of that is too much is the reader's to say."""
        return False

    def modules(self, model: Any, notes: Notes) -> None:
        """Packs the linear layers in place, and has the model keep the program that the operator runs.

        Raises UnsupportedError, with the model left as it was, for a model that the operator does not run or that is
        quantized already, for weights that are no numbers, for inputs that the groups do not divide, and where the
        operator cannot be built.
        """
        require_unquantized(model, self.name)
        reason = refusal(model)
        if reason:
            raise UnsupportedError(f"{self.name}: {reason}.")
        places = checked_places(model, self.name, self._unit)
        operator = require_operator(model.device)
        key = self._key(model)
        kept = load_kept(key) if key else None
        facts = self._packed(model, places, key) if kept is None else self._restored(places, kept)
        exchange_embedding(embedding_place(model))
        attach(model)
        notes.record(decode_operator=operator, decode_calibration=self.calibration, **facts)

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        """The operator's own loop."""
        program = attached(model)
        return NativeLoop(new_decoder(program, self.kv), self.tokens_at_once, self._facts(program), notes)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        """The whole prompt by the operator."""
        program = attached(forward.model)  # type: ignore[attr-defined]
        return NativePass(new_decoder(program, self.kv), self._facts(program), notes)

    @property
    def _unit(self) -> int:
        """What the inputs of every matrix must be a multiple of; bfloat16 weights meet four of them at once."""
        return 4 if self.weights == "bf16" and self.head != "w8" else self.group

    def _kind(self, place: Place) -> WeightKind:
        return self.head if place.path == HEAD and self.head != "same" else self.weights

    def _key(self, model: Any) -> str | None:
        """What the packed weights are kept under; None where making them anew takes no longer than reading them."""
        if self.weights != "w4" or not most_bytes():
            return None
        asked = self.model_dump(include={"weights", "group", "head", "extra_bytes", "calibration"})
        return key_of(model, {**asked, "device": model.device.type})

    def _packed(self, model: Any, places: Sequence[Place], key: str | None) -> dict[str, Any]:
        """Exchanges the layers, keeps what they hold, and gives what is recorded of them."""
        costs = self._costs(model, places) if self.extra_bytes else {}
        candidates = candidates_of(places, [self._kind(place) for place in places], self.group, costs)
        decisions = decide(candidates, int((1 + self.extra_bytes) * least_bytes(candidates)))
        weights = sum(weight_of(place.layer).numel() for place in places)
        self._exchange(model, places, decisions)
        facts = {
            "decode_layers": table(decisions),
            "decode_bytes": total_bytes(decisions),
            "decode_bits_per_weight": 8 * total_bytes(decisions) / weights,
        }
        if key:
            kinds = {decision.path: decision.level.kind for decision in decisions}
            keep(key, packed_tensors(model, list(kinds)), {"kinds": kinds, "facts": facts})
        return facts

    def _restored(self, places: Sequence[Place], kept: Kept) -> dict[str, Any]:
        """As `_packed`, with what was kept."""
        facts: dict[str, Any] = kept.facts["facts"]
        arena = _arena_for(places, facts["decode_bytes"])
        restore_linears(places, kept.facts["kinds"], self.group, arena, kept.tensors)
        return facts

    def _exchange(self, model: Any, places: Sequence[Place], decisions: Sequence[Decision]) -> None:
        """Packs layer by layer, those that are calibrated first; their inputs come from layers of all kinds."""
        from optigpu.techniques.decoding.native_decode.calibration import moments_by_layer

        kinds: dict[str, Any] = {decision.path: decision.level.kind for decision in decisions}
        arena = _arena_for(places, total_bytes(decisions))
        calibrated = [place for place in places if self.calibration == "self" and kinds[place.path] == "w4"]
        for part, moments in moments_by_layer(model, calibrated):
            exchange_linears(part, kinds, self.group, arena, moments)
        others = [place for place in places if place not in calibrated]
        exchange_linears(others, kinds, self.group, arena, {})

    def _costs(self, model: Any, places: Sequence[Place]) -> dict[str, float]:
        """What it costs each layer of 4 bits that it has not 8."""
        from optigpu.techniques.decoding.native_decode.sensitivity import divergences

        return divergences(model, [place for place in places if self._kind(place) == "w4"], self.group)

    def _facts(self, program: Program) -> dict[str, Any]:
        """What a result says of the decoder and its cache; the bytes of a token are those of one sequence."""
        head_bytes = 2 * program.head_size if self.kv == "bf16" else program.head_size + 4
        return {
            "decode_loop": "native operator",
            "attn_implementation": "native operator",
            "kv_cache": "native",
            "kv_cache_dtype": {"bf16": "bfloat16", "int8": "int8"}[self.kv],
            "kv_cache_bytes_per_token": 2 * len(program.blocks) * program.kv_heads * head_bytes,
        }


class NativeLoop:
    """A Loop around a decoder, and has `score`."""

    def __init__(self, decoder: Any, tokens_at_once: int, facts: Mapping[str, Any], notes: Notes) -> None:
        self._decoder = decoder
        self._tokens_at_once = tokens_at_once
        self._facts = facts
        self._notes = notes

    def __call__(self, prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
        """Greedy tokens int64 [batch, new_tokens] and new_tokens + 1 marks. `prompt`: int64 [batch, prompt_tokens].

        Tokens of one call share a mark. Raises UnsupportedError when the cache does not fit the memory.
        """
        import torch

        self._notes.record(**self._facts)
        marks = [clock.mark()]
        self._decoder.begin(prompt.shape[0], prompt.shape[1] + new_tokens)
        first = self._decoder.extend(prompt).argmax(dim=1, keepdim=True)
        marks.append(clock.mark())
        others = first.new_empty(prompt.shape[0], new_tokens - 1)
        calls = self._decoder.decode_into(others, first, self._tokens_at_once) if new_tokens > 1 else ()
        for chosen in calls:
            marks += [clock.mark()] * chosen
        return torch.cat([first, others], dim=1), marks

    def score(self, tokens: Any, prefill: int) -> Iterator[Any]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary]."""
        self._notes.record(**self._facts)
        self._decoder.begin(*tokens.shape)
        if prefill:
            self._decoder.extend(tokens[:, :prefill])
        for token in tokens[:, prefill:].split(1, dim=1):
            yield self._decoder.extend(token).clone()


class NativePass:
    """A prompt through a decoder into an empty cache; the logits of its last token."""

    def __init__(self, decoder: Any, facts: Mapping[str, Any], notes: Notes) -> None:
        self._decoder = decoder
        self._facts = facts
        self._notes = notes

    def __call__(self, prompt: Any) -> Any:
        """Logits float32 [batch, vocabulary]. `prompt`: int64 [batch, length] of ids."""
        self._notes.record(**self._facts)
        self._decoder.begin(*prompt.shape)
        return self._decoder.extend(prompt)


def _arena_for(places: Sequence[Place], size: int) -> Any:
    """One piece of memory for the layers' packed weights, on a CPU alone."""
    from optigpu.ops.decode.cpu.arena import Arena

    return Arena(size) if weight_of(places[0].layer).device.type == "cpu" else None


def require_operator(device: Any) -> str:
    """What the operator is on a device: Triton, or for a CPU the instruction set of its C++.

    Raises UnsupportedError where it cannot be had.
    """
    if device.type == "cpu":
        from optigpu.ops.decode.cpu.decoder import best_instruction_set

        return f"native-{best_instruction_set()}"
    if find_spec("triton") is None:
        raise UnsupportedError("native_decode has no operator here: install Triton (pip install triton).")
    return "triton"


def new_decoder(program: Program, kv: CacheKind) -> Any:
    """A decoder where the program's weights lie, on a CPU with as many threads as torch has."""
    import torch

    if program.embedding.device.type != "cpu":
        from optigpu.ops.decode.cuda.decoder import CudaDecoder

        return CudaDecoder(program, kv)
    from optigpu.hardware.cpu import one_cpu_of_each_core
    from optigpu.ops.decode.cpu.decoder import CpuDecoder

    return CpuDecoder(program, kv, threads=torch.get_num_threads(), cpus=one_cpu_of_each_core())
