"""Linear layers of 4-bit numbers that GPTQ or AWQ chose: out of a ready checkpoint, or made here by GPTQModel.

Either way the numbers come into our own layers (optigpu.ops), so that computing needs no other library. GPTQModel runs
in a process of its own, and what it made stays in the cache folder: another process with the same weights reads it.
"""

import copy
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optigpu.documents.result import Environment
from optigpu.ops.four_bits.quantize import ZERO, Int4Weights
from optigpu.paths import cache_dir
from optigpu.surgery.gptqmodel.calibration import Calibration, calibration_ids, digest_of
from optigpu.surgery.gptqmodel.child import IDS, PLAIN, QUANTIZED, REQUEST, Request
from optigpu.surgery.int4_layers import int4_linear_with
from optigpu.surgery.places import checked_places, weight_of
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError, canonical_json

if TYPE_CHECKING:
    from optigpu.models.loading.packed_checkpoints import Unpacked

LIBRARY = "gptqmodel"
INSTALL = "gptqmodel is not installed; install it with: pip install -e '.[gptq]'."
AWQ_OUTPUTS = 64
"""How many outputs the library looks at together when it seeks where to clip."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Recipe:
    """How a model that is not quantized yet becomes one of 4-bit numbers."""

    method: str
    group_size: int
    calibration: Calibration


def missing(environment: Environment) -> str | None:
    """Why nothing can be quantized here, in one sentence, or None."""
    return None if LIBRARY in environment.software else INSTALL


def compute_in_four_bits(model: Any, recipe: Recipe, notes: Notes) -> None:
    """Exchanges the packed layers of a ready checkpoint, or quantizes the model by the recipe; records what it did.

    Raises UnsupportedError, with the model left as it was, when it can do neither.
    """
    from optigpu.models.loading.packed_checkpoints import packed_layers

    packed = dict(packed_layers(model))
    if packed:
        _require_readable(packed)
        packing = next(iter(packed.values())).packing
        _exchange(model, packed, {path: layer.bias for path, layer in packed.items()})
        _record(
            model,
            notes,
            int4_layers=len(packed),
            int4_group_size=packing.group_size,
            int4_source="checkpoint",
        )
        return
    started = time.perf_counter()
    ids = _checked_ids(model, recipe)
    folder, is_new = _quantized(model, recipe, ids)
    count = _take_over(model, recipe, folder)
    _record(
        model,
        notes,
        int4_layers=count,
        int4_group_size=recipe.group_size,
        int4_source=f"gptqmodel {version(LIBRARY)}" + ("" if is_new else ", quantized before"),
        calibration=asdict(recipe.calibration) | {"tokens_sha256": digest_of(ids)},
        quantization_s=time.perf_counter() - started,
    )


def _record(model: Any, notes: Notes, **facts: Any) -> None:
    from optigpu.ops.linear.int4_linear import int4_linear_backend

    notes.record(int4_backend=int4_linear_backend(model.device, model.dtype), **facts)


def int4_weights_of(unpacked: "Unpacked") -> Int4Weights:
    """The numbers with scales and offsets in bfloat16, as our operator takes them.

    That moves no weight by more than 1/16 of a step: scale and offset by 1/256 of at most eight steps each.
    Without zero points (8 everywhere) there are no offsets.
    """
    import torch

    q, scale, zero, _ = unpacked
    offset = None
    if bool((zero != ZERO).any()):
        offset = ((ZERO - zero.float()) * scale).to(torch.bfloat16)
    return Int4Weights(q, scale.to(torch.bfloat16), offset)


def result_digest(model: Any, recipe: Recipe, ids: list[list[int]]) -> str:
    """SHA-256 of all that makes the result another one: model, recipe, calibration text and library."""
    import torch

    facts = [asdict(recipe), ids, version(LIBRARY), model.config.to_json_string()]
    found = hashlib.sha256(canonical_json(facts).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _checked_ids(model: Any, recipe: Recipe) -> list[list[int]]:
    """What to calibrate with, once it is clear that the model can be quantized."""
    if importlib.util.find_spec(LIBRARY) is None:
        raise UnsupportedError(INSTALL)
    head = model.get_output_embeddings()
    for place in checked_places(model, recipe.method, recipe.group_size):
        outputs = weight_of(place.layer).shape[0]
        if recipe.method == "awq" and place.layer is not head and outputs % AWQ_OUTPUTS:
            raise UnsupportedError(
                f"GPTQModel's AWQ takes outputs in multiples of {AWQ_OUTPUTS}, and {place.path} has {outputs}; take "
                "gptq."
            )
    _require_own_parameters(model, recipe.method)
    return calibration_ids(model, recipe.calibration, recipe.method)


def _require_own_parameters(model: Any, technique: str) -> None:
    """GPTQModel knows each family's own layers, so none of them may have been merged or moved before."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    names = [{name for name, _ in each.named_parameters()} for each in (plain, model)]
    if names[0] != names[1]:
        raise UnsupportedError(
            f"{technique} quantizes a model with the parameters of its family, and {min(names[0] ^ names[1])} was "
            "taken out or put in before; leave out the technique that did so."
        )


