"""Steps that are recorded as CUDA graphs, and such that are exported and compiled to a library by AOTInductor."""

import copy
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock  # torch itself depends on it
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.utils._pytree import tree_map_only
from transformers import Cache

from optigpu.paths import cache_dir
from optigpu.surgery.compiling import MadeFor, cache_tensors, is_filled, made_for, require_same
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError, unsupported

WARM_UPS = 3
"""Runs before the recording: libraries choose their kernels and allocate their workspaces in the first ones."""

Recorder = Callable[[Callable[[], object], Callable[[], None]], tuple[Callable[[], None], Any]]
"""`replay, outputs = record(run, undo)`: records what `run` does without doing it; each replay writes `outputs` anew.

`undo` takes back what a call of `run` before the recording did.
"""


class Replayed:
    """Records at its first call; later calls need arguments of the same shapes.

    The tensors among the arguments are inputs, copied to where the recording reads them; a cache is written where it
    stands. A call returns what the recording writes: the next call overwrites it.
    """

    def __init__(self, run: Callable[..., Any], notes: Notes, record: Recorder) -> None:
        self._run = run
        self._notes = notes
        self._record = record
        self._made_for: MadeFor | None = None
        self._inputs: list[torch.Tensor] = []
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None

    def __call__(self, *arguments: Any) -> Any:
        *inputs, cache = arguments if len(arguments) > 1 else (*arguments, None)
        if cache is not None and not is_filled(cache):
            return self._run(*arguments)  # allocates the cache's tensors, which the recording needs
        if self._made_for is None or self._replay is None:
            self._replay = self._recorded(inputs, cache)
            self._made_for = made_for(*arguments)
        require_same("cuda_graphs", self._made_for, *arguments)
        for held, argument in zip(self._inputs, inputs, strict=True):
            held.copy_(argument)
        self._replay()
        return self._outputs

    def _recorded(self, inputs: list[torch.Tensor], cache: Cache | None) -> Callable[[], None]:
        started = time.perf_counter()
        self._inputs = [argument.clone() for argument in inputs]
        kept = [(tensor, tensor.clone()) for tensor in (cache_tensors(cache) if cache is not None else ())]

        def run() -> object:
            return self._run(*self._inputs, *(() if cache is None else (cache,)))

        def undo() -> None:
            for tensor, before in kept:
                tensor.copy_(before)

        replay, self._outputs = self._record(run, undo)
        self._notes.record(cuda_graphs=1, cuda_graph_record_s=time.perf_counter() - started)
        return replay


def record_cuda_graph(run: Callable[[], object], undo: Callable[[], None]) -> tuple[Callable[[], None], Any]:
    """Warms up on a separate stream, as recording wants it, and records.

    Raises UnsupportedError where an operation cannot be recorded: it waits for the device, or reads the host's memory.
    Source: PyTorch documentation, CUDA semantics: CUDA Graphs.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with _without_autocast_cache():
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
                undo()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        sentence = "cuda_graphs cannot record this model ({}); leave it out of the stack."
        with unsupported(RuntimeError, sentence.format), torch.cuda.graph(graph):
            outputs = run()
    torch.cuda.synchronize()
    return graph.replay, outputs


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Turns autocast's cache off: weights converted earlier would be missing in the recording, and freed at its
    replay."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


BUILD_TIMEOUT_S = 1800
CONFIG = {
    # Weights stay the model's own: packed into the library they would be there twice.
    "aot_inductor.package_constants_in_so": False,
    # TorchInductor puts tensors of few elements into the code, also such as a step writes (torch 2.13); not with these.
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


@dataclass(frozen=True)
class Package:
    """A loaded package: `run([inputs])` returns the outputs, flat. `hit` says that it was compiled before.

    The package has no weights and no values of weights in it, so that one serves every model of the same graph. What it
    reads and writes are the tensors that it is given when it is loaded, in place. `tensors` are those whose addresses
    `run` uses: kept, they stay alive.
    """

    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    tensors: dict[str, torch.Tensor]
    hit: bool
    build_s: float
    load_s: float
    size_bytes: int


def load_package(exported: torch.export.ExportedProgram) -> Package:
    """Compiles an exported program, unless that was done before, and loads it around the tensors that it was made of.

    Raises UnsupportedError when it cannot be compiled or loaded here, with the compiler's first line.
    """
    started = time.perf_counter()
    digest = hashlib.sha256("\0".join(made_of(exported).values()).encode()).hexdigest()[:32]
    path = folder() / f"{digest}.pt2"
    hit = path.is_file()
    with unsupported((OSError, RuntimeError), "AOTInductor cannot compile this model here: {}.".format):
        if not hit:
            _build(exported, path)
        built = time.perf_counter()
        loaded = torch._inductor.aoti_load_package(str(path), run_single_threaded=True)
    tensors = {**exported.state_dict, **exported.constants}
    names = loaded.get_constant_fqns()
    if unknown := set(names) - set(tensors):
        raise UnsupportedError(
            f"AOTInductor made constants that are not weights of this model ({', '.join(sorted(unknown))}); leave "
            "export_aot out of the stack."
        )
    wanted = {name: tensors[name] for name in names}
    loaded.load_constants(wanted, check_full_update=True, user_managed=True)
    load_s = time.perf_counter() - built
    return Package(loaded.loader.boxed_run, wanted, hit, built - started, load_s, path.stat().st_size)


def folder() -> Path:
    """The folder of the compiled packages."""
    return cache_dir() / "aot"


def _build(exported: torch.export.ExportedProgram, target: Path) -> None:
    """Compiles next to `target` and renames, so that half a file is never loaded."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = target.with_name(f"{target.stem}.{os.getpid()}.pt2")
    with FileLock(target.with_suffix(".lock"), timeout=BUILD_TIMEOUT_S):
        if target.is_file():
            return
        try:
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(unfinished), inductor_configs=dict(CONFIG)
            )
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def made_of(exported: torch.export.ExportedProgram) -> dict[str, str]:
    """All that the code depends on: the graph, its tensors' layouts, the compiler and the device."""
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    layouts = [(str(value.dtype), str(value.device), value.shape, value.stride()) for value in values]
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    other = torch.xpu.get_device_name(0) if torch.xpu.is_available() else "none"
    settings = torch._inductor.config.save_config_portable(ignore_private_configs=False)
    settings.pop("aot_inductor.metadata", None)  # of the last package made in this process
    return {
        "graph": str(exported.graph),
        "signature": str(exported.graph_signature),
        "layouts": str(layouts),
        "torch": torch.__version__,
        "inductor": str(sorted(settings.items())),
        "config": str(CONFIG),
        "instructions": str(pick_vec_isa()),
        "threads": str(torch.get_num_threads()),
        "gpu": f"{gpu.name} {gpu.major}.{gpu.minor}" if gpu else other,
    }


