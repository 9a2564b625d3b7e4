"""Microcontroller boards, read from boards.toml: their memories, clocks and vector units."""

import tomllib
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from optigpu.vocabulary import Frozen

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