def _quantized(model: Any, recipe: Recipe, ids: list[list[int]]) -> tuple[Path, bool]:
    """The folder of the quantized model, and whether it was made just now."""
    folder = cache_dir() / "quantized"
    target = folder / result_digest(model, recipe, ids)
    if target.is_dir():
        return target, False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="draft-") as name:
        draft = Path(name)
        request = Request(
            method=recipe.method,
            group_size=recipe.group_size,
            device=str(model.device),
            dtype=_dtype(model, recipe.method),
            threads=_threads(),
        )
        (draft / REQUEST).write_text(request.model_dump_json(), "utf-8")
        (draft / IDS).write_text(canonical_json(ids), "utf-8")
        model.save_pretrained(draft / PLAIN)
        _run(draft, recipe.method)
        try:
            os.replace(draft / QUANTIZED, target)  # whole or not at all, for the others that look
        except OSError:
            if not target.is_dir():  # it was not another process that came first
                raise
    return target, True


def _run(folder: Path, method: str) -> None:
    """The library in a process of its own. Raises UnsupportedError with its last words when it fails."""
    command = [sys.executable, "-m", "optigpu.surgery.gptqmodel.child", str(folder)]
    log = folder / "log.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        status = process.wait()
    if status:
        lines = _COLOURS.sub("", log.read_text("utf-8", "replace")).strip().splitlines()
        why = next((line.strip() for line in reversed(lines) if "Error" in line), f"status {status}").rstrip(
            "."
        )
        raise UnsupportedError(
            f"GPTQModel cannot quantize this model by {method} ({why}); leave {method} out."
        )


def _dtype(model: Any, method: str) -> str:
    """What the library computes in: the model's dtype, but for AWQ, which knows 16 bits alone."""
    name = str(model.dtype).removeprefix("torch.")
    return "float16" if method == "awq" and name == "float32" else name


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _take_over(model: Any, recipe: Recipe, folder: Path) -> int:
    """Puts what GPTQModel made into the model, and returns how many layers.

    AWQ has scaled what stands before the layers as well (norms, biases); GPTQ has left all else as it was.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    from optigpu.models.loading.packed_checkpoints import packed_layers, packing_of, read_packed

    packing = packing_of(config)
    if packing is None:
        raise UnsupportedError(
            f"GPTQModel left {folder.name} without packed layers; remove it from the cache folder."
        )
    twin = read_packed(
        packing,
        config,
        lambda known: AutoModelForCausalLM.from_pretrained(
            folder, config=known, dtype=model.dtype, use_safetensors=True, local_files_only=True
        ),
    ).to(model.device)
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
    """Raises UnsupportedError when a layer's scales are no numbers, or its groups are not of one size."""
    for path, layer in packed.items():
        layer.order()
        if not bool(layer.scales.isfinite().all()):
            raise UnsupportedError(
                f"The scales of {path} are not all finite numbers; the model's files are damaged."
            )


def _exchange(model: Any, packed: dict[str, Any], biases: dict[str, Any]) -> None:
    """Puts a layer of ours where each packed one stands in its model, one after the other."""
    for path, layer in packed.items():
        parent, _, name = path.rpartition(".")
        unpacked = layer.unpacked()
        ours = int4_linear_with(int4_weights_of(unpacked), biases[path], model.dtype)
        if unpacked.order is not None:
            ours = _reordered_class()(ours, unpacked.order)
        setattr(model.get_submodule(parent), name, ours.eval())


@functools.cache
def _reordered_class() -> Any:
    import torch

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

    return Reordered
