"""Requests that must not be accepted, of many kinds, made from an honest one and drawn by a seeded generator."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.signing_device import JSON_TYPE, PARTS, Device, Request, claim, header

YEAR_S = 365 * 86_400
CLAIM = "/v1/devices/claim"
ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass
class World:
    """What a forger knows: a device that it wants to speak for, requests that it saw, and keys that are not valid."""

    rng: random.Random
    device: Device
    other: Device
    revoked: Device
    replaced: Device
    used_code: str
    honest: Request
    """A request that the service has not seen yet."""
    seen: list[Request]
    """Requests that it has accepted."""


Forger = Callable[[World], Request]


def _with_header(request: Request, value: str) -> Request:
    return replace(request, headers=(JSON_TYPE, ("Authorization", value)))


def _flipped(text: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(text))
    return text[:at] + bytes([text[at] ^ (1 << rng.randrange(8))]) + text[at + 1 :]


def flip_body(world: World) -> Request:
    return replace(world.honest, body=_flipped(world.honest.body, world.rng))


def flip_header(world: World) -> Request:
    """A bit of any character behind the scheme, as long as HTTP can carry it."""
    value = world.honest.authorization.encode()
    while True:
        changed = _flipped(value, world.rng)
        if all(0x21 <= each <= 0x7E for each in changed[9:]) and changed[:9] == value[:9]:
            return _with_header(world.honest, changed.decode())


def flip_signature(world: World) -> Request:
    value, signature = world.honest.authorization.rsplit("=", 1)
    flipped = _flipped(bytes.fromhex(signature), world.rng).hex()
    return _with_header(world.honest, f"{value}={flipped}")


def cut_body(world: World) -> Request:
    return replace(world.honest, body=world.honest.body[: world.rng.randrange(len(world.honest.body))])


def longer_body(world: World) -> Request:
    more = world.rng.choice((b" ", b"\n", b"\x00", b"{}", world.honest.body))
    return replace(world.honest, body=world.honest.body + more)


def same_meaning(world: World) -> Request:
    """The same JSON in other bytes."""
    document = json.loads(world.honest.body)
    text = json.dumps(document, indent=world.rng.randrange(1, 4), sort_keys=world.rng.random() < 0.5)
    return replace(world.honest, body=text.encode())


def better_figures(world: World) -> Request:
    document = json.loads(world.honest.body)
    document["reports"][0]["report"]["latency_us"]["p50"] = world.rng.randrange(1, 78_000)
    return replace(world.honest, body=json.dumps(document).encode())


def body_of_another(world: World) -> Request:
    """The signature of a request that was accepted, with a body that was not."""
    others = [seen for seen in world.seen if seen is not world.honest]
    return _with_header(world.honest, world.rng.choice(others).authorization)


def changed_field(world: World) -> Request:
    """One signed field with another value, under the old signature."""
    name = world.rng.choice(PARTS)
    value = {
        "key": f"{world.other.id}.1",
        "time": str(world.rng.randrange(10**16)),
        "boot": f"{world.rng.getrandbits(64):016x}",
        "seq": str(world.device.sequence + world.rng.randrange(1, 1000)),
        "fw": f"{world.rng.getrandbits(256):064x}",
    }[name]
    before, _, behind = world.honest.authorization.partition(f"{name}=")
    return _with_header(world.honest, f"{before}{name}={value},{behind.partition(',')[2]}")


def other_form(world: World) -> Request:
    """The same header in another form."""
    value = world.honest.authorization
    forms = (
        value.upper(),
        value.replace(",", ", "),
        value.replace(" ", "  "),
        value.replace("seq=", "seq=0"),
        value.replace("time=", "time=+"),
        value + ",",
        value + ",sig=" + value.rsplit("=", 1)[1],
        value.replace("OptiGPU1", "OptiGPU2"),
        value.rsplit("=", 1)[0] + "=" + value.rsplit("=", 1)[1].upper(),
        "OptiGPU1 " + ",".join(reversed(value[9:].split(","))),
    )
    return _with_header(world.honest, world.rng.choice([form for form in forms if form != value]))


def other_call(world: World) -> Request:
    path = world.device.place(world.rng.choice(("runs", "key")))
    return replace(world.honest, path=path)


def other_device(world: World) -> Request:
    return replace(world.honest, path=world.other.place("measurements"))


def with_query(world: World) -> Request:
    return replace(world.honest, path=f"{world.honest.path}?source=device")


def _resigned(world: World, key: bytes, key_id: str | None = None) -> Request:
    """The honest request with a signature of another key."""
    parts: dict[str, object] = {
        name: value
        for name, _, value in (part.partition("=") for part in world.honest.authorization[9:].split(","))
    }
    parts["key"] = key_id or parts["key"]
    return _with_header(world.honest, header(key, world.honest.path, parts, world.honest.body))


def random_key(world: World) -> Request:
    return _resigned(world, world.rng.randbytes(32))


def weak_key(world: World) -> Request:
    weak = (b"", bytes(32), b"\xff" * 32, world.device.id.encode(), b"optigpu")
    return _resigned(world, world.rng.choice(weak))


def key_of_another(world: World) -> Request:
    """A device that is enrolled speaks for another one."""
    return _resigned(world, world.other.key)


def its_own_key_id(world: World) -> Request:
    """A device that is enrolled signs with its own key id, on the path of another one."""
    return _resigned(world, world.other.key, f"{world.other.id}.{world.other.version}")


def unknown_version(world: World) -> Request:
    return _resigned(world, world.device.key, f"{world.device.id}.{world.rng.randrange(3, 99_999)}")


def unknown_device(world: World) -> Request:
    device = Device(f"{world.rng.getrandbits(32):08x}-0000-7000-8000-{world.rng.getrandbits(48):012x}",
                    world.rng.randbytes(32), world.rng)  # fmt: skip
    return device.honest()


def replaced_key(world: World) -> Request:
    return world.replaced.honest()


def revoked_key(world: World) -> Request:
    return world.revoked.honest()


def no_signature(world: World) -> Request:
    values = ("", "Bearer og_0123456789012345678901234567890", "Basic eDp5", "OptiGPU1", "OptiGPU1 key=,sig=")
    value = world.rng.choice(values)
    return _with_header(world.honest, value) if value else replace(world.honest, headers=(JSON_TYPE,))


def two_signatures(world: World) -> Request:
    return replace(world.honest, headers=(*world.honest.headers, world.honest.headers[-1]))


def held_back(world: World) -> Request:
    """Signed by the device, held back and delivered when it is too old; or signed with a clock that is ahead."""
    body, _ = world.device.message()
    late_s = world.rng.choice((-1, 1)) * world.rng.randrange(301, YEAR_S)
    request = world.device.signed("measurements", body)
    time_us = int(request.authorization.partition("time=")[2].partition(",")[0]) + late_s * 1_000_000
    return world.device.signed("measurements", body, time=time_us)


def far_behind(world: World) -> Request:
    """Signed by the device, with a sequence far below what its boot has reached."""
    body, _ = world.device.message()
    return world.device.signed(
        "measurements", body, seq=world.rng.randrange(1, world.device.sequence - 1_100)
    )


def replay(world: World) -> Request:
    """The same bytes again, of any request that was accepted, in any order."""
    return world.rng.choice(world.seen)


def guessed_claim(world: World) -> Request:
    """A claim with a code that nobody was given."""
    code = "-".join("".join(world.rng.choices(ALPHABET, k=4)) for _ in range(4))
    if world.rng.random() < 0.5:
        code = world.used_code[:4] + code[4:]
    return _claim(world, code)


def second_claim(world: World) -> Request:
    """A claim with a code that another device has used."""
    return _claim(world, world.used_code)


def _claim(world: World, code: str) -> Request:
    body = claim(code, world.rng.randbytes(32), world.rng.randbytes(16).hex())
    return Request(CLAIM, (JSON_TYPE,), json.dumps(body).encode())


KINDS: Mapping[str, Forger] = {
    forger.__name__: forger
    for forger in (
        flip_body,
        flip_header,
        flip_signature,
        cut_body,
        longer_body,
        same_meaning,
        better_figures,
        body_of_another,
        changed_field,
        other_form,
        other_call,
        other_device,
        with_query,
        random_key,
        weak_key,
        key_of_another,
        its_own_key_id,
        unknown_version,
        unknown_device,
        replaced_key,
        revoked_key,
        no_signature,
        two_signatures,
        held_back,
        far_behind,
        replay,
        guessed_claim,
        second_claim,
    )
}
"""Every kind, by its name."""
