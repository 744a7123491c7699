"""vLLM's newer runner without a GPU: Triton's own interpreter runs its kernels. Put this folder on PYTHONPATH.

The runner supports CPUs with a Triton that has a CPU backend. PyPI's has none, but TRITON_INTERPRET=1 runs every kernel
as Python; vLLM only needs to find a backend of that name (vllm/triton_utils/importing.py). Compilers accept masks of
integers, but the interpreter needs booleans.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


class After(importlib.abc.MetaPathFinder):
    """Import hook that changes a module after its import."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: object, target: object = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def with_a_cpu_backend(backends: Any) -> None:
    """Add a backend that claims to be active and compiles nothing."""
    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def with_boolean_masks(interpreter: Any) -> None:
    """Convert masks to booleans, as loads and stores of the interpreter need."""
    real = interpreter._interpreter

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return real.load(pointers, mask.astype(bool), other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        return real.store(pointers, value, mask.astype(bool))

    rest = {name: getattr(real, name) for name in dir(real) if not name.startswith("_")}
    interpreter._interpreter = SimpleNamespace(**(rest | {"load": load, "store": store}))


sys.meta_path[:0] = [
    After("triton.backends", with_a_cpu_backend),
    After("triton.runtime.interpreter", with_boolean_masks),
]
