"""The documents: their links lead somewhere, and what they say of the code can be found there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

from torch_resilient.pipelining import picture

PAPERS = ROOT / "docs" / "papers.md"
IMAGES = sorted((ROOT / "docs" / "images").iterdir())
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", ROOT / "third_party") for path in folder.glob("*.md")
)

# A fenced block, which contains no links.
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
VARIABLE = re.compile(r"\bTORCH_RESILIENT_[A-Z0-9_]*[A-Z0-9]")
MARK = re.compile(r"\bPaper:(.*)")
# "SHIFT §4.3.2", "PIPEMORPH §4.2, Alg 1"
REFERENCE = re.compile(r"\s*([A-Z]+) (§\d+(?:\.\d+)*)")
HEADING = re.compile(r"^## ([A-Z]+)$")
ROW_SECTION = re.compile(r"§\d+(?:\.\d+)*")
# A comment, a literal that is one character, or one that is a string.
CPP_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])'|"((?:\\.|[^"\\\n])*)\"""", re.DOTALL
)
# Files of the source tree that a wheel does not hold.
OF_THE_SOURCE = re.compile(
    r"\b(?:docs|csrc|tests|examples|benchmarks)/\w|\w\.md\b|\b(?:README|CONTRIBUTING|CHANGELOG)\b"
)
STATES = ("yes", "other", "idea", "no", "the user's")


def anchors(text: str) -> set[str]:
    """The anchors of the headings in `text`."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links of `text`, as of the file `document`, that lead to no file or no heading."""
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = document.parent / path if path else document
        if not file.exists():
            found.append(target)
        elif anchor and file.suffix == ".md":
            there = file.read_text(encoding="utf-8") if path else text
            if anchor not in anchors(there):
                found.append(target)
    return found


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Rows of the tables below a paper's heading: its key, and the cells."""
    key = ""
    for line in text.splitlines():
        if heading := HEADING.match(line):
            key = heading[1]
        elif line.startswith("## "):
            key = ""
        elif key and line.startswith("| §"):
            yield key, [cell.strip() for cell in line.strip("|").split("|")]


def listed_sections(text: str) -> set[tuple[str, str]]:
    """(key, section) of every row, such as ("SHIFT", "§4.3.2")."""
    return {
        (key, section) for key, cells in rows(text) for section in ROW_SECTION.findall(cells[0])
    }


def mark_faults(name: str, text: str, listed: set[tuple[str, str]]) -> list[str]:
    """The faults of the marks `Paper: KEY §n` in the file `name` that holds `text`."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (mark := MARK.search(line)):
            continue
        reference = REFERENCE.match(mark[1])
        if reference is None:
            faults.append(f"{name}:{number}: expected `Paper: KEY §n`, got {mark[0]!r}")
        elif (reference[1], reference[2]) not in listed:
            where = f"{reference[1]} {reference[2]}"
            faults.append(f"{name}:{number}: docs/papers.md has no row for {where}")
    return faults


def sources() -> list[Path]:
    """The files that may hold marks."""
    patterns = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu", "torch_resilient/**/*.py")
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


def test_the_link_check_finds() -> None:
    text = "[a](no/such.md#part) [b](https://example.org) [c](#here-it-is) ![d](gone.svg)\n"
    text += "```\n[e](not_a_link.md)\n```\n## Here: it is\n[f](#there)\n"
    text += "[g](docs/options.md#site) [h](docs/options.md#no-such-option)\n"
    broken = ["no/such.md#part", "gone.svg", "#there", "docs/options.md#no-such-option"]
    assert broken_links(ROOT / "README.md", text) == broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_documents_exist(document: Path) -> None:
    """The paths in code spans: `csrc/...`, `tests/...` and so on, `a.{h,cpp}` for several."""
    missing = []
    for span in CODE_SPAN.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if not re.fullmatch(
            r"(csrc|tests|torch_resilient|examples|docs|benchmarks)/[\w./{},]*", span
        ):
            continue
        stem, brace, endings = span.partition("{")
        names = [stem + ending for ending in endings.rstrip("}").split(",")] if brace else [span]
        missing += [name for name in names if not (ROOT / name).exists()]
    assert missing == []


def test_the_papers_have_rows_with_a_known_state() -> None:
    found = list(rows(PAPERS.read_text(encoding="utf-8")))
    assert {key for key, _ in found} == {"PIPEMORPH", "ATLAS", "BUBBLETEA", "SHIFT", "SMART"}
    for key, cells in found:
        assert len(cells) == 5, (key, cells)
        state, code = cells[2], cells[3]
        assert state.startswith(STATES), (key, cells[0], state)
        # The row of an existing feature names its code.
        if state.startswith(("yes", "other")):
            assert code, (key, cells[0])


def test_marks_in_the_code_have_a_row() -> None:
    listed = listed_sections(PAPERS.read_text(encoding="utf-8"))
    faults = []
    marks = 0
    for path in sources():
        text = path.read_text(encoding="utf-8")
        marks += len(MARK.findall(text))
        faults += mark_faults(str(path.relative_to(ROOT)), text, listed)
    assert faults == []
    assert marks > 0, "no mark was found: does the check look in the right place?"


def test_the_mark_check_finds() -> None:
    listed = {("SHIFT", "§4.3.2")}
    text = "// Paper: SHIFT §4.3.2, step 1\n// Paper: SHIFT §4.3\n# Paper: see there\n"
    faults = mark_faults("a.cpp", text, listed)
    assert [fault.split(":")[1] for fault in faults] == ["2", "3"]


def strings_of_cpp(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string literal; `#include` has none."""
    text = re.sub(r"^#include.*$", "", text, flags=re.MULTILINE)
    for token in CPP_TOKEN.finditer(text):
        if token[1]:
            yield text.count("\n", 0, token.start()) + 1, token[1]


