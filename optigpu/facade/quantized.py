"""quantize(model) and accelerate(model) in one line, make_it_work_hybrid with everything that can be chosen, and
QuantizationOptimizer: a model in one of nine precisions, loaded and changed in this process."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.fields import refusing, require_known
from optigpu.documents.result import Environment
from optigpu.facade.in_process import ORIGINS, Origin, device_of
from optigpu.hardware import best_device, probe
from optigpu.hardware.cpu import last_level_cache_bytes
from optigpu.job.spec import resolve
from optigpu.models.described import known_facts
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.prediction import Calibration, Weights
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    Samples = (
        torch.Tensor | Mapping[str, torch.Tensor] | Sequence["torch.Tensor | Mapping[str, torch.Tensor]"]
    )
    "Token ids, int64 [sequences, length] or [length]; what a tokenizer returns with them; or several of these."
    from transformers import PreTrainedTokenizerBase


DEFAULT_ALPHA = 0.5
"""SmoothQuant's own alpha, for samples without one."""


def quantize(
    model: "PreTrainedModel", bits: Literal[8, 4] = 8, memory_target: float | None = None
) -> "PreTrainedModel":
    """Quantizes a loaded transformers model in place and returns it; `generate` works as before.

    This is the technique int8_hybrid: int8 linear layers, and one int8 table for the embedding and its tied head. With
    4 `bits` the linear layers have 4-bit weights in groups of 32. `memory_target` is a share of the bytes that the
    weights have in float32: what it leaves above the fewest bits goes to where rounding costs most. None is 0.26, or
    0.16 with 4 bits, or the least that a small model can reach.

    Raises UnsupportedError, with the model left as it was, when it has no linear layer, is quantized already, has
    weights that are NaN or infinite, or cannot be as small as asked; SpecError for a wrong parameter.

    >>> from transformers import AutoModelForCausalLM
    >>> from optigpu import quantize
    >>> from optigpu.models.reference import BUNDLED
    >>> model = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"], dtype="float32")
    >>> before = model.get_memory_footprint()
    >>> model = quantize(model)
    >>> model.get_memory_footprint() < 0.27 * before
    True
    """
    return make_it_work_hybrid(model, memory_target=memory_target, bits=bits)


def make_it_work_hybrid(
    model: "PreTrainedModel",
    sample_inputs: "Samples | None" = None,
    quantize_embeddings: bool = True,
    smoothing_alpha: float | None = None,
    memory_target: float | None = None,
    bits: Literal[8, 4] = 8,
) -> "PreTrainedModel":
    """As `quantize`, with smoothing, and with embeddings quantized or not. `smoothing_alpha`, from 0 to 1, is
    SmoothQuant's: how much of the outliers of activations moves into the weights. It is calibrated on `sample_inputs`,
    token ids that are cut to the shortest sample, or on a text that the model writes. With samples and no alpha it is
    0.5; with neither nothing is smoothed. Without `quantize_embeddings` the tables stay as they are, and with them a
    tied head. Raises what `quantize` raises, and SpecError for samples that are not token ids of this model."""
    ids = None if sample_inputs is None else _ids(sample_inputs, model)
    alpha = DEFAULT_ALPHA if smoothing_alpha is None and ids is not None else smoothing_alpha
    with refusing(Int8Hybrid):
        technique = Int8Hybrid(
            bits=bits, memory_target=memory_target, quantize_embeddings=quantize_embeddings, smoothing=alpha
        )
    try:
        technique.modules(model, Notes(), ids)
    except ValueError as error:  # what smoothing says of ids that do not fit
        raise SpecError(f"sample_inputs: {str(error).replace('calibration_ids', 'sample_inputs')}") from None
    return model


def _ids(samples: "Samples", model: "PreTrainedModel") -> "torch.Tensor":
    """int64 [sequences, the shortest length], on the model's device."""
    import torch

    several = isinstance(samples, Sequence) and not isinstance(samples, str)
    parts = []
    for sample in samples if several else [samples]:
        ids = sample["input_ids"] if isinstance(sample, Mapping) and "input_ids" in sample else sample
        if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point():
            raise SpecError(
                "sample_inputs must be token ids: an int64 tensor [sequences, length], what a tokenizer returns with "
                f'return_tensors="pt", or a list of these, not {type(ids).__name__}.'
            )
        parts.append(ids.reshape(-1, ids.shape[-1]).long())
    if not parts:
        raise SpecError(
            "sample_inputs is empty; give token ids, or leave it out for a text that the model writes."
        )
    shortest = min(part.shape[1] for part in parts)
    return torch.cat([part[:, :shortest] for part in parts]).to(model.device)


UNKNOWN_CACHE_BYTES = 2**25
"""The last cache where the system does not tell its size: 32 MiB, of which many CPUs have more for each socket."""


