"""Linear layers with 4-bit numbers chosen by GPTQ or AWQ: from a ready checkpoint, or made here by GPTQModel.

Our own layers compute with both. GPTQModel runs in a separate process; its result is kept in the cache folder.
"""

import copy
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from optigpu.models.families import family_of
from optigpu.models.loading.checkpoint import Unpacked, packed_layers, packing_of, read_packed, read_whole
from optigpu.models.loading.self_written import sampled
from optigpu.ops.four_bits.scheme import Int4Weights
from optigpu.ops.linear.int4_linear import int4_linear_backend
from optigpu.ops.operands import INT4_ZERO
from optigpu.paths import cache_dir
from optigpu.quality.text import SELF_WRITTEN, read_source
from optigpu.surgery.extras import Package, how_to_install
from optigpu.surgery.gptqmodel.child import IDS, PLAIN, QUANTIZED, REQUEST, QuantizationRequest
from optigpu.surgery.gptqmodel.technique import Calibration, Recipe, conv1d_reason
from optigpu.surgery.integer_layers import Int4Linear
from optigpu.surgery.places import checked_places, weight_of
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError, canonical_json, first_line

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def compute_in_four_bits(model: PreTrainedModel, recipe: Recipe, notes: Notes) -> None:
    """Exchanges packed layers, or quantizes by the recipe. Raises UnsupportedError, with the model as it was, if it
    cannot."""
    backend = int4_linear_backend(model.device, model.dtype)
    packed = dict(packed_layers(model))
    if packed:
        _require_readable(packed)
        group = next(iter(packed.values())).packing.group_size
        _exchange(model, packed, {path: layer.bias for path, layer in packed.items()})
        facts = {"int4_layers": len(packed), "int4_group_size": group, "int4_source": "checkpoint"}
        notes.record(int4_backend=backend, **facts)
        return
    started = time.perf_counter()
    require_quantizable(model, recipe)
    ids = calibration_ids(model, recipe.calibration, recipe.method)
    folder, is_new = _quantized(model, recipe, ids)
    count = _take_over(model, recipe, folder)
    notes.record(
        int4_backend=backend,
        int4_layers=count,
        int4_group_size=recipe.group_size,
        int4_source=f"gptqmodel {version(LIBRARY)}" + ("" if is_new else ", quantized before"),
        calibration=asdict(recipe.calibration)
        | {"tokens_sha256": hashlib.sha256(repr(ids).encode()).hexdigest()},
        quantization_s=time.perf_counter() - started,
    )


def int4_weights_of(unpacked: Unpacked) -> Int4Weights:
    """The numbers with scales and offsets in bfloat16, as our operator takes them.

    That moves no weight by more than 1/16 of a step: scale and offset by 1/256 of at most eight steps each.
    Without zero points (8 everywhere) there are no offsets.
    """
    q, scale, zero, _ = unpacked
    offset = None
    if bool((zero != INT4_ZERO).any()):
        offset = ((INT4_ZERO - zero.float()) * scale).to(torch.bfloat16)
    return Int4Weights(q, scale.to(torch.bfloat16), offset)


def result_digest(model: PreTrainedModel, recipe: Recipe, ids: list[list[int]]) -> str:
    """SHA-256 of everything that the result depends on: model, recipe, calibration text and library."""
    facts = [asdict(recipe), ids, version(LIBRARY), model.config.to_json_string()]
    found = hashlib.sha256(canonical_json(facts).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _quantized(model: PreTrainedModel, recipe: Recipe, ids: list[list[int]]) -> tuple[Path, bool]:
    """The folder of the quantized model, and whether it was made just now."""
    folder = cache_dir() / "quantized"
    target = folder / result_digest(model, recipe, ids)
    if target.is_dir():
        return target, False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="draft-") as name:
        draft, dtype = Path(name), str(model.dtype).removeprefix("torch.")
        request = QuantizationRequest(
            method=recipe.method,
            group_size=recipe.group_size,
            device=str(model.device),
            dtype="float16"
            if recipe.method == "awq" and dtype == "float32"
            else dtype,  # AWQ has 16 bits alone
            threads=torch.get_num_threads(),
        )
        (draft / REQUEST).write_text(request.model_dump_json(), "utf-8")
        (draft / IDS).write_text(canonical_json(ids), "utf-8")
        model.save_pretrained(draft / PLAIN)
        _run(draft, recipe.method)
        try:
            os.replace(draft / QUANTIZED, target)  # other processes never see a partial folder
        except OSError:
            if not target.is_dir():  # unless another process was first
                raise
    return target, True


def _run(folder: Path, method: str) -> None:
    """Runs the library in a separate process. Raises UnsupportedError with the end of its output if it fails."""
    command = [sys.executable, "-m", "optigpu.surgery.gptqmodel.child", str(folder)]
    log = folder / "log.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        status = process.wait()
    if status:
        lines = _COLOURS.sub("", log.read_text("utf-8", "replace")).strip().splitlines()
        why = next((line.strip() for line in reversed(lines) if "Error" in line), f"status {status}")
        raise UnsupportedError(
            f"GPTQModel cannot quantize this model by {method} ({why.rstrip('.')}); leave {method} out."
        )


