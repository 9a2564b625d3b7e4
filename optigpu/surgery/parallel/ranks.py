"""Rank 0 of a divided decoder: starts the others, and announces each pass to them."""

import atexit
import gc
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.distributed as dist
from transformers import Cache, PreTrainedModel

from optigpu.models.families import AttentionParts, Decoder, Mlp, family_of
from optigpu.surgery.parallel import rank as program
from optigpu.surgery.parallel.rank import Announcement, meet, share
from optigpu.surgery.places import require_unquantized
from optigpu.vocabulary import OptiGPUError, UnsupportedError

END_S = 10.0
Kind = Literal["tensor", "pipeline"]


class Ranks:
    """The other processes of a divided decoder. They end with `end`, with this process, and when it breaks off."""

    def __init__(
        self, kind: Kind, parts: TemporaryDirectory[str], ways: int, decoder: PreTrainedModel
    ) -> None:
        """`parts` has the part of each other rank as RANK.pt, and is removed once they are read.

        They run with each pass of `decoder`, and end when nobody holds it any more. CPU threads are divided evenly.
        Raises OptiGPUError when the others do not start.
        """
        if dist.is_initialized():
            gc.collect()  # a model that nobody holds any more ends its ranks
        if dist.is_initialized():
            raise UnsupportedError("A model is divided once in a process; another one is divided already.")
        self.last = Announcement()
        self._kind, self._ended = kind, False
        self._threads = torch.get_num_threads()
        threads = max(1, self._threads // ways)
        meeting = Path(parts.name) / "meeting"
        command = (sys.executable, "-P", "-m", program.__name__, kind, parts.name)
        self._others = []
        for rank in range(1, ways):
            numbers = ("--rank", str(rank), "--ways", str(ways), "--threads", str(threads))
            self._others.append(subprocess.Popen((*command, *numbers), stdin=subprocess.DEVNULL))
        try:
            meet(meeting, 0, ways)
        except RuntimeError as error:
            self._kill()
            raise OptiGPUError(f"The other processes of the divided model did not start: {error}") from error
        torch.set_num_threads(threads)
        parts.cleanup()
        atexit.register(self.end)
        decoder.register_forward_pre_hook(self.announce, with_kwargs=True)
        weakref.finalize(decoder, self.end)

    def announce(
        self, decoder: torch.nn.Module, given: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[()], dict[str, object]]:
        """The hook before a forward pass, which gives it embedded ids. Raises UnsupportedError for padded sequences."""
        assert isinstance(decoder, PreTrainedModel)
        ids = given[0] if given else named.pop("input_ids", None)
        states = named.get("inputs_embeds") if ids is None else decoder.get_input_embeddings()(ids)
        mask, cache = named.get("attention_mask"), named.get("past_key_values")
        assert isinstance(states, torch.Tensor)
        if isinstance(mask, torch.Tensor) and not bool(mask.all()):
            raise UnsupportedError("A divided model runs sequences without padding alone.")
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        self.last = Announcement(states.shape[0], states.shape[1], int(past))
        self.last.tell()
        states = states.contiguous()
        if self._kind == "tensor":
            share(states)
        return (), {**named, "inputs_embeds": states}

    def end(self) -> None:
        """Tells the others to end, and ends those that do not; does nothing the second time."""
        if self._ended:
            return
        self._ended = True
        atexit.unregister(self.end)
        if dist.is_initialized():
            with suppress(RuntimeError):  # the others may have gone before
                Announcement().tell()
            dist.destroy_process_group()
            torch.set_num_threads(self._threads)
        for other in self._others:
            with suppress(subprocess.TimeoutExpired):
                other.wait(END_S)
        self._kill()

    def _kill(self) -> None:
        for other in self._others:
            other.kill()
            other.wait()


@dataclass(frozen=True)
class Divisible:
    """A loaded model whose parts are all known. `core` is the decoder without the head."""

    core: PreTrainedModel
    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp

    @property
    def blocks(self) -> list[torch.nn.Module]:
        return list(getattr(self.core, self.decoder.blocks))


def divisible(model: PreTrainedModel, technique: str) -> Divisible:
    """Raises UnsupportedError for a family that is not divided here, and for quantized weights."""
    require_unquantized(model, technique)
    family = family_of(model.config.model_type)
    # A forward pass that needs a mask knows more of the tokens than what stands for them (`inputs_embeds`).
    if not (family.decoder and family.attention and family.mlp) or family.needs_mask:
        raise UnsupportedError(
            f"{technique} does not divide {family.title} models; leave it out of the stack."
        )
    core = model.get_submodule(family.decoder.path)
    assert isinstance(core, PreTrainedModel)
    return Divisible(core, family.decoder, family.attention, family.mlp)
