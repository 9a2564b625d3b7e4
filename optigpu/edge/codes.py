"""Invitation codes such as ABCD-EFGH-JKMN-PQRS: a public group of four characters, then a secret of 60 bits.

The characters are Crockford's base 32, which has no I, L, O and U. The server keeps only the SHA-256 of the secret.
"""

import hashlib
import secrets
from dataclasses import dataclass

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
GROUP, SECRET_GROUPS = 4, 3
CLAIM_LABEL = b"optigpu-claim:"


@dataclass(frozen=True)
class InviteCode:
    """A code: `public` names the invitation, `secret` proves that one has it."""

    public: str
    secret: str

    @property
    def text(self) -> str:
        """As it is shown to the operator, in groups."""
        groups = [self.secret[at : at + GROUP] for at in range(0, len(self.secret), GROUP)]
        return "-".join([self.public, *groups])

    @property
    def verifier(self) -> bytes:
        """SHA-256 of the secret with its label: what the server keeps, and the key that a claim is proven with."""
        return hashlib.sha256(CLAIM_LABEL + self.secret.encode()).digest()


def new_code() -> InviteCode:
    """A random code."""
    return InviteCode(_random(GROUP), _random(GROUP * SECRET_GROUPS))


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))
