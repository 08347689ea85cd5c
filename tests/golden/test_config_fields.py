"""Every field of a recipe, in a golden file, so that growth is a visible diff. Run this file to make it again."""

import dataclasses
from pathlib import Path

from tidemill.run.config import Recipe

GOLDEN = Path(__file__).with_name("recipe_fields.txt")
MAX_FIELDS = 15


def fields_of(kind: type, prefix: str = "") -> list[str]:
    lines = []
    for field in dataclasses.fields(kind):
        lines.append(f"{prefix}{field.name}: {getattr(field.type, '__name__', field.type)}")
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            lines += fields_of(field.type, f"{prefix}{field.name}.")
    return lines


def test_fields_are_the_golden_ones() -> None:
    assert fields_of(Recipe) == GOLDEN.read_text().splitlines()


def test_no_part_has_too_many() -> None:
    for kind in [Recipe, *(f.type for f in dataclasses.fields(Recipe) if dataclasses.is_dataclass(f.type))]:
        assert len(dataclasses.fields(kind)) <= MAX_FIELDS


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(fields_of(Recipe)) + "\n")
