"""The catalog of published hardware peaks and limits, read from catalog.toml, and microcontroller boards with their
memories, clocks and vector units, read from boards.toml. Measured peaks are stored elsewhere."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field, computed_field

from optigpu.documents.fields import closest, did_you_mean
from optigpu.vocabulary import Frozen, SpecError

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]
Positive = Annotated[float, Field(gt=0)]
_CLASS = re.compile(r"^(?:\d+x )?(?P<name>.+?)(?: \d+ GiB| \d+ cores?)?$")


class HardwareKind(StrEnum):
    """The kind of a device. A `soc` is a board or chip whose processors share its memory."""

    GPU = "gpu"
    TPU = "tpu"
    CPU = "cpu"
    SOC = "soc"
    MICROCONTROLLER = "microcontroller"


class ParallelUnits(Frozen):
    """Equal units (cores, multiprocessors) that work in parallel; `flop_per_cycle` is per unit."""

    clock_hz: Positive
    units: int = Field(gt=0)
    flop_per_cycle: dict[Dtype, Positive]


class Device(Frozen):
    """A device of the catalog; null means unpublished or uncertain.

    Rates are dense, count a multiply-accumulate as 2 operations, and fp16 and bf16 accumulate in fp32. `tdp_w` is the
    most that the maker lets it draw, `price_usd` the price at launch.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: HardwareKind
    memory_bytes: int | None = Field(None, gt=0)
    memory_bandwidth_bytes_per_s: Positive | None = None
    tdp_w: Positive | None = None
    price_usd: Positive | None = None
    published_flop_per_s: dict[Dtype, Positive] = Field(default_factory=dict)
    blocks: tuple[ParallelUnits, ...] = ()
    source: str
    notes: str | None = None

    def derived_flop_per_s(self) -> dict[Dtype, float]:
        """Units times clock times operations per cycle, summed over the blocks."""
        rates: dict[Dtype, float] = defaultdict(float)
        for block in self.blocks:
            for dtype, per_cycle in block.flop_per_cycle.items():
                rates[dtype] += block.clock_hz * block.units * per_cycle
        return dict(rates)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def peak_flop_per_s(self) -> dict[Dtype, float]:
        """Operations per second for each dtype: published, else derived."""
        return self.derived_flop_per_s() | self.published_flop_per_s


class Capability(Frozen):
    """What one multiprocessor of an NVIDIA GPU has, and what a thread and a block may take of it.

    `multiprocessors` are those of the first of `cards`. Registers have 32 bits.
    """

    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    cards: tuple[str, ...] = Field(min_length=1)
    multiprocessors: int = Field(gt=0)
    threads: int = Field(gt=0)
    threads_per_block: int = Field(1024, gt=0)
    blocks: int = Field(gt=0)
    registers: int = Field(65_536, gt=0)
    registers_per_thread: int = Field(255, gt=0)
    shared_bytes: int = Field(gt=0)
    shared_bytes_per_block: int = Field(gt=0)
    reserved_bytes_per_block: int = Field(ge=0)

    @property
    def parts(self) -> tuple[int, int]:
        """Major and minor: (7, 5)."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """As compilers write it: "sm_75"."""
        return f"sm_{self.compute_capability.replace('.', '')}"


class Allocation(Frozen):
    """How a multiprocessor of a compute capability gives out registers and shared memory, and what its warps multiply.

    A warp takes its registers in multiples of `register_unit` from one of `partitions` equal parts. `mma` is the shape
    [m, n, k] of a warp's matrix instruction by the type of its operands.
    """

    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    register_unit: int = Field(256, gt=0)
    partitions: int = Field(4, gt=0)
    shared_unit_bytes: int = Field(gt=0)
    async_copy: bool = True
    mma: dict[Dtype, tuple[int, int, int]]


class Catalog(Frozen):
    """What catalog.toml holds; `short_names` are names without their variant, each with the device that it means."""

    device: tuple[Device, ...]
    capability: tuple[Capability, ...]
    allocation: tuple[Allocation, ...]
    short_names: dict[str, str]


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    text = files("optigpu.hardware").joinpath("catalog.toml").read_text(encoding="utf-8")
    return Catalog.model_validate(tomllib.loads(text))


def devices() -> tuple[Device, ...]:
    return catalog().device


def capabilities() -> tuple[Capability, ...]:
    """The limits of NVIDIA's compute capabilities, the oldest first."""
    return catalog().capability


@lru_cache(maxsize=1)
def allocations() -> Mapping[str, Allocation]:
    """How multiprocessors give out what they have, by compute capability."""
    return {each.compute_capability: each for each in catalog().allocation}


def find(name: str) -> Device | None:
    """The device with that name or alias. Parts of names do not match: an RTX 4060 is not an RTX 4060 Laptop GPU."""
    return _by_name().get(_plain(name))


