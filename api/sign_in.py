"""The cookies of browsers, and the tokens that show that a form comes from a page of ours.

A browser that is signed in sends a cookie by itself, with whatever calls this service, so a call that changes something
must also show the token that our pages carry. It is an HMAC of the cookie, which no other page can read; a browser that
is not signed in has a cookie of chance for it.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from fastapi import Request, Response

from api.problems import ProblemError
from api.settings import ServiceSettings

SIGN_IN = "optigpu_sign_in"
VISITOR = "optigpu_visitor"
"""Names of cookies: of a browser that is signed in, and of one that has been shown a form."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""With these a call changes nothing."""
_PURPOSE = b"a form of OptiGPU"


@dataclass(frozen=True)
class Seal:
    """What the forms of one browser are sealed with: its cookie."""

    secret: str
    is_new: bool = False

    @property
    def token(self) -> str:
        """What each form carries."""
        return hmac.new(self.secret.encode("utf-8", "surrogatepass"), _PURPOSE, hashlib.sha256).hexdigest()

    def require(self, token: str | None) -> None:
        """Raises ProblemError 403 unless that is the token."""
        if token is None or not hmac.compare_digest(
            token.encode("utf-8", "surrogatepass"), self.token.encode()
        ):
            raise ProblemError(
                403, "The form is not from a page of this service, or it is too old; load the page again."
            )


def seal_of(request: Request) -> Seal:
    """The browser's seal; a new one if it has no cookie yet, which `keep_seal` gives it with the page."""
    known = signed_in_by(request) or request.cookies.get(VISITOR)
    return Seal(known) if known else Seal(secrets.token_urlsafe(32), is_new=True)


def keep_seal(response: Response, request: Request, settings: ServiceSettings, seal: Seal) -> None:
    """Sets the cookie of a seal that is new."""
    if seal.is_new:
        _set(response, request, settings, VISITOR, seal.secret, None)


def signed_in_by(request: Request) -> str | None:
    """What the cookie holds of a browser that is, or was, signed in."""
    return request.cookies.get(SIGN_IN) or None


def sign_in(response: Response, request: Request, settings: ServiceSettings, secret: str) -> None:
    """Sets the cookie of a browser that is signed in from now on."""
    _set(response, request, settings, SIGN_IN, secret, settings.session_s)


def sign_out(response: Response, settings: ServiceSettings) -> None:
    """Removes both cookies."""
    for name in (SIGN_IN, VISITOR):
        response.delete_cookie(name, path=settings.prefix or "/", httponly=True, samesite="strict")


def _set(
    response: Response,
    request: Request,
    settings: ServiceSettings,
    name: str,
    value: str,
    lasts_s: int | None,
) -> None:
    """No script reads it, no other site has it sent, and where there is https it goes over nothing else."""
    secure = request.url.scheme == "https" or settings.hsts_s > 0
    response.set_cookie(
        name,
        value,
        max_age=lasts_s,
        path=settings.prefix or "/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
