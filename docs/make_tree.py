"""Writes the tree of README.md: every source file with the first sentence of its own opening comment.

    python docs/make_tree.py           rewrites the part between the two markers
    python docs/make_tree.py --check   exits 1 where that would change something (a test runs this)

The line comes from the file itself, so the tree is as true as the files' own headers.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- tree: made by docs/make_tree.py -->", "<!-- end of tree -->"
SHOWN = {".py", ".js", ".mjs", ".c", ".html", ".css"}
LINE_CHARACTERS_MAX = 100


def tracked() -> list[Path]:
    """Source files that git knows or would add, tests and package markers left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = {Path(name) for name in names}
    # tests/ mirrors the folders of what it tests; a line a file would only repeat them.
    return [path for path in paths if path.suffix in SHOWN and path.parts[0] != "tests" and path.name != "__init__.py"]


def headline(path: Path) -> str:
    """The first sentence (or line) of a module docstring or of the first comment. Raises ValueError without one."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".py":
        opening = ast.get_docstring(ast.parse(text)) or ""
    else:
        found = re.search(r"/\*+(.*?)\*/|<!--(.*?)-->|\{#(.*?)#\}", text, re.DOTALL)
        opening = next((part for part in found.groups() if part), "") if found else ""
        if not opening:
            opening = "\n".join(re.findall(r"\A(?:// ?.*\n)+", text))
        opening = re.sub(r"^\s*(?:\*|//)? ?", "", opening, flags=re.MULTILINE).strip()
    paragraph = " ".join(opening.split("\n\n")[0].split())
    if not paragraph:
        raise ValueError(f"{path} does not open with a comment that says what it is")
    sentence = re.split(r"(?<=\.)\s", paragraph)[0].rstrip(".:;")
    return sentence if len(sentence) <= LINE_CHARACTERS_MAX else sentence[: LINE_CHARACTERS_MAX - 1].rstrip() + "…"


def tree() -> str:
    """Markdown: one code block, folders as headings of their files."""
    lines: list[str] = []
    folder: Path | None = None
    for path in sorted(tracked(), key=lambda path: (path.parent, path.name)):
        if path.parent != folder:
            folder = path.parent
            lines.append(f"{folder}/" if str(folder) != "." else "./")
        lines.append(f"    {path.name:<26} {headline(path)}")
    return "```\n" + "\n".join(lines) + "\n```"


def main() -> int:
    """Rewrite or check; the exit status."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    made = f"{before}{BEGIN}\n{tree()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if made != text:
            print("README.md's tree is not what the files say; run python docs/make_tree.py")
            return 1
        return 0
    readme.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
