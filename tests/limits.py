"""Print the size of the code and fail above its limits: `python -m tests.limits`.

An issue that adds a feature raises a limit by the allowance that it states, never by more.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("mimo", "bridge", "data", "encoders", "generators")
# 40,000 source lines, 28,000 lines of code and 42,000 test lines; an allowance for models of
# transformers of 1,500, 1,500 and 3,000; one for generators of 2,800, 2,200 and 5,000; one for
# hybrid layers and experts of 2,600, 2,100 and 5,200; one for plans before a job of 2,200, 1,800
# and 2,500.
LIMITS = {
    "source lines": 49_100,
    "source lines of code": 35_600,
    "source files": 265,
    "test lines": 57_700,
    "entries of mimo": 19,
    "README lines": 150,
}

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return the sizes that `LIMITS` bounds, by the same names."""
    sources = [
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in (root / folder).rglob("*.py")
    ]
    tests = [path.read_text(encoding="utf-8") for path in (root / "tests").rglob("*.py")]
    entries = [path for path in (root / "mimo").iterdir() if path.name != "__pycache__"]
    return {
        "source lines": sum(text.count("\n") for text in sources),
        "source lines of code": sum(map(count_code_lines, sources)),
        "source files": len(sources),
        "test lines": sum(text.count("\n") for text in tests),
        "entries of mimo": len(entries),
        "README lines": (root / "README.md").read_text(encoding="utf-8").count("\n"),
    }


def count_code_lines(text: str) -> int:
    """Count the lines of a module that are neither blank, comment nor docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def main() -> int:
    """Print each size beside its limit; return 1 if one is above."""
    sizes = measure()
    for name, limit in LIMITS.items():
        mark = "" if sizes[name] <= limit else "  TOO MANY"
        print(f"{name:22}{sizes[name]:>8,} of {limit:,}{mark}")
    return int(any(sizes[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
