"""A function of a Python file that somebody brought, on inputs that are drawn for it.

Nothing that this process says of its answers or of its speed is believed without the conductor's own look at both
(`optigpu.conductor.processes.answers`): the file's code can change anything in here.
"""

import hashlib
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import psutil
import torch

from optigpu.backends.operators import DrawnInput, KernelCall
from optigpu.backends.torch.device import TorchDevice, free_bytes
from optigpu.documents.facts import AnswerPart, Answers
from optigpu.vocabulary import DeviceKind, OptiGPUError

CPU_SETS_BYTES, GPU_SETS_BYTES, MOST_SETS = 2**26, 2**28, 1024
"""So many bytes of inputs are called in turn, which is more than the caches near the cores, or a GPU's L2, hold: a call
must not find its inputs where the one before left them."""
MEMORY_SHARE = 0.8
"""Of the host's free memory that the function may take."""
MODULE = "optigpu_brought_kernel"
Returned = torch.Tensor | Sequence[torch.Tensor]


class TorchKernel:
    """The function with its sets of inputs, which are called in turn."""

    def __init__(self, place: TorchDevice, call: KernelCall) -> None:
        """Draws the inputs before the file is imported. Raises OptiGPUError for a file that cannot be."""
        self._place, self._call = place, call
        dtype: torch.dtype = getattr(torch, call.dtype)
        first = self._empty(dtype)
        size = max(1, sum(tensor.nbytes for tensor in first if isinstance(tensor, torch.Tensor)))
        most = CPU_SETS_BYTES if place.device is DeviceKind.CPU else GPU_SETS_BYTES
        count = max(1, min(MOST_SETS, most // size))
        self._sets = [first, *(self._empty(dtype) for _ in range(count - 1))]
        self._source = torch.Generator(place.name)
        self._next, self._drawn = 0, 0
        # Copies of answers: room for many, of which the first are those that were given last.
        self._room: list[list[torch.Tensor]] = []
        self._kept: Sequence[list[torch.Tensor]] = ()
        self.redraw(place.seed)
        torch.set_grad_enabled(False)
        if place.device is DeviceKind.CPU and sys.platform == "linux":
            _bound_memory()
        function = imported(call.text, call.function)
        self._function: Callable[..., Returned] = (
            torch.compile(function, dynamic=False) if call.compiled else function
        )

    def call(self) -> Returned:
        given = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        return self._function(*given)

    def held(self) -> Sequence[torch.Tensor]:
        return [each for given in self._sets for each in given if isinstance(each, torch.Tensor)]

    def seconds(self, calls: int) -> float:
        clock = self._place.clock
        begin = clock.mark()
        for _ in range(calls):
            self.call()
        return clock.seconds([begin, clock.mark()])[0]

    def redraw(self, seed: int) -> None:
        self.draw(seed, len(self._sets))

    def draw(self, seed: int, calls: int) -> int:
        """Into the same storages, so that an answer that was kept for one of them is wrong."""
        self._source.manual_seed(seed)
        self._drawn, self._next = min(calls, len(self._sets)), 0
        for given in self._sets[: self._drawn]:
            for tensor, argument in zip(given, self._call.arguments, strict=True):
                if isinstance(tensor, torch.Tensor) and isinstance(argument, DrawnInput):
                    if argument.below:
                        tensor.random_(0, argument.below, generator=self._source)
                    else:
                        tensor.normal_(generator=self._source)
        self._place.clock.seconds([])  # a GPU is done with it before anything is timed
        return self._drawn

    def answer(self, calls: int, file: Path, *, with_inputs: bool) -> Answers:
        """Each answer is copied before the next call, as whoever uses it would read it: what is returned must not be
        changed by later calls, nor computed later."""
        marks = []
        outputs, inputs = list[torch.Tensor](), list[torch.Tensor]()
        for number, given in enumerate(self._sets[: min(calls, self._drawn)]):
            marks.append(self._place.clock.mark())
            returned = self._function(*given)
            marks.append(self._place.clock.mark())
            outputs = self._plain(returned)
            inputs = [each for each in given if with_inputs and isinstance(each, torch.Tensor)]
            self._keep(number, [*outputs, *inputs])
        durations = self._place.clock.seconds(marks)[::2]
        self._kept = self._room[: len(durations)]
        mode = "r+b" if file.exists() else "w+b"  # pages that are there are written faster than new ones
        with file.open(mode) as out:
            for content in self._bytes():
                out.write(content)
            out.truncate()
        parts, given_parts = tuple(map(_part, outputs)), tuple(map(_part, inputs))
        if any(tuple(map(_part, each)) != parts + given_parts for each in self._kept):
            raise OptiGPUError(
                f"{self._call.function} returned tensors of other shapes for inputs of the same shapes."
            )
        return Answers(calls=len(self._kept), parts=parts, inputs=given_parts, seconds=sum(durations))

    def digest(self) -> str:
        found = hashlib.sha256()
        for content in self._bytes():
            found.update(content)
        return found.hexdigest()

    def _bytes(self) -> Iterator[memoryview]:
        """Of the answers that were given last."""
        for each in self._kept:
            for tensor in each:
                yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data

    def _keep(self, number: int, found: Sequence[torch.Tensor]) -> None:
        """Copies an answer to where one of the same shape was before: new pages would take longer than many calls."""
        if number == len(self._room):
            self._room.append([])
        room = self._room[number]
        if list(map(_part, room)) == list(map(_part, found)):
            for kept, tensor in zip(room, found, strict=True):
                kept.copy_(tensor)
        else:
            self._room[number] = [tensor.clone(memory_format=torch.contiguous_format) for tensor in found]

    def _plain(self, returned: Returned) -> list[torch.Tensor]:
        """Raises OptiGPUError for anything but plain tensors on the device: one may compute when it is read."""
        found = [returned] if isinstance(returned, torch.Tensor) else returned
        for each in found if isinstance(found, list | tuple) else [found]:
            if type(each) is not torch.Tensor or each.layout is not torch.strided:
                what = type(each).__name__ if type(each) is not torch.Tensor else f"{each.layout} tensor"
                raise OptiGPUError(
                    f"{self._call.function} returned a {what}; it must return a plain tensor, or a tuple of them."
                )
            if each.device.type != torch.device(self._place.name).type:
                raise OptiGPUError(
                    f"{self._call.function} returned a tensor on {each.device.type}, not on {self._place.name}."
                )
        return list(found)

    def _empty(self, dtype: torch.dtype) -> list[torch.Tensor | bool | int | float]:
        return [
            torch.empty(each.shape, dtype=torch.int64 if each.below else dtype, device=self._place.name)
            if isinstance(each, DrawnInput)
            else each
            for each in self._call.arguments
        ]


def _part(tensor: torch.Tensor) -> AnswerPart:
    return AnswerPart(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _bound_memory() -> None:
    """An allocation beyond most of the host's free memory is an error in this process, before the kernel has to kill
    one."""
    most = psutil.Process().memory_info().data + int(MEMORY_SHARE * free_bytes(DeviceKind.CPU))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(ValueError, OSError):  # a lower limit stays
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def imported(text: str, function: str) -> Callable[..., Returned]:
    """A function of a file with that text: Triton and torch.compile read a function's source. Raises OptiGPUError where
    importing it ends with an error, or the function is none."""
    path = Path(tempfile.mkdtemp(prefix="kernel-")) / f"{MODULE}.py"
    path.write_text(text, encoding="utf-8")
    spec = spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise OptiGPUError(f"The kernel's file cannot be imported: {type(error).__name__}: {told}") from error
    found: Callable[..., Returned] | None = getattr(module, function, None)
    if not callable(found):
        raise OptiGPUError(f"{function} of the kernel's file is no function.")
    return found
