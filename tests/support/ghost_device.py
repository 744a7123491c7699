"""A CUDA device for machines without one: tensors that say `cuda:0` and hold their values on the CPU.

Mixing devices raises, as on CUDA. Operations that would make the host wait or copy are counted with their line. No
CUDA kernel runs: speed and the kernels' behaviour are not tested.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
DEVICE_TYPES = {"cuda": 1, "meta": 14}  # c10/core/DeviceType.h
aten = torch.ops.aten
# Operations whose result's size or value the host needs.
WAITING = {
    aten._local_scalar_dense: "item", aten.nonzero: "nonzero", aten.masked_select: "masked_select",
    aten.bincount: "bincount", aten.equal: "equal", aten.unique_dim: "unique", aten._unique2: "unique",
    aten.repeat_interleave: "repeat_interleave", aten.multinomial: "multinomial",
}  # fmt: skip
# Operations that run nothing on the device.
NOT_LAUNCHED = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach, aten.alias,
    aten._local_scalar_dense, aten.lift_fresh, aten._fused_sdp_choice, aten.resize_, aten.set_, aten._unsafe_view,
}  # fmt: skip
# The name under which copies without a wait are counted.
NOT_WAITED_FOR = "copy, not waited for"
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class GhostTensor(Tensor):
    """Tensor that claims to be on CUDA. `held`: its values on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> GhostTensor:
        ghost = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CUDA
        )
        ghost.held = held
        return ghost

    def __repr__(self, **_: Any) -> str:
        return f"GhostTensor({self.held!r})"

    def tolist(self) -> Any:
        GhostDevice.note("back", "tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class GhostDevice(TorchDispatchMode):
    """Mode in which tensors made for CUDA are ghosts.

    counts: ("back" | "in" | "kernel" | "launch", what) to how often, while `counting`; `lines`: the same with the
    file's line. A launch is any operation that runs on the device, a kernel one of attention's.
    """

    counts: ClassVar[Counter[tuple[str, str]]] = Counter()
    lines: ClassVar[Counter[tuple[str, str, str]]] = Counter()
    counting: ClassVar[bool] = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @classmethod
    def note(cls, kind: str, what: str) -> None:
        if not cls.counting:
            return
        cls.counts[kind, what] += 1
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _in_repository(frame.f_code.co_filename) is None:
            frame = frame.f_back
        where = "?" if frame is None else f"{_in_repository(frame.f_code.co_filename)}:{frame.f_lineno}"
        cls.lines[kind, what, where] += 1

    @classmethod
    def of(cls, kind: str) -> int:
        """Return the total of `back`, `in`, `kernel` or `launch`."""
        return sum(count for (found, _), count in cls.counts.items() if found == kind)

    @classmethod
    def forget(cls) -> None:
        cls.counts.clear()
        cls.lines.clear()


@contextmanager
def ghost_device(capability: tuple[int, int] = (9, 0)) -> Iterator[type[GhostDevice]]:
    """Make `cuda` a ghost device of this compute capability within the context."""
    guards = _device_guards()
    guard_before, guards[DEVICE_TYPES["cuda"]] = guards[DEVICE_TYPES["cuda"]], guards[DEVICE_TYPES["meta"]]
    torch._C._set_only_lift_cpu_tensors(True)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    GhostDevice.forget()
    changes: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_: capability >= (8, 0),
        "synchronize": lambda *_: GhostDevice.note("back", "synchronize"), "current_stream": lambda *_: _Stream(),
        "Event": _Event,
    }  # fmt: skip
    try:
        with (
            mock.patch.multiple(torch.cuda, **changes),
            # Views of wrapped tensors cannot be made in inference mode.
            mock.patch.object(torch._C, "_InferenceMode", lambda mode: torch.set_grad_enabled(not mode)),
            GhostDevice(),
        ):
            yield GhostDevice
    finally:
        GhostDevice.counting = False
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        torch._C._set_only_lift_cpu_tensors(False)
        guards[DEVICE_TYPES["cuda"]] = guard_before


