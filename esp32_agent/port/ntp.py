"""The time of an NTP server (RFC 5905, client mode), in integers."""

import socket

from esp32_agent.port.base import Clock

NTP_PORT = 123
PACKET_BYTES = 48
CLIENT = 0x23  # no leap warning, version 4, mode 3
SERVER_MODE = 4
UNKNOWN_LEAP = 3
HALF_ERA_S = 2**31
ERA_S = 2**32
SECONDS_1900_TO_1970 = 2_208_988_800


def ask(host: str, port: int, clock: Clock, nonce: bytes, timeout_s: int) -> int | None:
    """Microseconds since 1970 at the moment of the answer; None without a good one. Raises OSError.

    `nonce` has 8 random bytes: an answer that does not hold them is not to this question.
    """
    address = socket.getaddrinfo(host, port, 0, socket.SOCK_DGRAM)[0]
    question = bytes([CLIENT]) + bytes(39) + nonce
    asking = socket.socket(address[0], socket.SOCK_DGRAM)
    try:
        asking.settimeout(timeout_s)
        sent = clock.ticks_us()
        asking.sendto(question, address[-1])
        packet = asking.recv(PACKET_BYTES)
        round_trip = clock.ticks_diff(clock.ticks_us(), sent)
    finally:
        asking.close()
    moment = read_packet(packet, nonce)
    return None if moment is None else moment + round_trip // 2


def read_packet(packet: bytes, nonce: bytes) -> int | None:
    """Microseconds since 1970 when the server sent it; None if it is no answer of a synchronised server to `nonce`."""
    if len(packet) < PACKET_BYTES:
        return None
    leap, mode, stratum = packet[0] >> 6, packet[0] & 7, packet[1]
    if leap == UNKNOWN_LEAP or mode != SERVER_MODE or not 0 < stratum < 16 or packet[24:32] != nonce:
        return None
    seconds = int.from_bytes(packet[40:44], "big")
    fraction = int.from_bytes(packet[44:48], "big")
    if seconds == 0:
        return None
    if seconds < HALF_ERA_S:  # the counter begins again in 2036
        seconds += ERA_S
    return (seconds - SECONDS_1900_TO_1970) * 1_000_000 + (fraction * 1_000_000 >> 32)
