"""The configuration that a command line of `kvlane` means, without running it."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import cli
from cluster.config import Config
from worker.errors import UserError


def configured(words: Sequence[str], files: Mapping[str, Path] | None = None) -> Config:
    """What `kvlane WORDS` serves with; the defaults for commands that configure nothing.

    files: where a file that the command names lies here. Raises UserError if kvlane does not take
    these words, or the configuration is wrong.
    """
    try:
        given = cli.parser_of_commands().parse_args(list(words))
    except (SystemExit, argparse.ArgumentError) as error:
        raise UserError(f"kvlane does not take {words}") from error
    if words[0] not in ("serve", "config", "restart"):
        return Config()
    given.config = (files or {}).get(str(given.config), given.config)
    return cli.load_config(given)
