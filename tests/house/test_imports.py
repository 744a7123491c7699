"""Imports go one way between folders, and files have no circular imports."""

import ast
import re
import sys
import tomllib
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support.places import PACKAGES, ROOT, import_links

# A folder may import itself and the folders before it.
ORDER = [
    *["core", "recipes"],
    *["models/kernels", "models", "models/target", "models/groups", "models/decoding"],
    *["models/base", "models/drafters", "models/formats"],
    *["data/sources", "data/tokens", "data/engines", "data/distill", "data/card", "data"],
    *["train/processes", "train/features", "train/drafter", "train/plan"],
    *["train"],
    *["eval/trees", "eval/decoding", "eval/methods", "eval/bench", "eval/report"],
    *["eval/engines", "eval", "serve", "cli"],
]
# These may import less than the order allows: themselves and the named folders (`*`: with all subfolders).
ONLY = {
    "models/kernels": ["core"],
    "models": ["core", "recipes", "models/kernels"],
    "models/target": ["core", "recipes", "models/kernels", "models"],
    "models/groups": ["core", "recipes", "models/kernels", "models"],
    "models/decoding": ["core", "recipes", "models/kernels", "models", "models/target", "models/groups"],
    "eval/trees": ["core", "recipes", "models/kernels", "models", "models/decoding"],
    "eval/decoding": ["core", "recipes", "models*", "eval/trees"],
    "eval/methods": ["core", "recipes", "models*", "eval/trees", "eval/decoding"],
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "core" else parts
    return ".".join(["draftsmith", *(parts[:-1] if parts[-1] == "__init__" else parts)])


FILES = {module_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


def module_folder(module: str) -> str:
    return FILES[module].parent.relative_to(ROOT).as_posix()


def list_imports(module: str) -> set[str]:
    """Return the modules of draftsmith that this module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("draftsmith")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports are absolute"
            if node.module and node.module.partition(".")[0] == "draftsmith":
                names = {f"{node.module}.{name.name}" for name in node.names}
                found |= {name if name in FILES else node.module for name in names}
    assert found <= FILES.keys(), f"{module} imports what is not there"
    return found


@cache
def imports_by_module() -> dict[str, set[str]]:
    """Return the imports of every module; the root package imports its public names on first use."""
    return {module: list_imports(module) for module in FILES if module != "draftsmith"}


def test_folders_import_only_earlier_folders() -> None:
    wrong = []
    for module, others in imports_by_module().items():
        folder = module_folder(module)
        patterns = [folder, *ONLY.get(folder, ORDER)]
        allowed = [other for other in ORDER[: ORDER.index(folder) + 1] if any(fnmatch(other, p) for p in patterns)]
        wrong += [f"{module} imports {other}" for other in others if module_folder(other) not in allowed]
    assert wrong == []


def test_files_have_no_circular_imports() -> None:
    TopologicalSorter(imports_by_module()).prepare()  # CycleError names the circle


def test_every_folder_is_a_package_of_pyproject() -> None:
    """An unlisted folder would silently be missing in the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {module_folder(module) for module in FILES}
    names = {".".join(["draftsmith", *name.split("/")]).replace("draftsmith.core", "draftsmith") for name in folders}
    assert sorted(setuptools["packages"]) == sorted(names)


def test_links_for_type_checkers_exist() -> None:
    """mypy and pyright find `draftsmith.*` by links in `.typing` to the files of `core` and the other packages."""
    links = (link for link in (ROOT / ".typing" / "draftsmith").iterdir() if link.name != "__pycache__")
    assert {link.name: link.readlink().as_posix() for link in links} == import_links(ROOT)


def test_no_test_imports_another_test() -> None:
    """Shared helpers are in `tests/support`."""
    likely = re.compile(r"^ *(?:from|import) .*\btest(?:s\b|_)", re.MULTILINE)  # also in texts and comments
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")}
    for file in (file for file, text in texts.items() if likely.search(text)):
        for node in ast.walk(ast.parse(texts[file])):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            parts = {part for name in names for part in name.split(".")}
            assert "tests" not in parts, file
            assert not any(part.startswith("test_") for part in parts), file


def test_no_file_shadows_a_third_party_module() -> None:
    """A launched script's folder is first on sys.path: a `tokenize.py` there would break `import torch`."""
    names = {file.stem for file in FILES.values()} - {"__init__"}
    dependencies = {"torch", "transformers", "datasets", "tokenizers", "accelerate", "safetensors", "yaml", "jinja2"}
    assert names.isdisjoint(sys.stdlib_module_names | dependencies | {"rich", "openai", "tqdm"})
