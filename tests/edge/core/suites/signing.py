"""HMAC against RFC 4231, and what is signed and sealed, byte by byte."""

import hashlib

from esp32_agent.core.signing import (
    Stamp,
    authorization,
    claim_code,
    hmac_sha256,
    proof,
    seal,
    seal_rotation,
    string_to_sign,
)
from tests.edge.core.suites.check import equal

# Key, data, HMAC-SHA256: test cases 1 to 4, 6 and 7 (5 is of a truncated code).
RFC_4231 = (
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    (
        b"Jefe",
        b"what do ya want for nothing?",
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
    ),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data. "
        b"The key needs to be hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
)

STAMP = Stamp("0197a1b2-0000-7000-8000-000000000001.1", 1790000000123456, "00ff" * 4, 7, "cd" * 32)
PATH = "/v1/devices/0197a1b2-0000-7000-8000-000000000001/measurements"


def test_hmac_is_that_of_rfc_4231():
    for key, data, wanted in RFC_4231:
        equal(hmac_sha256(key, data).hex(), wanted)


def test_a_key_of_a_whole_block_is_used_as_it_is():
    key = b"k" * 64
    inner = hashlib.sha256(bytes([0x36 ^ 107]) * 64 + b"x").digest()
    equal(hmac_sha256(key, b"x"), hashlib.sha256(bytes([0x5C ^ 107]) * 64 + inner).digest())


def test_the_string_to_sign_has_nine_lines():
    wanted = (
        "OptiGPU1\nPOST\n" + PATH + "\n0197a1b2-0000-7000-8000-000000000001.1\n1790000000123456\n"
        "00ff00ff00ff00ff\n7\n" + "cd" * 32 + "\n" + hashlib.sha256(b"{}").digest().hex()
    )
    equal(string_to_sign("POST", PATH, STAMP, b"{}"), wanted.encode())


def test_the_header_names_all_that_is_signed():
    key = bytes(range(32))
    signature = hmac_sha256(key, string_to_sign("POST", PATH, STAMP, b"{}")).hex()
    equal(
        authorization(key, "POST", PATH, STAMP, b"{}"),
        "OptiGPU1 key=0197a1b2-0000-7000-8000-000000000001.1,time=1790000000123456,boot=00ff00ff00ff00ff,seq=7,"
        + "fw="
        + "cd" * 32
        + ",sig="
        + signature,
    )


def test_any_change_changes_the_signature():
    key = bytes(range(32))
    found = [authorization(key, "POST", PATH, STAMP, b"{}")]
    found.append(authorization(key[1:] + key[:1], "POST", PATH, STAMP, b"{}"))
    found.append(authorization(key, "PUT", PATH, STAMP, b"{}"))
    found.append(authorization(key, "POST", PATH + "x", STAMP, b"{}"))
    found.append(authorization(key, "POST", PATH, STAMP, b"{ }"))
    for name, value in (
        ("key_id", "other.1"), ("time_us", 0), ("boot_id", "11" * 8), ("sequence", 8), ("firmware", "ee" * 32),
    ):  # fmt: skip
        other = Stamp(STAMP.key_id, STAMP.time_us, STAMP.boot_id, STAMP.sequence, STAMP.firmware)
        setattr(other, name, value)
        found.append(authorization(key, "POST", PATH, other, b"{}"))
    equal(len({each[-64:] for each in found}), 10)


def test_the_claim_code_forgets_dashes_and_case():
    wanted = hashlib.sha256(b"optigpu-claim:EFGHJKMNPQRS").digest()
    equal(claim_code("EFGH-JKMN-PQRS"), wanted)
    equal(claim_code("efghjkmnpqrs"), wanted)


def test_a_sealed_key_opens_with_the_code_alone():
    key, code, nonce = bytes(range(32)), claim_code("EFGH-JKMN-PQRS"), "ab" * 16
    mask = hmac_sha256(code, b"optigpu-seal:" + nonce.encode())
    sealed = seal(key, code, nonce)
    equal(sealed, bytes([key[place] ^ mask[place] for place in range(32)]).hex())
    equal(seal(bytes.fromhex(sealed), code, nonce), key.hex())
    assert seal(bytes.fromhex(sealed), claim_code("EFGH-JKMN-PQRT"), nonce) != key.hex()


def test_the_proof_binds_all_of_the_claim():
    code = claim_code("EFGH-JKMN-PQRS")
    text = "optigpu-proof:" + "ab" * 16 + ":" + "12" * 32 + ":esp32s3-n16r8:" + "cd" * 32
    wanted = hmac_sha256(code, text.encode()).hex()
    equal(proof(code, "ab" * 16, "12" * 32, "esp32s3-n16r8", "cd" * 32), wanted)


def test_a_rotation_is_sealed_with_the_old_key():
    new, old, nonce = bytes(range(32)), b"o" * 32, "cd" * 16
    mask = hmac_sha256(old, b"optigpu-rotate:" + nonce.encode())
    equal(seal_rotation(new, old, nonce), bytes([new[place] ^ mask[place] for place in range(32)]).hex())
