"""A device proves that it works: a process of its own multiplies two small matrices on it.

A worker without this proof would take jobs and fail one after the other.
"""

import sys
import time
from collections.abc import Callable, Sequence

from optigpu.child.messages import Answer, Broken, Proven, RunProof
from optigpu.conductor.processes.child import Child, readable
from optigpu.conductor.processes.variables import child_variables
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS
from optigpu.vocabulary import CancelledError, DeviceKind, OutOfMemoryError, ReplicateError, UnsupportedError

PROOF = (sys.executable, "-P", "-m", "optigpu.child.proof")
"""The program that computes. -P keeps files of the working directory from being taken for modules."""
PROOF_S = 180.0
"""How long it may take: torch and the driver's libraries may have to be read from a slow disk."""

OLD_DRIVER = (
    "The NVIDIA driver {driver} is too old for torch {torch}: it runs CUDA up to {cuda}, and this torch was built for "
    "CUDA {torch_cuda}; update the driver, or install a torch for CUDA {cuda} or older."
)
NO_GPU = (
    "torch finds no GPU, although the driver lists {gpu}; check with nvidia-smi that the GPU answers, and that this "
    "user may open the files /dev/nvidia*."
)
NO_KERNELS = (
    "torch {torch} has no kernels for {gpu} (compute capability {capability}); install a torch that was built for it, "
    "or start the worker with --device cpu."
)
SENTENCES: dict[str, str] = {
    "driver on your system is too old": OLD_DRIVER,
    "CUDA driver version is insufficient": OLD_DRIVER,
    "forward compatibility was attempted": OLD_DRIVER,
    "not compiled with CUDA enabled": (
        "torch {torch} was built without CUDA and cannot use {gpu}; install a CUDA build of torch, or start the worker "
        "with --device cpu."
    ),
    "no kernel image is available": NO_KERNELS,
    "ARCH_MISMATCH": NO_KERNELS,
    "Found no NVIDIA driver": NO_GPU,
    "No CUDA GPUs are available": NO_GPU,
    "no CUDA-capable device is detected": NO_GPU,
    "busy or unavailable": (
        "Another process has {gpu} for itself; end it (nvidia-smi shows it), or let several processes use the GPU "
        "with: nvidia-smi -c DEFAULT."
    ),
    "no temporary directory": (
        "{reason}: give the folder of OPTIGPU_DATA_DIR to the user that the worker runs as."
    ),
    "system not yet initialized": (
        "The fabric manager of {gpu} does not run; start it with: systemctl start nvidia-fabricmanager."
    ),
}
"""What to say, by a part of the error of torch or CUDA."""
NO_HOST_MEMORY = "This host has too little free memory to load torch; free some and start the worker again."
NO_GPU_MEMORY = (
    "{gpu} has too little free memory to multiply small matrices; end the processes that hold it ({tool} shows them) "
    "and start the worker again."
)
OTHERWISE_CPU = "torch {torch} cannot multiply small matrices on this CPU: {reason}; install torch again."
OTHERWISE_GPU = (
    "torch {torch} cannot multiply small matrices on {gpu}: {reason}; check the GPU with {tool}, or start the worker "
    "with --device cpu."
)


def prove(
    device: DeviceKind,
    *,
    cancelled: Callable[[], str | None],
    program: Sequence[str] = PROOF,
    within_s: float = PROOF_S,
) -> None:
    """Returns once the device has computed what it was asked to. `cancelled` is asked four times a second.

    Raises UnsupportedError with the reason and what helps if it does not within `within_s`, CancelledError when asked
    to stop.
    """
    answer = _answer(device, cancelled, program, within_s)
    if not isinstance(answer, Proven):
        raise UnsupportedError(sentence(answer, device, probe()))


def sentence(broken: Broken, device: DeviceKind, environment: Environment) -> str:
    """Why the device does not work, and what to do."""
    on_cpu = device is DeviceKind.CPU
    if broken.fault == "out_of_memory":
        text = NO_HOST_MEMORY if on_cpu else NO_GPU_MEMORY
    else:
        known = (text for part, text in SENTENCES.items() if part.lower() in broken.reason.lower())
        text = next(known, OTHERWISE_CPU if on_cpu else OTHERWISE_GPU)
    return text.format(**_facts(device, environment), reason=_short(broken.reason))


def _answer(
    device: DeviceKind, cancelled: Callable[[], str | None], program: Sequence[str], within_s: float
) -> Proven | Broken:
    """A process that dies or is silent counts as broken."""
    try:
        with Child(program, child_variables(1)) as child:
            child.tell(RunProof(device=device))
            answer = _listen(child, cancelled, within_s)
    except OutOfMemoryError as error:
        return Broken(fault="out_of_memory", reason=str(error))
    except ReplicateError as error:
        return Broken(fault="error", reason=str(error))
    if isinstance(answer, Proven | Broken):
        return answer
    return Broken(fault="error", reason=f"the process answered {answer.kind!r}, which was not asked for")


def _listen(child: Child, cancelled: Callable[[], str | None], within_s: float) -> Answer:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        reason = cancelled()
        if reason is not None:
            raise CancelledError(reason)
        answer = child.listen()
        if answer is not None:
            return answer
    raise ReplicateError(f"there was no answer within {within_s:g} s")


def _short(reason: str) -> str:
    """The first line, and the last one, where the output of a process follows."""
    lines = readable(reason).splitlines()
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip(".") if lines else "it said nothing"


def _facts(device: DeviceKind, environment: Environment) -> dict[str, str]:
    """What the sentences name, as far as it is known."""
    gpu = next(iter(environment.gpus(device)), None)
    known = {
        "tool": KINDS[device].tool,
        "gpu": gpu.name if gpu else "the GPU",
        "capability": gpu.compute_capability if gpu else None,
        "driver": environment.driver,
        "cuda": environment.cuda,
        "torch": environment.software.get("torch"),
        "torch_cuda": environment.software.get("torch_cuda"),
    }
    return {name: value or "unknown" for name, value in known.items()}
