"""A packed model that is called itself: its weights are unpacked once and kept beside the packed ones."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from optigpu.hardware.cgroup import free_host_bytes
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, DecodeTable

FREE_SHARE = 0.8
"""Of the free memory that the unpacked weights may take; more would leave too little for what is computed."""


def unpack_when_called(model: PreTrainedModel) -> None:
    """Has a model unpack its weights when it is called for the first time, as transformers' own loops do."""

    def before(*_: object) -> None:
        if unpack(model):
            handle.remove()

    handle = model.register_forward_pre_hook(before)


def unpack(model: PreTrainedModel) -> bool:
    """Whether a model has its weights unpacked, in the dtype that they were loaded in: now it has if they fit.

    Where there is too little memory each layer goes on unpacking its weights at each call.
    """
    packed = [module for module in _holders(model) if module.kept is None]
    sizes = {_place(module): module.inputs * module.outputs * model.dtype.itemsize for module in packed}
    if sum(sizes.values()) > FREE_SHARE * _free_bytes(model.device):
        return False
    made: dict[int, torch.Tensor] = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        for module in packed:
            place = _place(module)  # of a tied table, which is there twice
            if place not in made:
                made[place] = module.unpacked().to(model.dtype)
            module.kept = made[place]
    return True


def _holders(model: PreTrainedModel) -> Iterator[DecodeLinear | DecodeTable]:
    return (module for module in model.modules() if isinstance(module, DecodeLinear | DecodeTable))


def _place(module: DecodeLinear | DecodeTable) -> int:
    return module.numbers.data_ptr()


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_host_bytes()