def _device_guards() -> Any:
    """Add an entry for CUDA to torch's table of device guards, which has none in builds without CUDA.

    It is the entry of meta tensors, which does nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


class _Stream:
    def synchronize(self) -> None:
        GhostDevice.note("wait", "stream")


class _Event:
    """Event of a device that finishes everything immediately."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = 0

    def record(self, *_: Any) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        GhostDevice.note("wait", "event")

    def elapsed_time(self, other: _Event) -> float:
        return 1.0


@cache
def _in_repository(file: str) -> Path | None:
    """Return the path of a file of this repository except this one, or None."""
    path = Path(file).resolve()
    is_ours = path.is_relative_to(ROOT) and ".venv" not in file and path != Path(__file__).resolve()
    return path.relative_to(ROOT) if is_ours else None


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GhostTensor) else value


def _each(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply `change` to all tensors of arguments or results; torch's tree functions take five times as long."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_each(part, change) for part in value])
    if isinstance(value, dict):
        return {key: _each(part, change) for key, part in value.items()}
    return value


def _on_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    packet = func._overloadpacket
    tensors: list[Tensor] = []
    _each((args, kwargs), tensors.append)
    has_ghosts = any(isinstance(tensor, GhostTensor) for tensor in tensors)
    if packet is aten._to_copy:
        return _copied(func, args[0], kwargs)
    if packet is aten.copy_:
        return _copy_into(func, args[0], args[1], args[2:], kwargs)
    if packet is aten._pin_memory or packet is aten.pin_memory:
        return args[0]
    options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    device = options.get("device")
    if device is not None:
        options["device"] = torch.device("cpu")
    to_cuda = has_ghosts if device is None else _on_cuda(device)
    if has_ghosts:
        _check_devices(func, packet, args, tensors)
        if packet in WAITING:
            GhostDevice.note("back", WAITING[packet])
    if (has_ghosts or to_cuda) and not (func.is_view or packet in NOT_LAUNCHED):
        GhostDevice.note("launch", packet.__name__)
    if (has_ghosts or to_cuda) and (kernel := _KERNELS.get(packet)):
        return kernel(args, options)
    out = func(*_each(args, _held), **_each(options, _held))
    if packet is aten._local_scalar_dense or not to_cuda:
        return out
    if not func._schema.is_mutable:
        return _each(out, GhostTensor)
    same = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, GhostTensor)}
    return _each(out, lambda held: same[id(held)] if id(held) in same else GhostTensor(held))


def _copied(func: Any, source: Tensor, kwargs: Any) -> Tensor:
    device = kwargs.get("device")
    options = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    was_ghost = isinstance(source, GhostTensor)
    becomes_ghost = was_ghost if device is None else _on_cuda(device)
    if was_ghost != becomes_ghost:
        waits = was_ghost or not kwargs.get("non_blocking")
        GhostDevice.note("in" if becomes_ghost else "back", "copy" if waits else NOT_WAITED_FOR)
    elif was_ghost:
        GhostDevice.note("launch", "_to_copy")
    out = func(_held(source), **options)
    return GhostTensor(out) if becomes_ghost else out


def _copy_into(func: Any, target: Tensor, source: Tensor, rest: Any, kwargs: Any) -> Tensor:
    if isinstance(target, GhostTensor) != isinstance(source, GhostTensor):
        waits = not isinstance(target, GhostTensor) or not (*rest, *kwargs.values(), False)[0]
        GhostDevice.note("in" if isinstance(target, GhostTensor) else "back", "copy_" if waits else NOT_WAITED_FOR)
    elif isinstance(target, GhostTensor):
        GhostDevice.note("launch", "copy_")
    func(_held(target), _held(source), *rest, **kwargs)
    return target


def _check_devices(func: Any, packet: Any, args: Any, tensors: list[Tensor]) -> None:
    """Raise if devices are mixed; scalars on the CPU are allowed, and indices, which are copied."""
    others = [tensor for tensor in tensors if not isinstance(tensor, GhostTensor) and tensor.dim() > 0]
    if packet in INDEXING:
        indices = [index for index in args[1] if index is not None]
        for index in indices:
            if index.dtype in (torch.bool, torch.uint8):
                GhostDevice.note("back", "boolean index")
            elif not isinstance(index, GhostTensor):
                GhostDevice.note("in", "index")
        others = [tensor for tensor in others if not any(tensor is index for index in indices)]
    if others and packet is not aten.set_:
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in others]
        raise RuntimeError(f"Expected all tensors to be on the same device: {func} was given {shapes} on the CPU")


