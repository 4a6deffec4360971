"""Tables as Markdown, for what scripts print."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table.

    Args:
      columns: headings.
      rows: cells, which are shown with `str`.

    Returns:
      Lines without a newline behind the last.

    Raises:
      ValueError: a row with another number of cells.

    Example:
      >>> print(markdown_table(["token", "target"], [["A", 0.5]]))
      | token | target |
      |---|---|
      | A | 0.5 |
    """
    lines = [_line(columns), "|" + "---|" * len(columns)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"`row` is {row!r}; allowed: {len(columns)} cells")
        lines.append(_line(row))
    return "\n".join(lines)


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
