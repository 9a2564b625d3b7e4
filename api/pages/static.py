"""The files of api/static. They need no key."""

from fastapi import APIRouter, Response

from api.problems import ProblemError
from api.rendering import static_files

router = APIRouter()
FOREVER = "public, max-age=31536000, immutable"


@router.get("/static/{digest}/{name}")
def read_file(digest: str, name: str) -> Response:
    """Kept by browsers for ever under its own digest; under another version's it is sent, and not kept."""
    file = static_files().get(name)
    if file is None:
        raise ProblemError(404, "There is no such file; load the page again.")
    kept = FOREVER if digest == file.digest else "no-cache"
    return Response(file.content, media_type=file.media_type, headers={"Cache-Control": kept})
