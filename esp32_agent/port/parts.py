"""What the builders of all ports have in common. A heap holds only what the configuration names."""

import esp32_agent
from esp32_agent.port import files
from esp32_agent.port.base import Clock, Power, Runner
from esp32_agent.port.http import HttpClient, Wire
from esp32_agent.port.inputs import FixedInput
from esp32_agent.section import ConfigError, Section

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from esp32_agent.port.power import Bus


def http_client(
    config: Section,
    make_wire: "Callable[[str, int, Any, int], Wire]",
    make_context: "Callable[[str | None], object]",
) -> HttpClient:
    """`make_wire(host, port, context, timeout_s)` opens a connection; `make_context(ca)` makes its TLS context.

    Raises ConfigError if the file of certificates cannot be used.
    """
    context = None
    if config.url.startswith("https:"):
        try:
            context = make_context(config.ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The certificates of `ca` ({config.ca}) cannot be used: {error}.") from None

    return HttpClient(config.url, make_wire, context)


def power(config: Section, clock: Clock, open_bus: "Callable[[Section], Bus] | None") -> Power:
    """`open_bus(settings)` gives the I2C bus. Raises ConfigError if there is none, PortError if no chip answers."""
    settings = config.power
    if settings is None or settings.sensor == "none":
        return Power()
    if open_bus is None:
        raise ConfigError("This machine has no I2C bus: set `power.sensor` to none.")
    from esp32_agent.port.power import Ina219, Ina226, SensorPower

    chip = Ina219 if settings.sensor == "ina219" else Ina226
    return SensorPower(
        chip(open_bus(settings), settings.address, settings.shunt_uohm, settings.max_ma), clock
    )


def fixed_input(config: Section, runner: Runner) -> FixedInput:
    """The first golden input; zeros without golden inputs."""
    if config.golden is None:
        return FixedInput(bytes(runner.input_bytes))
    return FixedInput(files.golden_input(config.golden, runner.input_bytes))


def simulated_runner(config: Section, clock: Clock) -> Runner:
    """A runner without a model: it takes the model file's hash, and sleeps."""
    from esp32_agent.port.simulator import SimulatedRunner

    settings = config.runner
    digest = files.model_sha256(config.model)
    return SimulatedRunner(clock, digest, settings.input_bytes, settings.output_bytes, settings.latency_ms)


def source(config: Section) -> str:
    """Where inputs come from: `fixed` unless the configuration names another source."""
    return "fixed" if config.input is None else str(config.input.source)


def unknown(member: str, value: str, known: str) -> ConfigError:
    """A choice that this kind of machine does not have."""
    return ConfigError(f"`{member}` is {value}; this machine has {known}.")


def firmware_sha256(system: str) -> str:
    """The digest of the agent's own files and of the system that runs them."""
    folder = esp32_agent.__file__.rsplit("/", 1)[0]
    return files.code_sha256(folder, system)
