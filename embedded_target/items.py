"""Functions and classes of the running interpreter's standard library, read with `ast`.

The embedded target needs a text corpus that every machine already has. The standard library is one: thousands of
documented functions under a free licence. Nothing is imported; files are only parsed. Code is normalised with
`ast.unparse` (no comments, one quoting style), because a small model learns regular text far sooner.

The corpus depends on the interpreter's minor version; everything else is deterministic (sorted paths, source order).
"""

from __future__ import annotations

import ast
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

SKIPPED_FOLDERS = {
    "__pycache__",
    "config",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
MAX_SOURCE_LINES = 80  # longer ones are rarely asked about, and take most of the generation time
MAX_NAMES = 6
MAX_EXPRESSION_CHARS = 60

NodeT = TypeVar("NodeT", ast.Call, ast.Return, ast.Raise)


@dataclass(frozen=True)
class Argument:
    """One parameter as written: `name` carries its stars, `default` and `annotation` are source text or None."""

    name: str
    default: str | None = None
    annotation: str | None = None


@dataclass(frozen=True)
class StdlibItem:
    """One function, method or class.

    `source` is normalised, '' for classes and long functions; `body` is the same without the docstring, '' when
    nothing is left.
    """

    module: str
    qualname: str
    kind: str
    arguments: tuple[Argument, ...]
    docstring: str
    source: str
    body: str
    calls: tuple[str, ...]
    returns: tuple[str, ...]
    raises: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.qualname.rsplit(".", 1)[-1]

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.qualname.split("."))

    @property
    def signature(self) -> str:
        """`name(a, b=None)`, without annotations."""
        shown = (a.name if a.default is None else f"{a.name}={a.default}" for a in self.arguments)
        return f"{self.name}({', '.join(shown)})"

    @property
    def line_count(self) -> int:
        return self.source.count("\n") + 1


@lru_cache(maxsize=2)
def stdlib_items(folder: Path | None = None) -> tuple[StdlibItem, ...]:
    """Return every ASCII-only item of the public modules under `folder` (default: this interpreter's library)."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    items: list[StdlibItem] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(("_", "config-")) for part in parts[:-1]):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if not parts or parts[-1].startswith("_"):
            continue
        items.extend(_module_items(".".join(parts), path))
    return tuple(items)


def _module_items(module: str, path: Path) -> Iterator[StdlibItem]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return  # some distributions ship files for other interpreters
    is_plain = text.isascii() and not re.search(r"\\[uUxN0-7]", text)
    seen: set[str] = set()
    for qualname, kind, node in _definitions(tree.body):
        if qualname in seen:
            continue
        seen.add(qualname)
        if is_plain or _is_ascii(node):
            yield _item(module, qualname, kind, node)


def _is_ascii(node: ast.AST) -> bool:
    texts = (
        child.value for child in ast.walk(node) if isinstance(child, ast.Constant) and isinstance(child.value, str)
    )
    return all(repr(text).isascii() for text in texts)


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, str, ast.FunctionDef | ast.ClassDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, "function", node
        elif isinstance(node, ast.ClassDef):
            yield node.name, "class", node
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    yield f"{node.name}.{child.name}", "method", child


def _item(module: str, qualname: str, kind: str, node: ast.FunctionDef | ast.ClassDef) -> StdlibItem:
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    function = node if isinstance(node, ast.FunctionDef) else None
    is_long = (node.end_lineno or 0) - node.lineno >= MAX_SOURCE_LINES
    source = "" if function is None or is_long else ast.unparse(node)
    inner = [child for statement in node.body for child in ast.walk(statement)] if source else []
    body = source
    if docstring and source:
        rest = node.body[1:]
        body = ast.unparse(_with_body(node, rest)) if rest else ""
    return StdlibItem(
        module=module,
        qualname=qualname,
        kind=kind,
        arguments=_arguments(function.args) if function else (),
        docstring=docstring,
        source=source,
        body=body,
        calls=_calls(inner),
        returns=_returns(inner),
        raises=_raises(inner),
    )


def _with_body(node: ast.FunctionDef | ast.ClassDef, body: list[ast.stmt]) -> ast.stmt:
    fields = {name: getattr(node, name) for name in node._fields}
    fields["body"] = body
    return ast.copy_location(type(node)(**fields), node)


def _arguments(args: ast.arguments) -> tuple[Argument, ...]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    arguments = [_argument("", arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if args.vararg:
        arguments.append(_argument("*", args.vararg, None))
    arguments += [_argument("", arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        arguments.append(_argument("**", args.kwarg, None))
    return tuple(arguments)


def _argument(stars: str, arg: ast.arg, default: ast.expr | None) -> Argument:
    return Argument(
        name=stars + arg.arg,
        default=None if default is None else ast.unparse(default),
        annotation=None if arg.annotation is None else ast.unparse(arg.annotation),
    )


def _in_source_order(inner: list[ast.AST], kind: type[NodeT]) -> list[NodeT]:
    nodes = [child for child in inner if isinstance(child, kind)]
    return sorted(nodes, key=lambda child: (child.lineno, child.col_offset))


def _short_unique(texts: Iterator[str]) -> tuple[str, ...]:
    unique = dict.fromkeys(text for text in texts if len(text) <= MAX_EXPRESSION_CHARS and "\n" not in text)
    return tuple(unique)[:MAX_NAMES]


def _calls(inner: list[ast.AST]) -> tuple[str, ...]:
    def is_dotted(func: ast.expr) -> bool:
        while isinstance(func, ast.Attribute):
            func = func.value
        return isinstance(func, ast.Name)

    return _short_unique(ast.unparse(c.func) for c in _in_source_order(inner, ast.Call) if is_dotted(c.func))


def _returns(inner: list[ast.AST]) -> tuple[str, ...]:
    return _short_unique(ast.unparse(r.value) for r in _in_source_order(inner, ast.Return) if r.value is not None)


def _raises(inner: list[ast.AST]) -> tuple[str, ...]:
    raised = (r.exc for r in _in_source_order(inner, ast.Raise) if r.exc is not None)
    return _short_unique(ast.unparse(exc.func if isinstance(exc, ast.Call) else exc) for exc in raised)
