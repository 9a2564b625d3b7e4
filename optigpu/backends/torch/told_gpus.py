"""python -m optigpu.backends.torch.told_gpus KIND: what torch tells of its GPUs of a kind, as JSON on stdout.

One list, with an entry for each GPU: the properties that optigpu.hardware.gpu reads, under torch's names. Empty
where torch cannot use such a GPU.
"""

import json
import sys
from typing import Any

from optigpu.backends.torch.device import is_there, module_of
from optigpu.vocabulary import DeviceKind

PROPERTIES = ("name", "total_memory", "gcnArchName", "uuid", "driver_version")


def told(device: DeviceKind) -> list[dict[str, Any]]:
    """torch.mps has no properties: its entry is empty."""
    if not is_there(device):
        return []
    if device is DeviceKind.MPS:
        return [{}]
    module = module_of(device)
    every = (module.get_device_properties(number) for number in range(module.device_count()))
    return [described(each) for each in every]


def described(properties: object) -> dict[str, Any]:
    """Those of a GPU that it has, as JSON."""
    found = {name: getattr(properties, name, None) for name in PROPERTIES}
    return {name: _plain(value) for name, value in found.items() if value is not None}


def _plain(value: object) -> int | str:
    """A UUID may be bytes (torch.xpu) or an object of its own."""
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int) else str(value)


if __name__ == "__main__":
    print(json.dumps(told(DeviceKind(sys.argv[1]))))