def find_class(hardware_class: str) -> Device | None:
    """The device of a hardware class, such as "1x NVIDIA H200 140 GiB" or "AMD EPYC 7763 64 cores".

    None for a class of several kinds of GPUs, and for a device that is not in the catalog.
    """
    match = _CLASS.match(hardware_class)
    return find(match["name"]) if match else None


@lru_cache(maxsize=1)
def _by_name() -> Mapping[str, Device]:
    return {_plain(name): device for device in devices() for name in (device.name, *device.aliases)}


def _plain(name: str) -> str:
    return " ".join(re.sub(r"\((?:R|TM)\)", " ", name, flags=re.IGNORECASE).casefold().split())


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
    found = _gpus().get(_letters(name))
    if found is None:
        raise _unknown(field, name, [device.name for device in devices() if device.kind is HardwareKind.GPU])
    return found


def card_of(name: str) -> Card:
    """As `gpu_of`, for a GPU whose multiprocessors the catalog knows: an NVIDIA one."""
    found = _gpus().get(_letters(name))
    card = _cards().get(found.name) if found else None
    if card is None:
        raise _unknown("gpu_model", name, list(_cards()))
    return card


def _unknown(field: str, name: str, known: list[str]) -> SpecError:
    """Lists each of the known by its shortest name."""
    names = ((each, find(each)) for each in known)
    every = {each: [each, *(device.aliases if device else ())] for each, device in names}
    for short, meant in catalog().short_names.items():
        every.get(meant, []).append(short)
    shortest = sorted({min(each, key=len) for each in every.values()})
    plain = {_letters(each): each for each in shortest}
    meant = did_you_mean(tuple(plain[each] for each in closest(_letters(name), plain)))
    return SpecError(f"{field}: {name!r} is not in the catalog.{meant} Its GPUs are {', '.join(shortest)}.")


@lru_cache(maxsize=1)
def _gpus() -> Mapping[str, Device]:
    gpus = [device for device in devices() if device.kind is HardwareKind.GPU]
    found = {_letters(name): device for device in gpus for name in (device.name, *device.aliases)}
    short = {_letters(name): _letters(meant) for name, meant in catalog().short_names.items()}
    return found | {name: found[meant] for name, meant in short.items()}


@lru_cache(maxsize=1)
def _cards() -> Mapping[str, Card]:
    known = ((find(name), each) for each in capabilities() for name in each.cards)
    return {
        device.name: Card(device, each, allocations()[each.compute_capability])
        for device, each in known
        if device is not None and device.blocks
    }


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.casefold()))


Bytes = Annotated[int, Field(gt=0)]


class Chip(Frozen):
    """What all boards with a chip share.

    Static data and the heap can have `usable_sram_bytes`. `firmware_bytes` is the flash below the file system,
    `agent_flash_bytes` and `agent_heap_bytes` are what the device agent takes. `int8_macs_per_cycle` is one core's.
    `clocks_hz` begins with the fastest.
    """

    name: str
    sram_bytes: Bytes
    usable_sram_bytes: Bytes
    clocks_hz: tuple[Bytes, ...] = Field(min_length=1)
    cores: int = Field(gt=0)
    int8_macs_per_cycle: int = Field(gt=0)
    firmware_bytes: Bytes
    agent_flash_bytes: Bytes
    agent_heap_bytes: Bytes
    source: str


class Board(Frozen):
    """A board or module. `psram_bytes` is 0 without PSRAM; `price_usd` is null where the maker publishes none."""

    id: str
    module: str
    chip: Chip
    flash_bytes: Bytes
    psram_bytes: int = Field(ge=0)
    psram_bus: Literal["quad", "octal"] | None = None
    price_usd: float | None = Field(None, gt=0)
    source: str

    @property
    def clock_hz(self) -> int:
        return self.chip.clocks_hz[0]

    @property
    def flash_for_model_bytes(self) -> int:
        return self.flash_bytes - self.chip.firmware_bytes - self.chip.agent_flash_bytes

    @property
    def sram_for_arena_bytes(self) -> int:
        return self.chip.usable_sram_bytes - self.chip.agent_heap_bytes

    @property
    def peak_macs_per_s(self) -> float:
        """Multiply-accumulates of int8 per second, of all cores at their vector units' peak; no program is faster."""
        return float(self.clock_hz * self.chip.cores * self.chip.int8_macs_per_cycle)


def board(name: str) -> Board | None:
    """The board with that id or module name, in any case."""
    plain = name.casefold()
    return next((each for each in boards() if plain in (each.id.casefold(), each.module.casefold())), None)


@lru_cache(maxsize=1)
def boards() -> tuple[Board, ...]:
    """All boards, in the order of the file."""
    tables = tomllib.loads(files("optigpu.hardware").joinpath("boards.toml").read_text(encoding="utf-8"))
    chips = {chip["name"]: chip for chip in tables["chip"]}
    return tuple(Board.model_validate(entry | {"chip": chips[entry["chip"]]}) for entry in tables["board"])
