"""The commands of a README, which are run as they stand there."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "deploy" / "README.md"


def block(name: str, path: Path = README) -> list[str]:
    """The commands after the marker `<!-- deploy: name -->`, one a line."""
    text = path.read_text(encoding="utf-8")
    _, marker, rest = text.partition(f"<!-- deploy: {name} -->\n```sh\n")
    assert marker, f"{path} has no block {name}"
    lines = rest.partition("```")[0].replace("\\\n", "").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
