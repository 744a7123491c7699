"""Text from code, as a cell of a Markdown table."""

import re


def cell(text: str) -> str:
    """On one line, with the characters that would mean something to Markdown or to a table made plain."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))  # code at the odd places
    plain = [part if number % 2 else re.sub(r"([*<_\[\]])", r"\\\1", part) for number, part in enumerate(parts)]
    return "".join(plain).replace("|", "\\|")
