"""The table of families says what holds; of published templates `family_table` alone can tell."""

from pathlib import Path

from tests.support import family_table
from worker.config.checkpoint.families import FAMILIES


def rows() -> list[list[str]]:
    lines = family_table.TABLE.read_text(encoding="utf-8").splitlines()
    split = [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]
    assert tuple(split[0]) == family_table.COLUMNS
    return split[1:]


def test_every_family_has_a_row_with_the_formats_that_are_read() -> None:
    of_families = {row[0]: tuple(row[-3:]) for row in rows() if row[0]}
    wanted = {family.models for family in FAMILIES.values()}
    assert of_families == {models: family_table.formats(models) for models in wanted}


def test_the_table_is_whole_and_nothing_in_it_fails() -> None:
    names = [name for names in family_table.TEMPLATES.values() for name in names]
    assert [row[1] for row in rows()] == names
    assert "✗" not in family_table.TABLE.read_text(encoding="utf-8")


def test_own_templates_do_what_the_table_says(tmp_path: Path) -> None:
    told = {row[1]: row[1:8] for row in rows() if row[1].startswith(family_table.OWN)}
    made = family_table.own(tmp_path)
    found = {name: list(family_table.cells(name, made[name])) for name in told}
    assert found == told
