"""Text that breaks between words, and never between a number, its unit and what it is the number of."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.text import Text

_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|us|B|KiB|MiB|GiB|TiB)\b)")
_NAME = re.compile(r"(?<=\w) (?=\d[\d.]*\u00a0)")


@dataclasses.dataclass(frozen=True)
class Flow:
    """A rich renderable of plain text; lines keep their own breaks."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # textwrap breaks at no non-breaking space (rich does, and markup is not meant here).
        for line in _NAME.sub("\u00a0", _UNIT.sub("\u00a0", self.text)).split("\n"):
            wrapped = textwrap.wrap(line, options.max_width, break_long_words=False, break_on_hyphens=False)
            for part in wrapped or [""]:
                yield Text(part.replace("\u00a0", " "))
