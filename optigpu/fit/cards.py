"""The GPU that a person means: one of the catalog, by a name in any spelling."""

import re
from collections.abc import Mapping
from functools import lru_cache

from optigpu.documents.names import closest, did_you_mean
from optigpu.hardware.catalog import Device, HardwareKind, devices
from optigpu.vocabulary import SpecError

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct")


def gpu_named(name: str) -> Device:
    """The GPU of that name, without regard to case, spaces, hyphens and its maker: "rtx4060", "A100 SXM 80GB".

    Raises SpecError for a name that the catalog does not have, with the closest ones, and for one that several GPUs
    share ("a100"), with all of them.
    """
    wanted = _plain(name)
    exact = _by_name().get(wanted)
    if exact is not None:
        return exact
    sharing = [device.name for device in _gpus() if _plain(device.name).startswith(wanted)] if wanted else []
    if len(sharing) == 1:
        return next(device for device in _gpus() if device.name == sharing[0])
    if sharing:
        raise SpecError(f"gpu: {name!r} may be {', '.join(sharing)}; name one of them.")
    names = [device.name for device in _gpus()]
    plain = {_plain(each): each for each in names}
    meant = did_you_mean(tuple(plain[each] for each in closest(wanted, plain)))
    raise SpecError(f"gpu: the catalog has no {name!r}.{meant} Its GPUs are {', '.join(names)}.")


def _gpus() -> tuple[Device, ...]:
    return tuple(device for device in devices() if device.kind is HardwareKind.GPU and device.memory_bytes)


@lru_cache(maxsize=1)
def _by_name() -> Mapping[str, Device]:
    return {_plain(name): device for device in _gpus() for name in (device.name, *device.aliases)}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.casefold()))
