"""The shipped JavaScript: typed by `tsc --checkJs`, and the parts without a browser proved in Node."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types() -> None:
    run("node_modules/.bin/tsc", "-p", "web", "--noEmit")


@pytest.mark.parametrize("name", sorted(path.name for path in Path(__file__).parent.glob("*.test.mjs")))
def test_in_node(name: str) -> None:
    run("node", "--test", f"tests/web/{name}")


def test_no_inline_script_or_style() -> None:
    templates = sorted((ROOT / "web" / "templates").glob("*.html"))
    assert len(templates) == 7
    for template in templates:
        text = template.read_text()
        for banned in ("<style", "style=", "onclick", "onload", "javascript:", "https://", "http://"):
            assert banned not in text, f"{template.name}: {banned}"
        assert text.count("<script") == text.count('<script type="module" src="/static/js/')


def test_no_markup_from_strings() -> None:
    for script in (ROOT / "web" / "static" / "js").glob("*.js"):
        text = script.read_text()
        for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert banned not in text, f"{script.name}: {banned}"
