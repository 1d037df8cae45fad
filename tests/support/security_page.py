"""The table of ports in .github/SECURITY.md, which is that of `kvlane doctor --ports`.

python -m tests.support.security_page       # writes it, after a change
"""

from pathlib import Path

from cluster.diagnose.doors import table

PAGE = Path(__file__).parents[2] / ".github" / "SECURITY.md"
BEGIN, END = "<!-- ports -->\n", "<!-- /ports -->\n"


def page() -> str:
    """The page, as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
