"""config.json: read, checked, and refused in one sentence."""

import json
import os

from esp32_agent.port.http import split_url

CODE_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
RUNNERS = ("tflm-native", "tflm-serial", "tflm-host", "litert-host", "simulator")
SENSORS = ("none", "ina219", "ina226")
SOURCES = ("fixed", "camera", "folder", "v4l2")
LOOPBACK = ("localhost", "127.0.0.1", "::1")
REQUIRED = "required"


class ConfigError(Exception):
    """The sentence that says what is wrong with the configuration."""


class Section:
    """The members of an object of the file, as attributes."""

    def __init__(self, members) -> None:
        for name, value in members.items():
            setattr(self, name, value)


def whole(lowest: int, highest: int):
    """A checker of whole numbers."""

    def check(name, value):
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise ConfigError(f"`{name}` must be a whole number from {lowest} to {highest}.")
        return value

    return check


def choice(names):
    """A checker of texts that are one of `names`."""

    def check(name, value):
        if value not in names:
            known = ", ".join(names)
            raise ConfigError(f"`{name}` must be one of {known}.")
        return value

    return check


def text(name, value):
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"`{name}` must be a text.")
    return value


def switch(name, value):
    """true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be true or false.")
    return value


def url(name, value):
    """The address of the API."""
    try:
        split_url(text(name, value))
    except ValueError as error:
        raise ConfigError(f"`{name}` {error}") from None
    return value.rstrip("/")


def invite(name, value):
    """A code of `python -m api devices invite`."""
    groups = text(name, value).strip().upper().split("-")
    digits = "".join(groups)
    if [len(group) for group in groups] != [4, 4, 4, 4] or any(digit not in CODE_DIGITS for digit in digits):
        raise ConfigError(
            f"`{name}` must look like ABCD-EFGH-JKMN-PQRS: four groups of four letters and digits."
        )
    return "-".join(groups)


def board(name, value):
    """The catalog's id of a board."""
    letters = CODE_DIGITS.lower() + "ilou" + "._-"
    if any(letter not in letters for letter in text(name, value)) or value[0] in "._-" or len(value) > 64:
        raise ConfigError(f"`{name}` must be a board's id such as esp32s3-n16r8: a-z, 0-9, dots and dashes.")
    return value


def printable(name, value):
    """A name of at most 64 printable ASCII characters."""
    if any(not 32 <= ord(letter) < 127 for letter in text(name, value)) or len(value) > 64:
        raise ConfigError(f"`{name}` must have at most 64 characters, all of ASCII.")
    return value


WIFI = {"ssid": (text, REQUIRED), "password": (text, None)}
RUNNER = {
    "kind": (choice(RUNNERS), REQUIRED),
    "arena_bytes": (whole(0, 64 * 1024 * 1024), 0),
    "psram": (switch, True),
    "device": (text, "/dev/ttyACM0"),
    "baud": (whole(9600, 4_000_000), 921_600),
    "uart": (whole(0, 2), 1),
    "tx": (whole(0, 48), 17),
    "rx": (whole(0, 48), 18),
    "latency_ms": (whole(0, 60_000), 1),
    "input_bytes": (whole(1, 1_000_000), 1),
    "output_bytes": (whole(1, 10_000), 1),
}
POWER = {
    "sensor": (choice(SENSORS), REQUIRED),
    "sda": (whole(0, 48), 8),
    "scl": (whole(0, 48), 9),
    "address": (whole(0x40, 0x4F), 0x40),
    "shunt_uohm": (whole(100, 10_000_000), 100_000),
    "max_ma": (whole(1, 100_000), 800),
}
INPUT = {"source": (choice(SOURCES), REQUIRED), "path": (text, None)}


def section(fields):
    """A checker of objects."""

    def check(name, value):
        return checked(name, value, fields)

    return check


FIELDS = {
    "url": (url, REQUIRED),
    "ca": (text, None),
    "allow_http": (switch, False),
    "invite": (invite, None),
    "name": (printable, None),
    "wifi": (section(WIFI), None),
    "board": (board, REQUIRED),
    "model": (text, REQUIRED),
    "golden": (text, None),
    "data": (text, "data"),
    "runner": (section(RUNNER), REQUIRED),
    "power": (section(POWER), None),
    "input": (section(INPUT), None),
    "ntp": (text, "pool.ntp.org"),
    "period_s": (whole(0, 7 * 86_400), 3600),
    "windows": (whole(1, 64), 5),
    "window_s": (whole(0, 600), 10),
    "warmup": (whole(0, 1000), 5),
    "heartbeat_s": (whole(1, 86_400), 300),
    "timeout_s": (whole(1, 300), 30),
    "retry_first_ms": (whole(1, 3_600_000), 1000),
    "retry_most_ms": (whole(1, 3_600_000), 300_000),
    "queue_bytes": (whole(16_384, 1 << 30), 65_536),
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


def checked(name: str, value, fields) -> Section:
    """The members of an object, each as its checker returns it; null and missing ones have their default."""
    if not isinstance(value, dict):
        raise ConfigError(f"`{name}` must be an object." if name else "The file must hold one object.")
    prefix = f"{name}." if name else ""
    for given in value:
        if given not in fields:
            known = ", ".join(sorted(fields))
            raise ConfigError(f"`{prefix}{given}` is unknown: the members here are {known}.")
    members = {}
    for field, (check, default) in fields.items():
        given = value.get(field)
        if given is not None:
            members[field] = check(prefix + field, given)
        elif default is REQUIRED:
            raise ConfigError(f"`{prefix}{field}` is missing.")
        else:
            members[field] = default
    return Section(members)


def check_transport(config) -> None:
    """Reports are signed, but not secret: plain http needs a word of consent, except on this machine."""
    secure, host, _, _ = split_url(config.url)
    if not secure and host not in LOOPBACK and not config.allow_http:
        raise ConfigError(
            "`url` is plain http: use https, or set `allow_http` to true in a network that you trust."
        )
