"""The GPU of the catalog that a person means, and what a kernel may take of an NVIDIA one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from optigpu.documents.names import closest, did_you_mean
from optigpu.hardware.catalog import (
    Allocation,
    Capability,
    Device,
    HardwareKind,
    allocations,
    capabilities,
    devices,
    find,
    short_names,
)
from optigpu.vocabulary import SpecError

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct")


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU with the limits of its multiprocessors."""

    device: Device
    capability: Capability
    allocation: Allocation

    @property
    def multiprocessors(self) -> int:
        return self.device.blocks[0].units


def gpu_of(name: str, field: str = "gpu_model") -> Device:
    """The GPU of the catalog of that name, in any spelling: "A100", "rtx4090", "NVIDIA L40S".

    Raises SpecError for a name that the catalog does not have, with `field` and the names that it has.
    """
    found = _gpus().get(_plain(name))
    if found is None:
        raise _unknown(field, name, [device.name for device in devices() if device.kind is HardwareKind.GPU])
    return found


def card_of(name: str) -> Card:
    """As `gpu_of`, for a GPU whose multiprocessors the catalog knows: an NVIDIA one."""
    found = _gpus().get(_plain(name))
    card = _cards().get(found.name) if found else None
    if card is None:
        raise _unknown("gpu_model", name, list(_cards()))
    return card


def _unknown(field: str, name: str, known: list[str]) -> SpecError:
    """Names are listed by the shortest that each has."""
    shortest = sorted({_shortest(each) for each in known})
    plain = {_plain(each): each for each in shortest}
    meant = did_you_mean(tuple(plain[each] for each in closest(_plain(name), plain)))
    return SpecError(f"{field}: {name!r} is not in the catalog.{meant} Its GPUs are {', '.join(shortest)}.")


def _shortest(name: str) -> str:
    device = find(name)
    shorts = [short for short, meant in short_names().items() if meant == name]
    return min((name, *(device.aliases if device else ()), *shorts), key=len)


@lru_cache(maxsize=1)
def _gpus() -> Mapping[str, Device]:
    gpus = [device for device in devices() if device.kind is HardwareKind.GPU]
    found = {_plain(name): device for device in gpus for name in (device.name, *device.aliases)}
    short = {_plain(name): _plain(meant) for name, meant in short_names().items()}
    return found | {name: found[meant] for name, meant in short.items()}


@lru_cache(maxsize=1)
def _cards() -> Mapping[str, Card]:
    known = ((find(name), each) for each in capabilities() for name in each.cards)
    return {
        device.name: Card(device, each, allocations()[each.compute_capability])
        for device, each in known
        if device is not None and device.blocks
    }


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.casefold()))
