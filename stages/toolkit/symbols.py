"""From a code position inside a module to a line of source."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TOKEN = re.compile(r"\{pc:(0x[0-9a-fA-F]+)\}")


@dataclass(frozen=True)
class Line:
    """A line of source, or the bare offset inside the module where the line is not known."""

    file: str
    number: int
    text: str
    pc: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}" if self.number else f"{Path(self.file).name}+{self.pc:#x}"


def available() -> bool:
    """Whether lines can be resolved here: that takes `addr2line`, of the GNU binutils."""
    return shutil.which("addr2line") is not None


def lines(module: Path, pcs: Iterable[int]) -> dict[int, Line]:
    """The line of each return address `pc`, an offset inside the file of the module.

    A return address points behind its call, so the byte before it is looked up. Of inlined frames the innermost in a
    kernel file (`.cu`) counts: a line of `kernel.cu`, not the header function that it calls.
    """
    pcs = sorted(set(pcs))
    unknown = {pc: Line(str(module), 0, "", pc) for pc in pcs}
    if not pcs or not available():
        return unknown
    answer = subprocess.run(
        ["addr2line", "-e", str(module), "-a", "-i", "-f", "-C"],
        input="".join(f"{pc - 1:#x}\n" for pc in pcs),
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    # For each address "0x...", then two lines a frame: its function, its "file:line (discriminator n)".
    blocks = re.split(r"^0x[0-9a-f]+\n", answer, flags=re.MULTILINE)[1:]
    if len(blocks) != len(pcs):
        return unknown
    found, sources = {}, {}
    for pc, block in zip(pcs, blocks, strict=True):
        frames = [re.match(r"(.*):(\d+)", frame) for frame in block.splitlines()[1::2]]
        frames = [(frame[1], int(frame[2])) for frame in frames if frame and frame[1] != "??" and int(frame[2])]
        file, number = next((frame for frame in frames if frame[0].endswith(".cu")), frames[0] if frames else ("", 0))
        found[pc] = Line(file, number, _source(sources, file, number), pc) if number else unknown[pc]
    return found


def resolve(text: str, module: Path) -> str:
    """Replace each `{pc:0x1a2b}` in a module's message by `kernel.cu:41`."""
    known = lines(module, (int(token, 16) for token in _TOKEN.findall(text)))
    return _TOKEN.sub(lambda token: str(known[int(token[1], 16)]), text)


def _source(sources: dict[str, list[str]], file: str, number: int) -> str:
    if file not in sources:
        path = Path(file)
        sources[file] = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return sources[file][number - 1].strip() if number <= len(sources[file]) else ""