def strings_of_python(text: str, help_too: bool) -> Iterator[tuple[int, str]]:
    """(line, text) of each string, of docstrings only if `help_too`."""
    tree = ast.parse(text)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
    for node in ast.walk(tree):
        if node in docstrings and not help_too:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_texts_of_the_program_name_no_file_that_a_wheel_lacks() -> None:
    """Errors, warnings and help; docstrings are help in the commands and in the public modules."""
    found = []
    for path in sources():
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        if name.startswith("csrc/tests/"):
            continue
        if path.suffix == ".py":
            public = name.startswith("torch_resilient/cli/") or name.count("/") == 1
            strings = strings_of_python(text, public and not path.name.startswith("_"))
        else:
            strings = strings_of_cpp(text)
        found += [f"{name}:{line}: {each}" for line, each in strings if OF_THE_SOURCE.search(each)]
    table = ROOT / "csrc" / "base" / "options.def"
    for line, each in strings_of_cpp(table.read_text(encoding="utf-8")):
        if OF_THE_SOURCE.search(each):
            found.append(f"options.def:{line}: {each}")
    assert found == []


def test_the_check_of_texts_finds() -> None:
    cpp = """#include "docs/a.h"
    // see "docs/b.md"
    warn('"', "see docs/c.md", "a \\"docs/d.md\\"");
    """
    assert [line for line, each in strings_of_cpp(cpp) if OF_THE_SOURCE.search(each)] == [3, 3]
    python = '''"""See docs/a.md."""\n# docs/b.md\nfail(f"{x}: see docs/c.md")\n'''
    for help_too, lines in ((True, [1, 3]), (False, [3])):
        strings = strings_of_python(python, help_too)
        assert [line for line, each in strings if OF_THE_SOURCE.search(each)] == lines


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_pictures_have_one_style_and_fit_a_page(image: Path) -> None:
    text = image.read_text(encoding="utf-8")
    assert picture.STYLE in text
    root = ElementTree.fromstring(text)
    assert int(root.attrib["width"]) <= picture.WIDTH


def test_variables_named_in_documents_exist() -> None:
    options = set(VARIABLE.findall((ROOT / "docs" / "options.md").read_text(encoding="utf-8")))
    assert "TORCH_RESILIENT_LOG_LEVEL" in options
    unknown = {
        f"{document.name}: {name}"
        for document in DOCUMENTS
        for name in VARIABLE.findall(document.read_text(encoding="utf-8"))
        if name not in options
    }
    assert unknown == set()


def test_the_tests_of_works_with_exist() -> None:
    text = (ROOT / "docs" / "works-with.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", text)
    program = (ROOT / "tests" / "test_frameworks.py").read_text(encoding="utf-8")
    missing = [name for name in named if f"\ndef {name}(" not in program]
    assert named
    assert missing == []
