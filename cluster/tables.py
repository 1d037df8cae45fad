"""Tables of `kvlane status` and `top`, for terminals and pipes. Imports rich: import it late."""

import io
from collections.abc import Container, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2
ANY_WIDTH = 10_000
STYLES = {  # of states
    **dict.fromkeys(("lost", "silent"), "red"),
    **dict.fromkeys(("draining", "drained", "restarting", "turning", "starting"), "yellow"),
}


def text(line: str, style: str = "") -> Text:
    """A line as it is, but for characters that move a terminal's cursor."""
    printable = "".join(c if c.isprintable() else " " for c in line)
    return Text(printable, style, no_wrap=True, overflow="crop")


def span(seconds: float) -> str:
    """So much time, in the unit that people would say."""
    for limit, unit_s, unit in ((100, 1, "s"), (6000, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Container[int] = ()) -> Table:
    """Columns that are never squeezed: a terminal cuts what is beyond its width.

    rows: cells, of which the second may be a state. right: numbers of columns that end flush.
    """
    cells = [[text(cell) for cell in row] for row in rows]
    columns = zip(head, *([cell.plain for cell in row] for row in cells), strict=True)
    widths = [max(map(cell_len, column)) for column in columns]
    width = sum(widths) + GAP * (len(widths) - 1)
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="", width=width)
    for i, name in enumerate(head):
        made.add_column(name, justify="right" if i in right else "left", no_wrap=True)
    for row in cells:
        made.add_row(*row, style=STYLES.get(row[1].plain))
    return made


def plain(parts: Iterable[RenderableType]) -> str:
    """The same without colours, one below the other."""
    console = Console(file=io.StringIO(), width=ANY_WIDTH, color_system=None)
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
