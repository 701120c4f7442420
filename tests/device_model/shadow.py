"""A simulated device: CPU tensors are labelled as the device's, and its objections recorded.

A storage is labelled when it is made on, or copied to, a CUDA device (seen by a function mode), or
by an operation on labelled tensors (seen by a dispatch mode); every other one is the host's. Values
are computed on the CPU either way. Recorded are, in the threads that are watched:

- errors: operations on tensors of both places, tensors of the host in collectives and messages,
  barriers without a device, `.numpy()` of a device's tensor.
- waits: the host waits until the device has done all that was queued before.
- blocking copies: from pageable memory to the device; the host waits for the copy itself.
- object collectives: pickled, in two messages, with a wait in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mimo.engines.megatron.cpu import CudaToCpu
from tests.device_model.events import Record, frames

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")

# Their results have as many elements as the values say.
_DATA_DEPENDENT = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


class Labels:
    """Storages of the device, and pinned ones of the host, by weak references.

    A weak reference keeps a storage's identity from being reused.
    """

    def __init__(self) -> None:
        self._device: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self._purge_at = 10_000

    @staticmethod
    def key(tensor: Tensor) -> int:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata

    def on_device(self, tensor: Tensor) -> bool:
        return self.key(tensor) in self._device

    def pinned(self, tensor: Tensor) -> bool:
        return self.key(tensor) in self._pinned

    def pin(self, tensor: Tensor) -> None:
        self._add(self._pinned, tensor)

    def put(self, tensor: Tensor, on_device: bool) -> None:
        """Label the storage of a tensor that was just made."""
        if on_device:
            self._add(self._device, tensor)
        else:
            self._device.pop(self.key(tensor), None)

    def _add(self, known: dict[int, StorageWeakRef], tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            known[self.key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        if len(known) > self._purge_at:
            for key in [key for key, storage in known.items() if storage.expired()]:
                del known[key]
            self._purge_at = max(self._purge_at, 2 * len(known))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Operations(TorchDispatchMode):
    """Checks the inputs of every operation, of a backward too, and labels its results."""

    def __init__(self, labels: Labels, record: Record) -> None:
        super().__init__()
        self.labels, self.record = labels, record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        on_device = [self.labels.on_device(tensor) for tensor in inputs]
        name = func._schema.name
        if name.startswith("c10d::"):
            self._check_collective(name, func, args, on_device)
            return func(*args, **kwargs)
        if not any(on_device):
            return func(*args, **kwargs)
        self._check(name, args, kwargs, inputs, on_device)
        known = {self.labels.key(tensor) for tensor in inputs}
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            if self.labels.key(tensor) not in known:
                self.labels.put(tensor, on_device=True)
        return out

    def _check(self, name, args, kwargs, inputs: list[Tensor], on_device: list[bool]) -> None:
        note = self.record.note
        if name == "aten::_local_scalar_dense":
            note("wait", ".item()")
        elif name == "aten::equal":
            note("wait", "torch.equal")
        elif name in _DATA_DEPENDENT:
            note("wait", f"data-dependent shape of {name}")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            note("wait", f"data-dependent shape of {name} without output_size")
        elif name in ("aten::copy_", "aten::_foreach_copy_"):
            for to, source in zip(_tensors(args[0]), _tensors(args[1]), strict=True):
                self._check_copy(to, source, non_blocking=any(a is True for a in args[2:]))
        elif name in _INDEXING:
            self._check_index(name, args)
        # A tensor of the host without dims is a number, which may take part anywhere.
        elif any(t.dim() and not placed for t, placed in zip(inputs, on_device, strict=True)):
            note("error", f"tensors of host and device in {name}")

    def _check_copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        to_device = self.labels.on_device(to)
        if to_device == self.labels.on_device(source) or not source.numel():
            return
        if non_blocking and self.labels.pinned(source if to_device else to):
            return
        if not to_device:
            self.record.note("wait", "copy_ to the host")
        elif source.dim():  # a number travels with the kernel that fills the tensor
            self.record.note("blocking copy", "copy_ from the host")

    def _check_index(self, name: str, args: Any) -> None:
        values = [t for t in (args[0], *args[2:3]) if isinstance(t, Tensor) and t.dim()]
        if not all(map(self.labels.on_device, values)):
            self.record.note("error", f"tensors of host and device in {name}")
        for index in _tensors(args[1]):
            if not self.labels.on_device(index):
                self.record.note("blocking copy", f"index on the host in {name}")
            fills = name != "aten::index" and args[2].numel() == 1
            if index.dtype in (torch.bool, torch.uint8) and not fills:
                self.record.note("wait", f"data-dependent shape of a mask in {name}")

    def _check_collective(self, name: str, func: Any, args: Any, on_device: list[bool]) -> None:
        calls = {f.f_code.co_name for f in frames() if "distributed_c10d" in f.f_code.co_filename}
        if name == "c10d::barrier":
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            if not named.get("device_ids"):
                self.record.note("error", "a barrier without device_ids")
        elif objects := calls & _OBJECT_COLLECTIVES:
            self.record.note("object collective", objects.pop())
        elif not all(on_device):
            self.record.note("error", f"a tensor of the host in {name}")


class ShadowDevice(CudaToCpu):
    """Stands for a GPU: pass it to `install`, then call `watch`. record: the events so far."""

    device = CUDA

    def __init__(self) -> None:
        super().__init__()
        self.labels, self.record = Labels(), Record()
        get: Any = torch.Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            get.device.__get__: self._device_of,
            get.is_cuda.__get__: self.labels.on_device,
            get.to: self._to,
            get.cuda: self._cuda,
            get.cpu: lambda tensor, **_: self._move(tensor, to_device=False),
            get.pin_memory: self._pin,
            get.is_pinned: lambda tensor, *a: self.labels.pinned(tensor),
            get.tolist: self._tolist,
            get.numpy: self._numpy,
            get.__array__: self._numpy,
            get.__deepcopy__: self._deepcopy,
            get.backward: self._backward,
            torch.autograd.backward: lambda tensors, grad_tensors=None, *args, **kwargs: (
                self._backward(tensors, grad_tensors, *args, **kwargs)
            ),
        }

    def watch(self) -> None:
        """Label and check every operation of this thread from now on."""
        _Operations(self.labels, self.record).__enter__()
        work: Any = dist.Work
        wait = work.wait

        def wait_unwatched(*args: Any) -> Any:
            # Gloo finishes some collectives in it, by copies from its memory.
            with _disable_current_modes():
                return wait(*args)

        work.wait = wait_unwatched

    def place(self, tensor: Tensor) -> Tensor:
        """Return a copy on the device, in threads that are not watched."""
        placed = tensor.clone()
        self.labels.put(placed, on_device=True)
        return placed

    def synchronize(self, device: Any = None) -> None:
        """Stand in for `torch.cuda.synchronize`."""
        self.record.note("wait", "torch.cuda.synchronize")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = self._answers.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        out = super().__torch_function__(func, types, args, kwargs)
        if kwargs.get("pin_memory"):
            self.labels.pin(cast("Tensor", out))
        place = kwargs.get("device")
        if place is None or torch.device(place).type == "meta":
            return out
        on_device = torch.device(place).type == "cuda"
        for tensor in _tensors(out):
            if on_device and not self.labels.on_device(tensor) and func in _FROM_VALUES:
                self.record.note("blocking copy", f"{func.__name__}(..., device)")
            self.labels.put(tensor, on_device)
        return out

    def _cuda(self, tensor: Tensor, device: object = None, non_blocking: bool = False, **unused):
        return self._move(tensor, to_device=True, non_blocking=non_blocking)

    def _device_of(self, tensor: Tensor) -> torch.device:
        return CUDA if self.labels.on_device(tensor) else _REAL_DEVICE(tensor)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rest, device, dtype = list(args), kwargs.pop("device", None), kwargs.pop("dtype", None)
        other = kwargs.pop("other", None)
        for arg in rest:
            if isinstance(arg, str | torch.device):
                device = arg
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, Tensor):
                other = arg
        flags = [arg for arg in rest if isinstance(arg, bool)]
        non_blocking = kwargs.pop("non_blocking", flags[0] if flags else False)
        copy = kwargs.pop("copy", flags[1] if len(flags) > 1 else False)
        if other is not None:
            device, dtype = self._device_of(other), other.dtype
        if device is not None and torch.device(device).type == "meta":
            return tensor.to(device, dtype, copy=copy, **kwargs)
        dtype = dtype or tensor.dtype
        on_device = self.labels.on_device(tensor)
        to_device = on_device if device is None else torch.device(device).type == "cuda"
        if to_device == on_device:
            return tensor.to(dtype, copy=copy, **kwargs)
        # Between devices the cast comes first; its result is not pinned.
        return self._move(tensor.to(dtype, **kwargs), to_device, non_blocking)

    def _move(self, tensor: Tensor, to_device: bool, non_blocking: bool = False) -> Tensor:
        if self.labels.on_device(tensor) == to_device:
            return tensor
        if tensor.numel() and not to_device:
            self.record.note("wait", "a copy to the host")
        elif tensor.numel() and not (non_blocking and self.labels.pinned(tensor)):
            self.record.note("blocking copy", "a copy to the device")
        moved = tensor.clone()
        self.labels.put(moved, to_device)
        return moved

    def _pin(self, tensor: Tensor, *args: Any) -> Tensor:
        if self.labels.on_device(tensor):
            self.record.note("error", "pin_memory of a device's tensor")
        pinned = tensor.clone()
        self.labels.pin(pinned)
        return pinned

    def _tolist(self, tensor: Tensor) -> Any:
        if self.labels.on_device(tensor):
            self.record.note("wait", ".tolist()")
        return tensor.tolist()

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.labels.on_device(tensor):
            self.record.note("error", ".numpy() of a device's tensor")
        return tensor.numpy(**kwargs)

    def _deepcopy(self, tensor: Tensor, memo: Any) -> Tensor:
        copied = tensor.__deepcopy__(memo)
        self.labels.put(copied, self.labels.on_device(tensor))
        return copied

    def _backward(
        self,
        tensors: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        **unused: Any,
    ) -> None:
        """`torch.autograd.backward`, which would take this mode off for the whole backward."""
        from torch.autograd import _make_grads, _tensor_or_tensors_to_tuple
        from torch.autograd.graph import _engine_run_backward

        assert not any(unused.values()), f"not supported here: {unused}"
        outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        slopes = _tensor_or_tensors_to_tuple(gradient, len(outputs))
        gradients = _make_grads(outputs, slopes, is_grads_batched=False)
        with self:
            _engine_run_backward(
                outputs,
                gradients,
                create_graph if retain_graph is None else retain_graph,
                create_graph,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


# Bound before any mode is on; the values of these functions come from the host.
_REAL_DEVICE = torch.Tensor.device.__get__
_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


def pose_as_device() -> Record:
    """Simulate a GPU in this process, before anything of Megatron is built -> its events."""
    import mimo.device
    from mimo.engines.megatron.cpu import install

    shadow = ShadowDevice()
    install(shadow)
    mimo.device.DEVICE_WITHOUT_GPU = CUDA
    # Staged tensors arrive in a background thread, which is not watched.
    staging: Any = mimo.device.Staging
    staging.copy = lambda self, tensor: shadow.place(tensor)
    staging.join = lambda self, parts: shadow.place(torch.cat(list(parts)))
    shadow.watch()
    return shadow.record
