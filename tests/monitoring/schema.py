"""Checks the dashboards against Grafana's own types.

    tests/monitoring/install              # once: @grafana/schema and a compiler, of npm
    python -m tests.monitoring.schema      # exits 1 with the compiler's words if one does not fit

Then a few faults are planted, each of which has to be noticed.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.helm.dashboards import boards, panels

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "monitoring"
# JSON has the values of enums, where TypeScript wants their names.
HEAD = """\
import type { Dashboard } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""
CONFIGURATION = "@grafana/schema/dist/esm/raw/composable/{}/panelcfg/x/{}PanelCfg_types.gen"
KINDS = {"timeseries": "TimeSeries", "stat": "Stat", "heatmap": "Heatmap", "table": "Table"}
FAULTS: dict[str, tuple[str, str]] = {
    "place": ('"y": 0', '"y": "top"'),
    "kind of variable": ('"type": "query"', '"type": "queries"'),
    "option of a heatmap": ('"cellGap": 1', '"cellGap": "1"'),
    "look of lines": ('"drawStyle": "line"', '"drawStyle": "lines"'),
    "number of a stat": ('"graphMode": "area"', '"graphMode": "true"'),
}


def module(board: str) -> str:
    """A dashboard in TypeScript: the whole, and what each panel has of its kind."""
    lines = [HEAD, f"export const board = {board} satisfies Plain<Dashboard>;"]
    for kind, name in KINDS.items():
        lines.append(f'import type * as {name} from "{CONFIGURATION.format(kind, name)}";')
    for panel in panels(json.loads(board)):
        kind, number = KINDS[panel["type"]], panel["id"]
        options, custom = panel.get("options"), panel["fieldConfig"]["defaults"].get("custom")
        lines.append(f"const o{number}: Plain<Partial<{kind}.Options>> = {text(options)};")
        if custom is not None:
            lines.append(f"const c{number}: Plain<Partial<{kind}.FieldConfig>> = {text(custom)};")
    return "\n".join(lines)


def complaints(board: str) -> str:
    """What the compiler says of a dashboard's JSON; "": it fits."""
    with TemporaryDirectory(dir=TOOLS) as directory:  # below the packages, to find them
        (Path(directory) / "board.ts").write_text(module(board))
        done = subprocess.run(
            [str(TOOLS / "node_modules" / ".bin" / "tsc"), "--noEmit", "--strict", "--skipLibCheck",
             "--module", "nodenext", "--moduleResolution", "nodenext", "board.ts"],
            cwd=directory, capture_output=True, text=True, check=False,
        )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout + done.stderr


def text(board: Any) -> str:
    return json.dumps(board, indent=1)


def main() -> int:
    if not (TOOLS / "done").exists():
        raise SystemExit("run tests/monitoring/install")
    num_wrong = 0
    for name, board in boards().items():
        found = complaints(text(board))
        num_wrong += bool(found)
        print(f"{name}: {found or 'fits'}")
    right = text(boards()["overview"])
    for name, (old, new) in FAULTS.items():
        assert old in right, name
        noticed = complaints(right.replace(old, new))
        num_wrong += not noticed
        print(f"planted, {name}: {'noticed' if noticed else 'NOT NOTICED'}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
