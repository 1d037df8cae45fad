"""Downloads a model, or its drafter, that is named on the hub (Hugging Face's, or HF_ENDPOINT's).

Once, on the machine of `serve` and before Ray starts, into the hub's own cache (HF_HOME). After a
broken connection it goes on; after an end of the process, with the files that were not done. The
workers get the directory: nodes of a Ray cluster have to share that storage.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from cluster.config import Config
from router.text import template
from worker.config.checkpoint import declared, foreign, tokens
from worker.errors import KvlaneError, UserError, WorldError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
DESCRIPTION = [
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *tokens.FILES,
    *template.FILES,
    *declared.FILES,
    *foreign.FILES,
]
WEIGHTS = ["*.safetensors"]
# Other forms of the same weights, in folders and Mistral's, and adapters.
IGNORED = ["*/*.safetensors", "consolidated*", "adapter_model*"]


class Repo(NamedTuple):
    """A repository on the hub, and where it was named."""

    name: str
    revision: str
    path: str  # the field with its name
    flag: str  # of the command line, for the same


def is_name(path: str) -> bool:
    """Whether a path names a model on the hub; a directory of that name wins."""
    return NAME.fullmatch(path) is not None and not Path(path).exists()


def fetch(config: Config, *, offline: bool, check: Callable[[Config], None]) -> Config:
    """Download the model that config.model names; the config with its directory.

    offline: take files from the cache only.
    check: gets the config with all but the weights, before those are downloaded.

    Raises UserError if there is no such model or revision, a token is needed, it is not in the
    cache, or `check` does; WorldError if the hub cannot be reached, or the disk is full.
    """
    model = config.model
    repo = Repo(model.path, model.revision, "model.path", "--model")

    def with_files(files: list[str]) -> Config:
        path = _download(repo, files, offline)
        named = {"path": path, "served_name": model.served_name or model.path}
        return config.model_copy(update={"model": model.model_copy(update=named)})

    described = with_files(DESCRIPTION)
    check(described)
    if model.load_format != "safetensors":
        return described
    return with_files([*DESCRIPTION, *WEIGHTS])


def fetch_drafter(config: Config, *, offline: bool) -> Config:
    """The same for the drafter that `config.spec` names."""
    spec = config.spec
    repo = Repo(spec.path, "", "spec.path", "--spec-path")
    with_weights = config.model.load_format == "safetensors"
    files = [*DESCRIPTION, *WEIGHTS] if with_weights else DESCRIPTION
    path = _download(repo, files, offline)
    return config.model_copy(update={"spec": spec.model_copy(update={"path": path})})


def _download(repo: Repo, files: list[str], offline: bool) -> str:
    # Here, because it reads the environment when it is imported and takes a part of a second.
    import huggingface_hub
    from huggingface_hub import constants

    library = cast("Any", huggingface_hub)
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        directory = library.snapshot_download(
            repo.name,
            revision=repo.revision or None,
            allow_patterns=files,
            ignore_patterns=IGNORED,
            local_files_only=offline,
        )
        # Where it could not ask the hub it may hand out what there is, without a word.
        if _is_partial(Path(directory), files, offline):
            library.model_info(repo.name, revision=repo.revision or None)
    except Exception as error:  # the hub's library raises kinds without a common base
        raise _explained(repo, error, offline) from error
    return str(directory)


def _is_partial(directory: Path, files: list[str], offline: bool) -> bool:
    """Whether a model's files may not all be there; raises LocalEntryNotFoundError offline."""
    wanted = ["config.json"] if offline else ["config.json", "tokenizer.json"]
    if WEIGHTS[0] in files:
        index = directory / "model.safetensors.index.json"
        wanted += _shards(index) if index.is_file() else WEIGHTS
    if all(any(directory.glob(name)) for name in set(wanted)):
        return False
    if offline:
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError("files are missing")
    return True


def _shards(index: Path) -> list[str]:
    """The files that an index names; of one that cannot be read the loader tells."""
    try:
        return list(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return WEIGHTS


def _explained(repo: Repo, error: Exception, offline: bool) -> KvlaneError:
    from huggingface_hub import constants, errors

    name, path = repo.name, repo.path
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.RevisionNotFoundError):
        path = "model.revision"
        return UserError(f"{path}: {name} has no revision {repo.revision!r}", path)
    reason = ""
    if isinstance(error, errors.HFValidationError):
        reason = f"there is no directory {name}, and a model on the hub cannot be called so"
    elif isinstance(error, errors.GatedRepoError):
        remedy = f"accept its terms at {hub}/{name} and set HF_TOKEN to a token of that account"
        reason = f"{name} is gated: {remedy}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        private = "it is private (then set HF_TOKEN to a token that may read it)"
        reason = f"{hub} has no model {name}, or {private}; nor is there a directory {name} here"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        reason = f"{hub} refuses {name}: check HF_TOKEN"
    elif isinstance(error, errors.LocalEntryNotFoundError) and offline:
        remedy = "start once without --offline and HF_HUB_OFFLINE where there is network"
        reason = f"{name} is not, or not whole, in the cache {cache}: {remedy}, or give a directory"
    if reason:
        return UserError(f"{path}: {reason}", path)
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    reason = f"{type(first).__name__}: {first}".strip().splitlines()[0]
    return WorldError(
        f"{path}: cannot download {name} from {hub}: {reason}. Files that are done stay in "
        f"{cache}. Without network, download it elsewhere (hf download {name} --local-dir DIR) and "
        f"give the directory: {repo.flag} DIR. HF_ENDPOINT names another hub, HTTPS_PROXY a proxy"
    )