def _with_defaults(given: Any, *defaults: Any) -> tuple[Any, ...]:
    """Return the last arguments of a call with the defaults that torch leaves out."""
    return *given, *defaults[len(given) :]


def _packed_flash(args: Any, options: Any) -> Any:
    """Run attention of concatenated documents, [T, H, Dh]; the host passes the length of the longest."""
    GhostDevice.note("kernel", "packed flash")
    parts, bounds = [_batched(part) for part in args[:3]], _held(args[3])
    mask = _packed_mask(parts[0], bounds, args[5], args[8], options)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *parts, args[7], False, attn_mask=mask, scale=options.get("scale")
    )
    state, unused = (GhostTensor(torch.empty(shape, dtype=torch.uint64)) for shape in (2, ()))
    return GhostTensor(out[0].transpose(0, 1).contiguous()), GhostTensor(lse[0]), state, unused, unused


def _packed_flash_backward(args: Any, options: Any) -> Any:
    GhostDevice.note("kernel", "packed flash backward")
    parts, lse, bounds = [_batched(part) for part in args[:5]], _held(args[5]), _held(args[6])
    mask = _packed_mask(parts[1], bounds, args[8], args[11], options)
    grads = _cpu_backward(parts, lse[None], args[10], False, options, mask)
    return tuple(GhostTensor(grad.held[0].transpose(0, 1).contiguous()) for grad in grads)


def _batched(part: Tensor) -> Tensor:
    """Return [1, H, T, Dh] of [T, H, Dh]."""
    return _held(part).transpose(0, 1).unsqueeze(0).contiguous()


class KeptTensors:
    """Stand-in for autograd's context, which needs a real device for its streams."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _packed_mask(q: Tensor, bounds: Tensor, longest: int, causal: bool, options: Any) -> Tensor:
    """Return the additive mask [T, T] of documents, causal or not, with the kernel's window."""
    if bounds.dtype != torch.int32 or bounds.diff().max() != longest:
        raise RuntimeError(f"the kernel got {longest} tokens at most in documents of {bounds.diff().tolist()}")
    place = torch.arange(q.shape[2], dtype=torch.int32)
    document, back = torch.searchsorted(bounds, place, right=True), place[:, None] - place
    hidden = (document[:, None] != document) | ((back < 0) & causal)
    if (left := options.get("window_size_left")) is not None:
        if not causal or options["window_size_right"] != 0:
            raise RuntimeError("a window to both sides is not what is trained")
        hidden |= back > left
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))


def _efficient(args: Any, options: Any) -> Any:
    GhostDevice.note("kernel", f"efficient {args[0].dtype}".replace("torch.", ""))
    q, k, v, bias = map(_held, args[:4])
    dropout, causal = _with_defaults(args[5:7], 0.0, False)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, attn_mask=bias, scale=options.get("scale")
    )
    padded = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=float("inf"))
    seed, offset = (GhostTensor(torch.empty((), dtype=torch.int64)) for _ in range(2))
    return GhostTensor(out), GhostTensor(padded), seed, offset


def _efficient_backward(args: Any, options: Any) -> Any:
    GhostDevice.note("kernel", "efficient backward")
    grad, q, k, v, _, out, lse = map(_held, args[:7])
    if lse.shape[2] % 32:
        raise RuntimeError("the kernel reads its log-sum-exp in blocks of 32 rows")
    tensors = [part.contiguous() for part in (grad, q, k, v, out)]
    return (
        *_cpu_backward(
            tensors, lse[..., : q.shape[2]].contiguous(), args[9], *_with_defaults(args[11:], False), options
        ),
        None,
    )


def _cpu_backward(
    tensors: list[Tensor],
    lse: Tensor,
    dropout: float,
    is_causal: bool,
    options: Any,
    attn_mask: Tensor | None = None,
) -> Any:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = backward(*tensors, lse, dropout, is_causal, attn_mask=attn_mask, scale=options.get("scale"))
    return tuple(GhostTensor(grad) for grad in grads)


_KERNELS = {
    aten._flash_attention_forward: _packed_flash,
    aten._flash_attention_backward: _packed_flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten._fused_sdp_choice: lambda args, options: 0,
}