def accelerate(
    model: "PreTrainedModel",
    *,
    weights: Weights | None = None,
    group: Literal[32, 64, 128] = 32,
    kv: Literal["bf16", "int8"] = "bf16",
    head: Literal["same", "w8", "bf16"] = "same",
    calibration: Calibration = "none",
) -> "PreTrainedModel":
    """Packs a loaded transformers model in place for the native decoder and returns it: the fastest way to decode.
    `model.generate` takes and returns what it did. Greedy decoding and sampling run by one operator (the technique
    native_decode), with everything that looks at logits and tokens alone: processors, stopping criteria, a streamer,
    scores. For every other setting, such as beams, transformers' own loop runs, with a UserWarning that says why. The
    parameters are those of native_decode. `weights` None takes "auto", the fewest bits within 0.02 nat, or bfloat16 for
    a model that then fits into the last cache. `calibration` "self" halves the error of 4-bit weights, and takes
    minutes for a model of 10^9 weights; "sequential" leaves a tenth less again, for five to six times the time. Raises
    UnsupportedError, with the model left as it was, for a family that the operator does not run, for a model that is
    quantized or accelerated already, and where the operator cannot be built; SpecError for a wrong parameter."""
    from optigpu.techniques.decoding.native_decode.generating import NativeGenerate, generate_natively

    if isinstance(model, NativeGenerate):
        raise SpecError("accelerate: this model is accelerated already; call model.generate.")
    with refusing(NativeDecode):
        technique = NativeDecode(
            weights=weights or _weights_for(model), group=group, kv=kv, head=head, calibration=calibration
        )
    technique.modules(model, Notes())
    generate_natively(model, technique.kv)
    return model


def _weights_for(model: "PreTrainedModel") -> Literal["auto", "bf16"]:
    """Fewer bits pay where each token reads the weights from memory: not where they stay in the last cache."""
    import torch

    if model.device.type == "cuda":
        cache = torch.cuda.get_device_properties(model.device).L2_cache_size
    else:
        cache = last_level_cache_bytes() or UNKNOWN_CACHE_BYTES
    size = sum(2 * parameter.numel() for parameter in model.parameters())
    return "bf16" if size <= cache else "auto"


NATIVE, INT4 = "native", "int4"
STACKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": (),
        "fp16": ("fp16",),
        "bf16": ("bf16",),
        "int8": ("int8_weight_only",),
        INT4: ("int4_weight_only",),
        "nf4": ("nf4",),
        "gptq": ("gptq",),
        "awq": ("awq",),
        NATIVE: ("native_decode",),
    }
)
"""The techniques of each precision; int4 is NF4 where its library and a GPU are there."""


class QuantizationOptimizer:
    """Loads language models in a precision, by the techniques that jobs measure."""

    @staticmethod
    def load(
        name: str, precision: str, *, device: str | None = None, seed: int = 0
    ) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
        """A model that is ready for `model.generate`, and its tokenizer.

        `name` is a reference as in a job: preset:NAME, bundled:tiny, path:DIR, or a name of the hub such as "gpt2". A
        preset has random weights, drawn from `seed`, and no tokenizer: that is None. `precision` is one of

        - fp32, fp16, bf16: the dtype of the weights;
        - int8: int8 weights with a scale for each output channel (`int8_weight_only`);
        - int4: NF4 where bitsandbytes and a GPU are there, else 4-bit integers (`int4_weight_only`);
        - nf4, gptq, awq: those techniques, which need their extras or a checkpoint that was made so;
        - native: our decoder behind `model.generate`, by `optigpu.accelerate`.

        Raises SpecError for an unknown precision, device or name, which lists the known ones, and UnsupportedError
        where this machine cannot do it or the model cannot be had, for example without a network.

        >>> from optigpu import QuantizationOptimizer
        >>> model, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="int8", device="cpu")
        >>> ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        >>> model.generate(ids, max_new_tokens=4).shape[1] - ids.shape[1]
        4
        """
        require_known(precision, STACKS, f"There is no precision {precision!r}", "The precisions are")
        reference, kind = parse_reference(name), best_device() if device is None else device_of(device)
        environment, names = probe(), STACKS[precision]
        if precision == INT4 and kind is DeviceKind.CUDA and "bitsandbytes" in environment.software:
            names = STACKS["nf4"]
        stack = tuple(TECHNIQUES[name](name=name) for name in names)
        _require(stack, environment, kind, reference)
        from optigpu.backends.torch.applied import DecodingModel
        from optigpu.models.loading.load import load_tokenizer

        applied = resolve(() if precision == NATIVE else stack, "generate")
        loaded = DecodingModel(str(reference), applied, kind, seed, lambda _: None)
        model, weights = loaded.model, loaded.weights
        if precision == NATIVE:
            kind_of_weights = _weights_for(model)
            accelerate(model, weights=kind_of_weights)
            stack = (NativeDecode(weights=kind_of_weights, calibration="none"),)
        ORIGINS[model] = Origin(str(reference), stack, weights)
        return model, None if reference.kind == "preset" else load_tokenizer(reference)


def _require(
    stack: tuple[Technique, ...], environment: Environment, device: DeviceKind, reference: ModelReference
) -> None:
    facts = known_facts(reference)
    decoder = facts if isinstance(facts, ModelFacts) else None
    for technique in stack:
        if device not in technique.devices:
            raise UnsupportedError(technique.not_on(device))
        if reason := technique.check(environment, device, decoder):
            raise UnsupportedError(reason)
