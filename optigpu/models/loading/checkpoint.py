"""Reads a checkpoint whole: each number of the model comes from its files, and none is drawn at random."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from optigpu.vocabulary import UnsupportedError

AutoModel = type[AutoModelForCausalLM] | type[AutoModelForImageClassification]
_NAMED = 3
"""So many tensors are named in an error."""
_NOT_COMPUTED_WITH = "num_batches_tracked"
"""A counter of batch norms that old checkpoints leave out; nothing is computed with it while they have a momentum."""
_UNCONVERTED = "automatic conversion of the weights"
"""What transformers says where it cannot put the tensors of a checkpoint together to one of the model's (experts)."""
_MEND = "copy the whole checkpoint, or correct config.json"
_NUMBER = re.compile(r"(?<![^.])(\d+)\.")
"""A layer's number within a tensor's name."""
_HEADS = "num_nextn_predict_layers"
"""So many layers more may be in a checkpoint: heads that predict several tokens, which the library does not compute."""


def read_whole(kind: AutoModel, name: str, source: str, **options: object) -> PreTrainedModel:
    """What `kind` reads from the safetensors files of `source` with `options`; `name` is what errors call the model.

    Raises UnsupportedError for what transformers only logs: a tensor that the files lack or that has another shape
    there, which would be drawn at random, and a further tensor of a layer (a bias, a scale) or a further layer. What is
    tied may be absent, and what belongs to no layer may be there: `unused_of` says what.
    """
    read: Any = kind.from_pretrained  # its type leaves out the pair that it returns here
    try:
        model, found = read(
            source, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **options
        )
    except RuntimeError as error:
        if _UNCONVERTED not in str(error):
            raise
        raise UnsupportedError(
            f"{name} cannot be loaded: tensors of its experts are missing or do not fit each other; {_MEND}."
        ) from error
    names = list(model.state_dict())
    missing = {key for key in found["missing_keys"] if not key.endswith(_NOT_COMPUTED_WITH)}
    _require_none_missing(name, missing, found["unexpected_keys"], names)
    _require_shapes(name, found["mismatched_keys"], names)
    _require_used(name, found["unexpected_keys"], names)
    _require_all_layers(name, found["unexpected_keys"], names, model)
    loaded: PreTrainedModel = model
    _UNUSED[loaded] = _listed(sorted(found["unexpected_keys"])) or None
    return loaded


_UNUSED: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def unused_of(model: PreTrainedModel) -> str | None:
    """The tensors of its checkpoint that a model has no place for, unless by transformers' design; None without any."""
    return _UNUSED.get(model)


def _require_none_missing(
    name: str, missing: Collection[str], unexpected: Collection[str], names: Sequence[str]
) -> None:
    if not missing:
        return
    others = (
        f" (and has {_listed(sorted(unexpected))}, which the model has no place for)" if unexpected else ""
    )
    raise UnsupportedError(
        f"{name} lacks {len(missing)} of the {len(names)} tensors of the model that config.json describes: "
        f"{_listed(_in_order(missing, names))}{others}; {_MEND}."
    )


def _require_shapes(
    name: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], names: Sequence[str]
) -> None:
    shapes = {key: (list(stored), list(expected)) for key, stored, expected in mismatched}
    if not shapes:
        return
    first = _in_order(shapes, names)[0]
    stored, expected = shapes[first]
    also = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
    raise UnsupportedError(
        f"{name} does not fit its config.json: {first} is {stored} in the checkpoint and {expected} in the model"
        f"{also}; {_MEND}."
    )


def _require_used(name: str, unexpected: Iterable[str], names: Iterable[str]) -> None:
    layers = tuple(key.removesuffix("weight") for key in names if key.endswith(".weight"))
    unused = sorted(key for key in unexpected if key.startswith(layers))
    if unused:
        raise UnsupportedError(
            f"{name} has tensors for layers of the model that the model does not compute with, since config.json does "
            f"not say so: {_listed(unused)}; correct config.json, or remove them."
        )


def _require_all_layers(
    name: str, unexpected: Iterable[str], names: Iterable[str], model: PreTrainedModel
) -> None:
    """A checkpoint may be written without the prefix that the model's own names have."""
    prefix = f"{model.base_model_prefix}."
    own = _counts([*names, *(each.removeprefix(prefix) for each in names)])
    more = getattr(model.config.get_text_config(decoder=True), _HEADS, None) or 0
    for path, count in _counts(unexpected).items():
        if path in own and count > own[path] + more:
            raise UnsupportedError(
                f"{name} has {count} layers in {path} and config.json says {own[path]}; correct config.json, or remove "
                "the other layers."
            )


def _counts(names: Iterable[str]) -> Mapping[str, int]:
    """How many layers there are by the path of their list ("model.layers"), as far as their numbers say."""
    found: dict[str, int] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            path = name[: number.start()].rstrip(".")
            found[path] = max(found.get(path, 0), int(number[1]) + 1)
    return found


def _in_order(keys: Collection[str], names: Sequence[str]) -> list[str]:
    places = {key: place for place, key in enumerate(names)}
    return sorted(keys, key=lambda key: (places.get(key, len(names)), key))


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more
