"""The database of this machine, for a command that reads what was measured here and starts no service."""

import os

from optigpu.paths import data_dir
from optigpu.store.database import Database, default_url, is_made
from optigpu.vocabulary import StoreError

URL_VARIABLE = "OPTIGPU_DATABASE_URL"


def local_database() -> Database | None:
    """The database that a service started here would use; None where its file was never made.

    Raises StoreError for an address that cannot be used.
    """
    url = os.environ.get(URL_VARIABLE) or default_url(data_dir())
    if not is_made(url):
        return None
    try:
        return Database(url)
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{error.name} is missing; install it with: pip install 'optigpu[service]'."
        ) from error
