"""The comment that opens a kernel: its sections, and what of them a build has to know. Only the standard library."""

import re
from pathlib import Path

from .compilers import ARCHITECTURES, BuildError, capability_of

CAPABILITIES = list(dict.fromkeys(map(capability_of, ARCHITECTURES)))


def parse(source: str) -> dict[str, str]:
    """The sections of the comment that opens a kernel, by their headings, each as lines without comment marks."""
    sections: dict[str, list[str]] = {}
    for line in source.splitlines()[1:]:
        if not line.startswith(("//", "#")):
            break
        line = re.sub(r"^(//|#)", "", line)
        if heading := re.match(r" ([A-Z][a-z]+) +(\S.*)", line):
            sections[heading[1]] = [heading[2]]
        elif sections and (text := re.sub(r"^ {0,11}", "", line).rstrip("/ ")):
            list(sections.values())[-1].append(text)
    return {heading: "\n".join(lines) for heading, lines in sections.items()}


def capability(kernel: Path) -> str | None:
    """The compute capability of the only GPUs that a kernel runs on, "9.0"; None: there is no such limit.

    It stands in the header, and anything may follow it: `// Needs     compute capability 9.0: wgmma is Hopper's own.`

    Raises:
        BuildError: The section says something else.
    """
    needs = parse(kernel.read_text(encoding="utf-8")).get("Needs")
    if needs is None:
        return None
    found = re.match(r"compute capability (\d+\.\d)(?!\d)", needs)
    if not found or found[1] not in CAPABILITIES:
        raise BuildError(
            f"{kernel.parent.name}/{kernel.name}: its header says `Needs {needs.partition(chr(10))[0]}`; allowed: "
            f"`Needs compute capability X`, X one of {', '.join(CAPABILITIES)}"
        )
    return found[1]
