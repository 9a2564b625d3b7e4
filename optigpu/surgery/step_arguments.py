"""Checks that a compiled, exported or captured function gets the shapes and the cache of its first call."""

import torch
from torch.utils._pytree import tree_leaves
from transformers import Cache

from optigpu.vocabulary import ReplicateError

MadeFor = tuple[object, ...]
"""The shape of each tensor among the arguments, and the others themselves."""


def made_for(*arguments: object) -> MadeFor:
    """The shapes and arguments for which a first call makes a function."""
    return tuple(getattr(argument, "shape", argument) for argument in arguments)


def require_same(technique: str, known: MadeFor, *arguments: object) -> None:
    """Raises ReplicateError when a function that was made for `known` is called with something else."""
    if made_for(*arguments) != known:
        raise ReplicateError(
            f"What {technique} made takes only the batch size, the lengths and the cache of its first call; measure "
            "other shapes in another process."
        )


def cache_tensors(cache: Cache) -> list[torch.Tensor]:
    """The tensors that a transformers cache writes in place, each once."""
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def is_filled(cache: Cache) -> bool:
    """Whether a cache has allocated its tensors; the library does so at the first token."""
    return all(getattr(layer, "is_initialized", False) for layer in cache.layers)