def _take_over(model: PreTrainedModel, recipe: Recipe, folder: Path) -> int:
    """Puts what GPTQModel made into the model; returns how many layers. AWQ has also scaled the modules before them."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    packing = packing_of(config)
    if packing is None:
        raise UnsupportedError(
            f"GPTQModel wrote {folder} without packed layers; remove that folder and measure again."
        )

    def read(config: PretrainedConfig) -> PreTrainedModel:
        options = {"config": config, "dtype": model.dtype, "local_files_only": True}
        return read_whole(AutoModelForCausalLM, "What GPTQModel wrote", str(folder), **options)

    twin = read_packed(packing, config, read)
    torch.nn.Module.to(twin, model.device)
    packed = dict(packed_layers(twin))
    _require_readable(packed)
    rescaled = recipe.method == "awq"
    biases = {
        path: layer.bias if rescaled else model.get_submodule(path).bias for path, layer in packed.items()
    }
    if rescaled:
        for name, parameter in twin.named_parameters():
            if name.rpartition(".")[0] not in packed:
                model.get_parameter(name).data.copy_(parameter)
    _exchange(model, packed, biases)
    return len(packed)


def _require_readable(packed: dict[str, Any]) -> None:
    """Raises UnsupportedError when a layer's scales are NaN or infinite, or its groups are not of one size."""
    for path, layer in packed.items():
        layer.order()
        if not bool(layer.scales.isfinite().all()):
            raise UnsupportedError(
                f"The scales of {path} are NaN or infinite; the model's files are damaged."
            )


def _exchange(model: PreTrainedModel, packed: dict[str, Any], biases: dict[str, Any]) -> None:
    for path, layer in packed.items():
        parent, _, name = path.rpartition(".")
        unpacked = layer.unpacked()
        ours: torch.nn.Module = Int4Linear.holding(int4_weights_of(unpacked), biases[path], model.dtype)
        if unpacked.order is not None:
            ours = Reordered(ours, unpacked.order)
        setattr(model.get_submodule(parent), name, ours.eval())


class Reordered(torch.nn.Module):
    """A linear layer whose inputs were sorted by their groups: with act-order GPTQ went by their importance."""

    holds_quantized_weights = True
    order: torch.Tensor

    def __init__(self, layer: torch.nn.Module, order: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("order", order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x[..., self.order])
        return y


def calibration_ids(model: PreTrainedModel, calibration: Calibration, technique: str) -> list[list[int]]:
    """The sequences of ids, all of one length. Raises UnsupportedError where text, tokenizer or model do not fit."""
    config = model.config.get_text_config(decoder=True)
    if calibration.length > config.max_position_embeddings:
        raise UnsupportedError(
            f"{technique}: calibration sequences of {calibration.length} tokens are longer than this model's context "
            f"of {config.max_position_embeddings}; choose a smaller length."
        )
    if calibration.text == SELF_WRITTEN:
        drawn = sampled(model, config.vocab_size, calibration.samples, calibration.length, calibration.seed)
        ids: list[list[int]] = drawn.tolist()
        return ids
    tokens = _encoded(model, config.vocab_size, calibration.text, technique)
    samples, length = calibration.samples, calibration.length
    if len(tokens) < samples * length:
        raise UnsupportedError(
            f"{technique}: {samples} calibration sequences of {length} tokens need {samples * length} tokens, and "
            f"{calibration.text} has {len(tokens)}; choose fewer samples or a longer text."
        )
    step = len(tokens) // samples  # they do not overlap, and are spread evenly over the text
    return [tokens[start : start + length] for start in range(0, samples * step, step)]


def _encoded(model: PreTrainedModel, vocabulary: int, text: str, technique: str) -> list[int]:
    name = model.name_or_path
    if not name:
        raise UnsupportedError(
            f"{technique} needs a tokenizer to read {text}, and a model with random weights has none; set calibration "
            f"to {SELF_WRITTEN}."
        )
    try:
        words = read_source(text).words()
        revision = getattr(model.config, "_commit_hash", None) or "main"
        local = Path(name).is_dir()
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=local)
    except Exception as error:  # of a damaged tokenizer the library raises whatever it stumbles over
        raise UnsupportedError(f"{technique} cannot calibrate with {text}: {first_line(error)}.") from error
    ids: list[int] = tokenizer.encode(words, add_special_tokens=False)
    if max(ids, default=0) >= vocabulary:
        raise UnsupportedError(
            f"{technique}: the tokenizer gives token id {max(ids)}, and this model's ids are 0 to {vocabulary - 1}; "
            "put the tokenizer that the model was trained with beside it."
        )
    return ids


LIBRARY: Package = "gptqmodel"
AWQ_OUTPUTS = 64
"""The number of outputs that the library processes together when it searches for clipping limits."""


def require_quantizable(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raises UnsupportedError when the library is missing, or cannot quantize the model by the recipe."""
    if recipe.method == "awq":
        # The library scales the layers of each family by a recipe of its own.
        family = family_of(model.config.model_type)
        reason = conv1d_reason(family.name)
        if reason:
            raise UnsupportedError(reason)
        known = family.gptqmodel_activation
        activation = getattr(model.config, family.keys.activation, known)
        if known is not None and activation != known:
            raise UnsupportedError(
                f"GPTQModel's AWQ supports {family.title} models with the activation {known}; this one has "
                f"{activation}. Use gptq instead."
            )
    if importlib.util.find_spec(LIBRARY) is None:
        raise UnsupportedError(how_to_install(LIBRARY))
    head = model.get_output_embeddings()
    for place in checked_places(model, recipe.method, recipe.group_size):
        outputs = weight_of(place.layer).shape[0]
        if recipe.method == "awq" and place.layer is not head and outputs % AWQ_OUTPUTS:
            raise UnsupportedError(
                f"GPTQModel's AWQ needs layers whose outputs are a multiple of {AWQ_OUTPUTS}; {place.path} has "
                f"{outputs}. Use gptq instead."
            )
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    changed = {name for name, _ in plain.named_parameters()} ^ {name for name, _ in model.named_parameters()}
    if changed:
        raise UnsupportedError(
            f"{recipe.method} quantizes a model with the parameters of its family, and {min(changed)} was removed or "
            "added before; leave out the technique that did so."
        )
