"""A device gets its identity with a code: once, in time, and only with the proof that it has the code."""

import secrets
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from benchmarks.signing_device import BOARD, FIRMWARE, xor
from optigpu.documents.devices import DeviceSource
from optigpu.edge.codes import ALPHABET, new_code
from optigpu.store import device_invites
from optigpu.store.tables import Device, DeviceInvite, DeviceKey
from tests.service.device_client import Claim, enrolled, invited, message, now_us
from tests.service.serving import Served


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


def test_every_byte_of_the_proof_counts(service: Served) -> None:
    true = Claim(invited(service.database)).body
    proof = bytes.fromhex(true["proof"])
    for at in range(len(proof)):
        flipped = xor(proof, (1 << (8 * at + at % 8)).to_bytes(len(proof), "big")).hex()
        assert claimed(service, true | {"proof": flipped}).status_code == 403
    assert count_devices(service) == 0


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


def test_an_invitation_of_a_simulator_makes_a_simulator(service: Served) -> None:
    device = enrolled(service.client, service.database, source=DeviceSource.SIMULATOR)
    view = service.client.get(f"/v1/devices/{device.id}").json()
    assert (view["source"], view["last_seen_at"], view["key_version"]) == ("simulator", None, 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"invite": "abcd"}, "invite"),
        ({"invite": "ABCDE"}, "invite"),
        ({"nonce": "0" * 31}, "nonce"),
        ({"sealed_key": "G" * 64}, "sealed_key"),
        ({"proof": "A" * 64}, "proof"),
        ({"proof": "a" * 64 + "\n"}, "proof"),
        ({"board": ""}, "board"),
        ({"board": "a:b"}, "board"),
        ({"firmware": None}, "firmware"),
        ({"schema": 2}, "schema"),
        ({"schema": True}, "schema"),
        ({"schema": 1.0}, "schema"),
        ({"name": "a\x00b"}, "name"),
        ({"key": "0" * 64}, "key"),
    ],
)
def test_a_malformed_claim_is_named(any_service: Served, change: dict[str, Any], field: str) -> None:
    answer = claimed(any_service, Claim(new_code().text).body | change)
    assert answer.status_code == 422, answer.text
    assert [entry["field"] for entry in answer.json()["errors"]] == [field]


def test_guessing_codes_is_limited_by_address(tmp_path: Any) -> None:
    from tests.service.serving import serving

    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="3/minute") as served:
        answers = [claimed(served, Claim(new_code().text).body) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [403, 403, 403, 429, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60


def test_an_invitation_whose_code_is_taken_is_not_entered(service: Served) -> None:
    code = new_code()
    with service.database.write() as session:
        made = [
            device_invites.add(
                session,
                code.public,
                code.verifier.hex(),
                name=None,
                source=DeviceSource.DEVICE,
                lasts=timedelta(minutes=1),
            )
            for _ in range(2)
        ]
        assert made[0] is not None
        assert made[1] is None
        assert [each.code for each in device_invites.list_open(session)] == [code.public]


def test_an_enrolled_device_may_send(service: Served) -> None:
    device = enrolled(service.client, service.database)
    assert device.post("measurements", message()).status_code == 200


def test_a_code_is_of_its_alphabet_in_four_groups() -> None:
    code = new_code()
    assert len(code.public + code.secret) == 16
    assert set(code.public + code.secret) <= set(ALPHABET)
    assert [len(group) for group in code.text.split("-")] == [4, 4, 4, 4]
