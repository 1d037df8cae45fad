"""A model's name on the hub becomes a directory; what goes wrong says what to do.

Each download runs in a process of its own: huggingface_hub reads its environment when imported.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.config import Config
from cluster.download import is_name
from tests.support.commands import REPOSITORY, run
from tests.support.hub import COMMIT, Hub, Repo, running

TINY = Config().model.directory
NAME = "some-org/Tiny-0.1B"
FETCH = """
import sys
from cluster import download
from cluster.diagnose.checks import check_model
from cluster.config import load
from cluster.cli import main
offline = "--offline" in sys.argv
sets = [each for each in sys.argv[1:] if "=" in each]
def look(config): check_model(config, with_weights=False)
config = load(None, sets)
if download.is_name(config.spec.path):
    config = download.fetch_drafter(config, offline=offline)
config = download.fetch(config, offline=offline, check=look)
check_model(config)
print(config.model.directory, config.spec.path or config.model.name)
"""


def environment(hub: Hub | None, home: Path, token: str = "") -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "RAY_"))}
    url = hub.url if hub else "http://127.0.0.1:9"
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    return kept | own | ({"HF_TOKEN": token} if token else {})


def fetch(
    hub: Hub | None, home: Path, *arguments: str, token: str = ""
) -> subprocess.CompletedProcess[str]:
    return run(
        [f"model.path={NAME}", *arguments],
        program=FETCH, env=environment(hub, home, token), cwd=home.parent,
    )  # fmt: skip


def refused(hub: Hub | None, home: Path, *arguments: str, token: str = "", code: int = 2) -> str:
    """What `serve` says; it ends before Ray starts."""
    done = run(
        ["serve", "--port", "0", *arguments], env=environment(hub, home, token), cwd=home.parent
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model, with weights of 24 MB and files that nobody needs."""
    directory = tmp_path / "repository"
    shutil.copytree(TINY, directory)
    save_file({"extra": np.zeros(6_000_000, np.float32)}, directory / "more.safetensors")
    for name in ("README.md", "pytorch_model.bin", "original/consolidated.safetensors",
                 "additional_chat_templates/tool_use.jinja"):  # fmt: skip
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"\0" * 100)
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two words and a slash, unless a directory is called so."""
    assert all(map(is_name, ("Qwen/Qwen3-0.6B", "a/b")))
    assert not any(map(is_name, ("tiny", "/a/b", "./a", "a/b/c", "~/a", "../a")))
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_name("a/b")


def test_a_model_is_downloaded_once_with_the_files_that_are_needed(model: Path, home: Path) -> None:
    with running(**{"some_org__Tiny_0.1B": Repo(model)}) as hub:
        done = fetch(hub, home)
        assert done.returncode == 0, done.stderr
        directory, name = done.stdout.split()
        assert name == NAME
        assert directory.endswith(COMMIT)
        wanted = {"config.json", "generation_config.json", "tokenizer.json",
                  "tokenizer_config.json", "model.safetensors", "more.safetensors",
                  "additional_chat_templates/tool_use.jinja"}  # fmt: skip
        found = [path for path in Path(directory).rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)) for path in found} == wanted
        for file in wanted:
            assert (Path(directory) / file).read_bytes() == (model / file).read_bytes()
        assert len(hub.downloads()) == len(wanted)
        assert fetch(hub, home).stdout == done.stdout
        assert len(hub.downloads()) == len(wanted), "the cache was not used"
    assert fetch(None, home, "--offline").stdout == done.stdout
    assert fetch(None, home).stdout == done.stdout, "no network, but all is here"


def test_a_drafter_is_downloaded_too(model: Path, home: Path) -> None:
    drafter = TINY.with_name("tiny-chain")
    with running(**{"some_org__Tiny_0.1B": Repo(model), "some_org__Chain": Repo(drafter)}) as hub:
        done = fetch(hub, home, "spec.drafter=chain", "spec.path=some-org/Chain")
        assert done.returncode == 0, done.stderr
        _, directory = done.stdout.split()
        found = {path.name for path in Path(directory).iterdir()}
        assert found == {"config.json", "model.safetensors"}
        on = "--model", NAME, "--spec", "chain"
        message = refused(hub, home, *on, "--spec-path", "some-org/None")
        assert f"spec.path: {hub.url} has no model some-org/None" in message
        assert message.count("spec.path: ") == 1


def test_dummy_weights_are_not_downloaded(model: Path, home: Path) -> None:
    with running(**{"some_org__Tiny_0.1B": Repo(model)}) as hub:
        done = fetch(hub, home, "model.load_format=dummy", "model.served_name=mine")
        assert done.stdout.endswith(" mine\n")
        assert not [file for file in hub.downloads() if "safetensors" in file]


def test_what_cannot_be_served_is_told_before_its_weights_are_downloaded(model, home) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("ForCausalLM", "ForAudio"))
    adapter = model.with_name("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some-org/Base"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    with running(**{"some_org__Tiny_0.1B": Repo(model), "some_org__LoRA": Repo(adapter)}) as hub:
        assert "ForAudio' is not supported" in refused(hub, home, "--model", NAME)
        assert "take some-org/Base" in refused(hub, home, "--model", "some-org/LoRA")
        assert not [file for file in hub.downloads() if "safetensors" in file]


def test_a_download_goes_on_after_a_broken_connection(model: Path, home: Path) -> None:
    with running(**{"some_org__Tiny_0.1B": Repo(model)}) as hub:
        hub.cut_after = 21_000_000
        # The first versions of the library go on in the next start, later ones at once.
        done = fetch(hub, home)
        done = done if done.returncode == 0 else fetch(hub, home)
        assert done.returncode == 0, done.stderr
        (directory, _) = done.stdout.split()
        assert (Path(directory) / "more.safetensors").stat().st_size > 24_000_000
        ranges = [each for each in hub.downloads() if " bytes=" in each]
        assert ranges == ["more.safetensors bytes=20971520-"]  # the last whole 10 MiB


def test_a_private_model_needs_the_token(model: Path, home: Path) -> None:
    with running(**{"some_org__Tiny_0.1B": Repo(model, token="hf_right")}) as hub:
        for token in ("", "hf_wrong"):
            message = refused(hub, home, "--model", NAME, token=token)
            assert f"model.path: {hub.url} has no model {NAME}, or it is private" in message
            assert "HF_TOKEN" in message
        assert fetch(hub, home, token="hf_right").returncode == 0


def test_a_gated_model_a_missing_one_and_a_missing_revision_are_told(model, home) -> None:
    repos = {"some_org__Tiny_0.1B": Repo(model), "some_org__Gated": Repo(model, gated=True)}
    with running(**repos) as hub:
        message = refused(hub, home, "--model", "some-org/Gated", token="hf_x")
        assert f"is gated: accept its terms at {hub.url}/some-org/Gated" in message
        assert "has no model some-org/None" in refused(hub, home, "--model", "some-org/None")
        assert "cannot be called so" in refused(hub, home, "--model", "runs/ckpt--final")
        message = refused(hub, home, "--model", NAME, "--set", "model.revision=v9")
        assert f"model.revision: {NAME} has no revision 'v9'" in message


def test_without_network_the_error_says_what_to_do(home: Path) -> None:
    message = refused(None, home, "--model", NAME, code=1)
    for part in ("cannot download", "Connection refused", "--local-dir", "HF_ENDPOINT"):
        assert part in message
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT  # of a download that was cut
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, snapshot / name)
        message = refused(None, home, "--model", NAME, code=1)
        assert "cannot download" in message
        assert "Connection refused" in message
    message = refused(None, home, "--model", NAME, "--offline")
    assert f"not whole, in the cache {home / 'hub'}" in message
    assert "without --offline" in message
