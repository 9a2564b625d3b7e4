"""A device's identity: it enrols with a code, once and in time; its keys change and end; the operator's commands."""

import argparse
import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from api.__main__ import main
from api.commands import LONGEST_INVITE, duration
from api.device_identity import new_code
from benchmarks.signing_device import BOARD, FIRMWARE, MODEL
from optigpu.documents.devices import DeviceSource
from optigpu.store import devices
from optigpu.store.database import KeyRefusedError, moment
from optigpu.store.tables import Device, DeviceInvite, DeviceKey
from tests.service.device_client import Claim, EdgeDevice, enrolled, invited, message, now_us, report
from tests.service.serving import Served, serving


def claimed(service: Served, body: dict[str, Any]) -> Any:
    return service.client.post("/v1/devices/claim", json=body)


def count_devices(service: Served) -> int:
    with service.database.read() as session:
        return len(session.scalars(select(Device.id)).all())


def test_a_device_that_has_the_code_gets_its_identity(service: Served) -> None:
    claim = Claim(invited(service.database, name="by the window"), name="esp32")
    answer = claimed(service, claim.body)
    assert answer.status_code == 201, answer.text
    given = answer.json()
    assert given["key_id"] == f"{given['device_id']}.1"
    assert abs(given["server_time_us"] - now_us()) < 60_000_000
    with service.database.read() as session:
        device = session.get_one(Device, given["device_id"])
        assert (device.name, device.board, device.source) == ("by the window", BOARD, DeviceSource.DEVICE)
        assert device.firmware_sha256 == FIRMWARE
        assert session.get_one(DeviceKey, (device.id, 1)).secret == claim.key


def test_the_secret_of_a_code_is_stored_nowhere(service: Served) -> None:
    code = invited(service.database)
    secret = code[5:].replace("-", "")
    with service.database.read() as session:
        row = session.scalars(select(DeviceInvite)).one()
        stored = [str(getattr(row, column.name)) for column in DeviceInvite.__table__.columns]
    assert not [value for value in stored if secret in value or code[5:9] in value]
    claimed(service, Claim(code).body)
    with service.database.read() as session:
        assert session.scalars(select(DeviceInvite.verifier)).one() is None


def test_the_same_claim_again_gets_the_same_answer(service: Served) -> None:
    """Its first answer may have been lost on the way."""
    claim = Claim(invited(service.database))
    first, second = (claimed(service, claim.body) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert [answer.json()["device_id"] for answer in (first, second)] == [first.json()["device_id"]] * 2
    assert count_devices(service) == 1


def test_a_code_is_for_one_device(service: Served) -> None:
    code = invited(service.database)
    assert claimed(service, Claim(code).body).status_code == 201
    assert claimed(service, Claim(code).body).status_code == 403
    assert count_devices(service) == 1


@pytest.mark.parametrize("change", ["proof", "sealed_key", "nonce", "board", "firmware"])
def test_a_claim_that_was_changed_is_refused_before_and_after_the_true_one(
    service: Served, change: str
) -> None:
    true = Claim(invited(service.database)).body
    other = "esp32s3-n8" if change == "board" else secrets.token_hex(len(true[change]) // 2)
    assert claimed(service, true | {change: other}).status_code == 403
    assert claimed(service, true).status_code == 201
    assert claimed(service, true | {change: other}).status_code == 403
    assert count_devices(service) == 1


def test_a_wrong_code_an_unknown_one_and_an_expired_one_have_one_answer(service: Served) -> None:
    code = invited(service.database)
    guessed = f"{code[:4]}-{new_code().text[5:]}"
    unknown = new_code().text
    answers = [claimed(service, Claim(each).body) for each in (guessed, unknown)]
    with service.database.write() as session:
        session.execute(update(DeviceInvite).values(expires_at=DeviceInvite.created_at))
    answers.append(claimed(service, Claim(code).body))
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.json()["detail"] for answer in answers}) == 1
    assert count_devices(service) == 0


def test_the_answer_to_a_claim_is_not_repeated_after_its_invitation(service: Served) -> None:
    claim = Claim(invited(service.database))
    assert claimed(service, claim.body).status_code == 201
    with service.database.write() as session:
        session.execute(update(DeviceInvite).values(expires_at=DeviceInvite.created_at))
    assert claimed(service, claim.body).status_code == 403


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"invite": "abcd"}, "invite"),
        ({"nonce": "0" * 31}, "nonce"),
        ({"sealed_key": "G" * 64}, "sealed_key"),
        ({"proof": "a" * 64 + "\n"}, "proof"),
        ({"board": "a:b"}, "board"),
        ({"firmware": None}, "firmware"),
        ({"schema": True}, "schema"),
        ({"name": "a\x00b"}, "name"),
        ({"key": "0" * 64}, "key"),
    ],
)
def test_a_malformed_claim_is_named(any_service: Served, change: dict[str, Any], field: str) -> None:
    answer = claimed(any_service, Claim(new_code().text).body | change)
    assert answer.status_code == 422, answer.text
    assert [entry["field"] for entry in answer.json()["errors"]] == [field]


@pytest.mark.slow
def test_guessing_codes_is_limited_by_address(tmp_path: Any) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/day") as served:
        answers = [claimed(served, Claim(new_code().text).body) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [403, 403, 403, 429, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 86400


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


@pytest.mark.slow
def test_each_device_has_a_limit_of_its_own(tmp_path: Path) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", device_rate_limit="3/day") as served:
        first, second = (enrolled(served.client, served.database) for _ in range(2))
        answers = [first.post("measurements", message()) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 86400
        assert status(second) == 200


@pytest.mark.slow
def test_nobody_can_use_up_the_calls_of_a_device(tmp_path: Path) -> None:
    """Wrong signatures count for their address."""
    limits: dict[str, Any] = {"device_rate_limit": "3/day", "rate_limit": "8/day"}
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", **limits) as served:
        device = enrolled(served.client, served.database)
        forger = EdgeDevice(served.client, device.id, bytes(32))
        forged = [status(forger) for _ in range(10)]
        assert forged == [401] * 8 + [429] * 2
        assert status(device) == 200


@pytest.mark.slow
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


@pytest.mark.parametrize("text", ["", "15", "m", "0m", "-5m", "8d", "1.5h", "15 m", "1w", "999999d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="15m, 2h or 1d"):
        duration(LONGEST_INVITE)(text)
