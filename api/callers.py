"""Who calls, and what a caller may do."""

from dataclasses import dataclass

from optigpu.store.audit import Actor
from optigpu.store.keys import KeyInfo, Scope

_IMPLIES = {
    Scope.READ: {Scope.READ},
    Scope.SUBMIT: {Scope.READ, Scope.SUBMIT},
    Scope.ADMIN: set(Scope),
}
"""What a key of each scope may do."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request, from where, and the request's id. `key` is None if the service needs no key."""

    key: KeyInfo | None
    address: str
    request_id: str
    reads_only: bool = False
    """Whether the caller has no key where others need one, and may read because the service says so."""

    @property
    def id(self) -> str:
        """The key's id, or the address of a caller without a key."""
        return self.key.id if self.key else "open"

    @property
    def name(self) -> str:
        """The key's name, as tombstones keep it."""
        return self.key.name if self.key else "a caller without a key"

    @property
    def actor(self) -> Actor:
        """The caller as the audit log names it."""
        key_id = self.key.id if self.key else None
        return Actor(name=self.name, key_id=key_id, address=self.address, request_id=self.request_id)

    def may(self, scope: Scope) -> bool:
        """Whether the caller may make calls of this scope."""
        if self.key is None:
            return scope is Scope.READ or not self.reads_only
        return any(scope in _IMPLIES[own] for own in self.key.scopes)
