"""config.json: read, checked, and refused in one sentence."""

import json
import os

from esp32_agent.port.http import split_url
from esp32_agent.section import ConfigError, Section

CODE_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
BOARD_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
RUNNERS = ("tflm-native", "tflm-serial", "tflm-host", "litert-host", "simulator")
SENSORS = ("none", "ina219", "ina226")
SOURCES = ("fixed", "camera", "folder", "v4l2")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REQUIRED = "required"


class Check:
    """What a member must be. `value` returns it as it is used, or raises ConfigError."""

    def __init__(self, default: object = None) -> None:
        self.default = default  # of a member that is missing or null; REQUIRED: there is none

    def value(self, name: str, given: object) -> object:
        raise NotImplementedError


class Whole(Check):
    """A whole number of a range."""

    def __init__(self, lowest: int, highest: int, default: int) -> None:
        super().__init__(default)
        self._lowest = lowest
        self._highest = highest

    def value(self, name: str, given: object) -> int:
        if (
            not isinstance(given, int)
            or isinstance(given, bool)
            or not self._lowest <= given <= self._highest
        ):
            raise ConfigError(f"`{name}` must be a whole number from {self._lowest} to {self._highest}.")
        return given


class Choice(Check):
    """One of several texts."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(REQUIRED)
        self._names = names

    def value(self, name: str, given: object) -> object:
        if given not in self._names:
            known = ", ".join(self._names)
            raise ConfigError(f"`{name}` must be one of {known}.")
        return given


class Text(Check):
    """A text that is not empty."""

    def value(self, name: str, given: object) -> str:
        if not isinstance(given, str) or not given:
            raise ConfigError(f"`{name}` must be a text.")
        return given


class Switch(Check):
    """true or false."""

    def value(self, name: str, given: object) -> bool:
        if not isinstance(given, bool):
            raise ConfigError(f"`{name}` must be true or false.")
        return given


class Url(Text):
    """The address of the API."""

    def value(self, name: str, given: object) -> str:
        url = super().value(name, given)
        try:
            split_url(url)
        except ValueError as error:
            raise ConfigError(f"`{name}` {error}") from None
        return url.rstrip("/")


class Invite(Text):
    """A code of `python -m api devices invite`."""

    def value(self, name: str, given: object) -> str:
        groups = super().value(name, given).strip().upper().split("-")
        digits = "".join(groups)
        if [len(group) for group in groups] != [4, 4, 4, 4] or any(
            digit not in CODE_DIGITS for digit in digits
        ):
            raise ConfigError(
                f"`{name}` must look like ABCD-EFGH-JKMN-PQRS: four groups of four letters and digits."
            )
        return "-".join(groups)


class BoardId(Text):
    """The catalog's id of a board."""

    def value(self, name: str, given: object) -> str:
        board = super().value(name, given)
        letters = BOARD_LETTERS + "._-"
        if any(letter not in letters for letter in board) or board[0] in "._-" or len(board) > 64:
            raise ConfigError(
                f"`{name}` must be a board's id such as esp32s3-n16r8: a-z, 0-9, dots and dashes."
            )
        return board


class Printable(Text):
    """A name of at most 64 printable ASCII characters."""

    def value(self, name: str, given: object) -> str:
        text = super().value(name, given)
        if any(not 32 <= ord(letter) < 127 for letter in text) or len(text) > 64:
            raise ConfigError(f"`{name}` must have at most 64 characters, all of ASCII.")
        return text


class Members(Check):
    """An object with these members."""

    def __init__(self, fields: dict[str, Check], default: object = None) -> None:
        super().__init__(default)
        self._fields = fields

    def value(self, name: str, given: object) -> Section:
        return checked(name, given, self._fields)