class ExportedStep:
    """Exports and compiles at its first call; later calls need the same batch size and the same cache."""

    def __init__(self, step: Any, notes: Notes) -> None:
        self._step = step
        self._notes = notes
        self._made_for: MadeFor | None = None
        self._package: Package | None = None

    def __call__(
        self, tokens: torch.Tensor, position: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_filled(cache):
            next_tokens, logits = self._step(tokens, position, cache)  # allocates the cache's tensors
            return next_tokens, logits
        if self._made_for is None or self._package is None:
            self._package = self._library(tokens, position, cache)
            self._made_for = made_for(tokens, position, cache)
        require_same("export_aot", self._made_for, tokens, position, cache)
        next_tokens, logits = self._package.run([tokens, position])
        return next_tokens, logits

    def _library(self, tokens: torch.Tensor, position: torch.Tensor, cache: Cache) -> Package:
        """Raises UnsupportedError when the step cannot be exported or compiled here."""
        started = time.perf_counter()
        with unsupported(
            (RuntimeError, ValueError), "torch.export cannot make one graph of this model: {}.".format
        ):
            module = StepWithCache(self._step, cache)
            exported = torch.export.export(module, (tokens, position), strict=False)
        exported_s = time.perf_counter() - started
        package = load_package(exported)
        self._notes.record(
            aot_export_s=exported_s,
            aot_build_s=package.build_s,
            aot_load_s=package.load_s,
            aot_cache_hit=package.hit,
            aot_library_bytes=package.size_bytes,
        )
        return package


class StepWithCache(torch.nn.Module):
    """A step with its cache as buffers: the graph then writes them in place, instead of copies."""

    def __init__(self, step: Any, cache: Cache) -> None:
        super().__init__()
        self.model = step.model
        self._step = step
        self._cache = copy.copy(cache)
        self._cache.layers = [copy.copy(layer) for layer in cache.layers]
        self._kept = [dict(vars(layer)) for layer in cache.layers]
        self._names = {id(tensor): f"cache_{index}" for index, tensor in enumerate(cache_tensors(cache))}
        for tensor in cache_tensors(cache):
            self.register_buffer(self._names[id(tensor)], tensor)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer, kept in zip(self._cache.layers, self._kept, strict=True):
            # While the graph is traced, buffers are in the place of the cache's tensors.
            vars(layer).update(
                tree_map_only(torch.Tensor, lambda tensor: getattr(self, self._names[id(tensor)]), kept)
            )
        next_tokens, logits = self._step(tokens, position, self._cache)
        return next_tokens, logits
