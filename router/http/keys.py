"""The file of API keys. Apart from `auth`, so that the command line reads it at little cost."""

from pathlib import Path

from worker.errors import UserError


def read_keys(path: str) -> tuple[bytes, ...]:
    """The keys of a file, one a line; empty lines do not count. Without a path there are none.

    Raises a UserError if the file cannot be read or holds no key.
    """
    if not path:
        return ()
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", "router.api_key_file") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise UserError(f"{path} holds no key", "router.api_key_file")
    return keys
