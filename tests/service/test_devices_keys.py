"""Keys of devices: they change, they end, their calls are counted; and the command line of the operator."""

import argparse
import json
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from api.__main__ import main
from api.commands import duration
from api.device_command import LONGEST
from benchmarks.signing_device import MODEL
from optigpu.store import devices
from optigpu.store.database import moment
from optigpu.store.errors import KeyRefusedError
from optigpu.store.tables import DeviceKey
from tests.service.device_client import Claim, EdgeDevice, enrolled, message, now_us, report
from tests.service.serving import Served, serving


@pytest.fixture
def device(service: Served) -> EdgeDevice:
    """A device that has just enrolled."""
    return enrolled(service.client, service.database)


def status(device: EdgeDevice) -> int:
    """That of a heartbeat."""
    return device.post("measurements", message()).status_code


def rotated(device: EdgeDevice, key: bytes) -> EdgeDevice:
    """The same device with a new key, which it has not used yet."""
    answer = device.post("key", device.rotation(key))
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"key_id": f"{device.id}.{device.version + 1}"}
    return EdgeDevice(device.http, device.id, key, device.version + 1, sequence=device.sequence + 10)


def secrets_of(service: Served) -> list[bytes | None]:
    with service.database.read() as session:
        return list(session.scalars(select(DeviceKey.secret).order_by(DeviceKey.version)))


def test_the_old_key_holds_until_the_new_one_is_used(service: Served, device: EdgeDevice) -> None:
    new = rotated(device, secrets.token_bytes(32))
    assert status(device) == 200
    assert status(new) == 200
    assert status(device) == 401
    assert status(new) == 200
    assert secrets_of(service) == [None, new.key]
    assert service.client.get(f"/v1/devices/{device.id}").json()["key_version"] == 2
    third = rotated(new, secrets.token_bytes(32))
    assert status(third) == 200
    assert (status(new), status(device)) == (401, 401)


def test_the_same_rotation_again_gets_the_same_answer(service: Served, device: EdgeDevice) -> None:
    body = json.dumps(device.rotation(secrets.token_bytes(32))).encode()
    device.sequence += 1
    header = device.header(device.path("key"), body)
    answers = [device.send("key", body, header) for _ in range(2)]
    assert [answer.json() for answer in answers] == [{"key_id": f"{device.id}.2"}] * 2
    assert len(secrets_of(service)) == 2


def test_a_device_that_lost_its_new_key_makes_another(service: Served, device: EdgeDevice) -> None:
    rotated(device, secrets.token_bytes(32))
    new = rotated(device, secrets.token_bytes(32))
    assert status(new) == 200
    assert status(device) == 401


def test_a_copy_of_an_earlier_rotation_does_not_bring_its_key_back(
    service: Served, device: EdgeDevice
) -> None:
    body = json.dumps(device.rotation(secrets.token_bytes(32))).encode()
    device.sequence += 1
    header = device.header(device.path("key"), body)
    assert device.send("key", body, header).status_code == 200
    new = rotated(device, secrets.token_bytes(32))
    assert device.send("key", body, header).status_code == 409
    assert status(new) == 200


def test_the_key_in_use_is_no_new_key(service: Served, device: EdgeDevice) -> None:
    answer = device.post("key", device.rotation(device.key))
    assert answer.status_code == 409
    assert status(device) == 200


def test_an_operator_asks_for_a_new_key(service: Served, device: EdgeDevice) -> None:
    with service.database.write() as session:
        devices.request_rotation(session, device.id)
    assert device.post("measurements", message()).json()["rotate"] is True
    new = rotated(device, secrets.token_bytes(32))
    assert device.post("measurements", message()).json()["rotate"] is True, "the new key may be lost"
    assert new.post("measurements", message()).json()["rotate"] is False


def test_a_revoked_device_is_refused_and_its_keys_are_gone(service: Served, device: EdgeDevice) -> None:
    (stored,) = device.reports(report(1))
    new = rotated(device, secrets.token_bytes(32))
    with service.database.write() as session:
        devices.revoke(session, device.id)
    assert [status(device), status(new)] == [401, 401]
    assert device.post("runs", {"schema": 1, "model_sha256": MODEL}).status_code == 401
    assert secrets_of(service) == [None, None]
    view = service.client.get(f"/v1/devices/{device.id}").json()
    assert view["revoked_at"] is not None
    listed = service.client.get(view["links"]["reports"]).json()["reports"]
    assert [each["id"] for each in listed] == [stored["report_id"]]