WIFI: dict[str, Check] = {"ssid": Text(REQUIRED), "password": Text()}
RUNNER: dict[str, Check] = {
    "kind": Choice(RUNNERS),
    "arena_bytes": Whole(0, 64 * 1024 * 1024, 0),
    "psram": Switch(True),
    "device": Text("/dev/ttyACM0"),
    "baud": Whole(9600, 4_000_000, 921_600),
    "uart": Whole(0, 2, 1),
    "tx": Whole(0, 48, 17),
    "rx": Whole(0, 48, 18),
    "latency_ms": Whole(0, 60_000, 1),
    "input_bytes": Whole(1, 1_000_000, 1),
    "output_bytes": Whole(1, 10_000, 1),
}
POWER: dict[str, Check] = {
    "sensor": Choice(SENSORS),
    "sda": Whole(0, 48, 8),
    "scl": Whole(0, 48, 9),
    "address": Whole(0x40, 0x4F, 0x40),
    "shunt_uohm": Whole(100, 10_000_000, 100_000),
    "max_ma": Whole(1, 100_000, 800),
}
INPUT: dict[str, Check] = {"source": Choice(SOURCES), "path": Text()}
FIELDS: dict[str, Check] = {
    "url": Url(REQUIRED),
    "ca": Text(),
    "allow_http": Switch(False),
    "invite": Invite(),
    "name": Printable(),
    "wifi": Members(WIFI),
    "board": BoardId(REQUIRED),
    "model": Text(REQUIRED),
    "golden": Text(),
    "data": Text("data"),
    "runner": Members(RUNNER, REQUIRED),
    "power": Members(POWER),
    "input": Members(INPUT),
    "ntp": Text("pool.ntp.org"),
    "period_s": Whole(0, 7 * 86_400, 3600),
    "windows": Whole(1, 64, 5),
    "window_s": Whole(0, 600, 10),
    "warmup": Whole(0, 1000, 5),
    "heartbeat_s": Whole(1, 86_400, 300),
    "timeout_s": Whole(1, 300, 30),
    "retry_first_ms": Whole(1, 3_600_000, 1000),
    "retry_most_ms": Whole(1, 3_600_000, 300_000),
    "queue_bytes": Whole(16_384, 1 << 30, 65_536),
}
PATHS = ("ca", "model", "golden", "data")


def read(path: str) -> Section:
    """The configuration, with its paths relative to the file's own folder. Raises ConfigError."""
    try:
        with open(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error}") from None
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    try:
        config = checked("", document, FIELDS)
        check_transport(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    folder = folder_of(path)
    for name in PATHS:
        setattr(config, name, absolute(folder, getattr(config, name)))
    if config.input is not None:
        config.input.path = absolute(folder, config.input.path)
    return config


def folder_of(path: str) -> str:
    """The absolute path of the file's folder, "" for the root."""
    whole_path = path if path.startswith("/") else os.getcwd().rstrip("/") + "/" + path
    return whole_path.rsplit("/", 1)[0]


def absolute(folder: str, path: str | None) -> str | None:
    """A path that is relative to `folder`."""
    return path if path is None or path.startswith("/") else f"{folder}/{path}"


def checked(name: str, given: object, fields: dict[str, Check]) -> Section:
    """The members of an object, each as its check returns it; null and missing ones have their default."""
    if not isinstance(given, dict):
        raise ConfigError(f"`{name}` must be an object." if name else "The file must hold one object.")
    prefix = f"{name}." if name else ""
    for member in given:
        if member not in fields:
            known = ", ".join(sorted(fields))
            raise ConfigError(f"`{prefix}{member}` is unknown: the members here are {known}.")
    members: dict[str, object] = {}
    for member, check in fields.items():
        value = given.get(member)
        if value is not None:
            members[member] = check.value(prefix + member, value)
        elif check.default is REQUIRED:
            raise ConfigError(f"`{prefix}{member}` is missing.")
        else:
            members[member] = check.default
    return Section(members)


def check_transport(config: Section) -> None:
    """Reports are signed, but not secret: plain http needs a word of consent, except on this machine."""
    secure, host, _, _ = split_url(config.url)
    if not secure and host not in LOOPBACK and not config.allow_http:
        raise ConfigError(
            "`url` is plain http: use https, or set `allow_http` to true in a network that you trust."
        )
