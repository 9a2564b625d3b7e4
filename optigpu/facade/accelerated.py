"""accelerate(model): the native decoder behind `model.generate`, in one line."""

from typing import TYPE_CHECKING, Literal

from optigpu.documents.fields import refusing
from optigpu.hardware.cpu import last_level_cache_bytes
from optigpu.ops.decode.program import WeightKind
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.prediction import Calibration
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN_CACHE_BYTES = 2**25
"""The last cache where the system does not tell its size: 32 MiB, of which many CPUs have more for each socket."""


def accelerate(
    model: "PreTrainedModel",
    *,
    weights: WeightKind | None = None,
    group: Literal[32, 64, 128] = 32,
    kv: Literal["bf16", "int8"] = "bf16",
    head: Literal["same", "w8", "bf16"] = "same",
    calibration: Calibration = "none",
) -> "PreTrainedModel":
    """Packs a loaded transformers model in place for the native decoder and returns it: the fastest way to decode.

    `model.generate` takes and returns what it did. Greedy decoding and sampling run by one operator (the technique
    native_decode), with everything that looks at logits and tokens alone: processors, stopping criteria, a streamer,
    scores. For every other setting, such as beams, transformers' own loop runs with a UserWarning that says why; it
    unpacks the weights once, and is as fast as before. The parameters are those of native_decode. `weights` None takes
    4 bits, which read an eighth of the float32 bytes for each token; a model whose bfloat16 weights fit into
    the last cache gains little from fewer bits and gets bfloat16, with the float model's greedy text. `calibration`
    "self" halves the error of 4-bit weights, and takes minutes for a model of 10^9 weights; "sequential" leaves a tenth
    less again, for five to six times the time.

    Raises UnsupportedError, with the model left as it was, for a family that the operator does not run, for a model
    that is quantized or accelerated already, and where the operator cannot be built; SpecError for a wrong parameter.

    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from optigpu import accelerate
    >>> from optigpu.models.reference import BUNDLED
    >>> tokenizer = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
    >>> model = accelerate(AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"]))
    >>> prompt = tokenizer("The future of AI is", return_tensors="pt")
    >>> model.generate(**prompt, max_new_tokens=20).shape[1] - prompt["input_ids"].shape[1]
    20
    """
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


def _weights_for(model: "PreTrainedModel") -> Literal["w4", "bf16"]:
    """Fewer bits pay where each token reads the weights from memory: not where they stay in the last cache."""
    import torch

    if model.device.type == "cuda":
        cache = torch.cuda.get_device_properties(model.device).L2_cache_size
    else:
        cache = last_level_cache_bytes() or UNKNOWN_CACHE_BYTES
    size = sum(2 * parameter.numel() for parameter in model.parameters())
    return "bf16" if size <= cache else "w4"