def test_a_key_that_is_revoked_while_its_request_waits_is_refused(
    service: Served, device: EdgeDevice
) -> None:
    """The signature is verified before the device's row is locked."""
    with service.database.write() as session:
        session.execute(update(DeviceKey).values(secret=None))
        request = devices.DeviceRequest(
            device_id=device.id,
            key_version=1,
            boot_id="b" * 16,
            sequence=1,
            firmware_sha256="0" * 64,
            clock_synchronised=True,
            received_at=moment(session),
        )
        with pytest.raises(KeyRefusedError, match="no longer valid"):
            devices.enter(session, request)


def test_each_device_has_a_limit_of_its_own(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", device_rate_limit="3/minute") as served:
        first, second = (enrolled(served.client, served.database) for _ in range(2))
        answers = [first.post("measurements", message()) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
        assert status(second) == 200


def test_nobody_can_use_up_the_calls_of_a_device(tmp_path: Path) -> None:
    """Wrong signatures count for their address."""
    limits: dict[str, Any] = {"device_rate_limit": "3/minute", "rate_limit": "8/minute"}
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", **limits) as served:
        device = enrolled(served.client, served.database)
        forger = EdgeDevice(served.client, device.id, bytes(32))
        forged = [status(forger) for _ in range(10)]
        assert forged == [401] * 8 + [429] * 2
        assert status(device) == 200


def test_the_command_line_invites_lists_rotates_and_revokes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'optigpu.db'}"
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", url)
    monkeypatch.delenv("OPTIGPU_REDIS_URL", raising=False)

    def command(*words: str) -> str:
        assert main(["devices", *words]) == 0
        return capsys.readouterr().out.strip()

    code = command("invite", "--name", "by the window", "--simulator", "--expires", "2h")
    with serving(url) as served:
        assert command("list").startswith(f"invitation {code[:4]}-...  simulator  until ")
        claim = Claim(code)
        device_id = served.client.post("/v1/devices/claim", json=claim.body).json()["device_id"]
        device = EdgeDevice(served.client, device_id, claim.key)
        (line,) = command("list").splitlines()
        assert line.startswith(f"{device_id}  active    simulator  key 1  last seen never")
        assert line.endswith("by the window")
        assert command("rotate", device_id) == ""
        assert device.post("measurements", message()).json()["rotate"] is True
        assert "rotating" in command("list")
        command("revoke", device_id)
        assert status(device) == 401
        assert "revoked" in command("list")
    assert main(["devices", "rotate", device_id]) == 1
    assert "was revoked" in capsys.readouterr().err
    assert main(["devices", "revoke", "nonsense"]) == 1
    assert "There is no device nonsense." in capsys.readouterr().err


def test_a_code_is_shown_alone_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", f"sqlite:///{tmp_path / 'optigpu.db'}")
    assert main(["devices", "invite"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out) == len("ABCD-EFGH-JKMN-PQRS\n")
    assert "One device can enrol with this code until" in printed.err


@pytest.mark.parametrize(
    "words", [[], ["invite", "--expires", "0m"], ["invite", "--name", "a\nb"], ["revoke"]]
)
def test_a_wrong_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["devices", *words])
    assert ended.value.code == 2
    assert "usage: python -m api devices" in capsys.readouterr().err


def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTIGPU_DEVICE_RATE_LIMIT", "fast")
    assert main(["devices", "list"]) == 1
    assert capsys.readouterr().err.startswith("OPTIGPU_DEVICE_RATE_LIMIT: ")


@pytest.mark.parametrize(
    ("text", "lasts"),
    [
        ("30s", timedelta(seconds=30)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
    ],
)
def test_times_are_read(text: str, lasts: timedelta) -> None:
    assert duration(LONGEST)(text) == lasts


@pytest.mark.parametrize("text", ["", "15", "m", "0m", "-5m", "8d", "1.5h", "15 m", "1w", "999999d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="15m, 2h or 1d"):
        duration(LONGEST)(text)


def test_a_signed_request_with_the_new_key_needs_no_other_boot(service: Served, device: EdgeDevice) -> None:
    new = rotated(device, secrets.token_bytes(32))
    answer = new.post("measurements", message(report(1)), time=now_us())
    assert answer.json()["reports"][0]["duplicate"] is False
