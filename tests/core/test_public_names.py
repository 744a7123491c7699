"""Public names of `import draftsmith`."""

import subprocess
import sys

import pytest

import draftsmith


def test_every_public_name_exists() -> None:
    found = {name: getattr(draftsmith, name) for name in draftsmith.__all__}
    assert {name: value.__name__ for name, value in found.items() if name != "__version__"} == {
        name: name for name in found if name != "__version__"
    }
    assert isinstance(found["__version__"], str)
    with pytest.raises(AttributeError, match="module 'draftsmith' has no attribute 'load_everything'"):
        draftsmith.load_everything  # noqa: B018


def test_importing_draftsmith_does_not_import_torch() -> None:
    code = "import sys, draftsmith; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'yaml')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
