"""A CUDA device that is not there: tensors on it have a shape, a dtype and a device, and no numbers.

Host tensors stay real, and everything on `DEVICE` is one of PyTorch's fake tensors. So a whole step can be run where
there is no GPU, as far as it does not look at a number; where it does, on a GPU the host would wait for the device, and
here that is noted.

PyTorch's own engine of backward passes asks the device for its streams, so the graph is walked here (`run_backward`).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)
PRODUCTS = {"mm": 0, "addmm": 1, "rewardlab::summed_product": 0, "rewardlab::product_with_adapter": 0}
"""What F.linear becomes, with what an adapter adds too, and which of its arguments is the left factor."""
INDEXED = ("index", "index_put", "index_put_", "_unsafe_index")
WITHOUT_WORK = {
    *("_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "reshape"),
    *("select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "prim::device"),
}
"""Operations that start nothing on a device: views, and memory that is not filled."""
PINNED = "pinned_here"
REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
CUDA_SLOT, META_SLOT = 1, 14
"""Numbers of c10::DeviceType."""


class FakeCuda(TorchDispatchMode):
    """Notes what a step does with the device; a mixture of devices and a shape that depends on numbers raise."""

    supports_higher_order_operators = True
    """FlexAttention is one."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        """Where the host would wait for the device: `what in function of module`, of the package's own code."""
        self.copies = 0
        """Tensors sent to the device."""
        self.products: Counter[tuple[torch.dtype, bool]] = Counter()
        """Matrix products of linear layers by the dtype of their factors, and whether one factor is a vector, as the
        head's is."""
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> FakeCuda:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.calls[func.name()] += 1
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        assert target is None or torch.device(target).type != "meta", "a device without an index"
        to_device = target is not None and torch.device(target).type == "cuda"
        if not to_device and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # the host's own work is real
                return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        self.calls[name] += 1
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] :][:2]
            assert left.dtype == right.dtype
            self.products[left.dtype, 1 in (*left.shape, *right.shape)] += 1
        return self._noting_waits(name, func, tensors, args, kwargs)

    def _noting_waits(self, name: str, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if name == "_local_scalar_dense":
            self.note("a number read")
            with unset_fake_temporarily():
                return torch.ones((), dtype=args[0].dtype).item()
        if name in ("_to_copy", "copy_"):
            source = args[0] if name == "_to_copy" else args[1]
            target = torch.device(kwargs.get("device") or args[0].device)
            if (source.device.type, target.type) == ("cuda", "cpu"):
                self.note("a copy to the host")
                with unset_fake_temporarily():
                    return torch.ones(source.shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if (source.device.type, target.type) == ("cpu", "cuda"):
                self.copies += 1
                non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
                if not (non_blocking and getattr(source, PINNED, False)):
                    self.note("a copy from pageable memory")
        elif name in INDEXED and any(tensor.ndim for tensor in on_host):
            self.note("an index on the host")
        elif func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # which the fake tensors of torch 2.11 do not know
        return func(*args, **kwargs)

    def started(self) -> int:
        """How many operations have started work on the device so far."""
        return sum(count for name, count in self.calls.items() if name not in WITHOUT_WORK)

    def put(self, module: nn.Module) -> None:
        """Move a module to DEVICE, in place, and forget what that took."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(parameter.detach().to(DEVICE), parameter.requires_grad)
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(DEVICE)
        self.waits, self.copies = [], 0
        self.products.clear()
        self.calls.clear()

    def note(self, what: str) -> None:
        """Note a wait, with the innermost function of the package that asks for it."""
        asker = frame = sys._getframe(1)
        while frame is not None and "/rewardlab/" not in frame.f_code.co_filename:
            frame = frame.f_back
        code = (frame or asker).f_code
        self.waits.append(f"{what} in {code.co_name} of {Path(code.co_filename).stem}")

    def to_list(self, tensor: Tensor) -> Any:
        """In place of FakeTensor.tolist: one wait, and a one for each number."""
        self.note("a number read")
        return torch.ones(tensor.shape, dtype=torch.float64).tolist()


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Meanwhile there is a fake DEVICE, whose autocast computes in bf16."""
    device = FakeCuda()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_guarded())
        for target, name, value in (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (torch.Tensor, "pin_memory", _pinned),
            (torch.autograd, "backward", run_backward),
            # What a checkpoint computes again belongs to one backward pass, whose number this is.
            (torch._C, "_current_graph_task_id", lambda: 1),
            (FakeTensor, "tolist", device.to_list),
        ):
            stack.enter_context(mock.patch.object(target, name, _as_method(value) if target is FakeTensor else value))
        stack.enter_context(device)
        yield device


def run_backward(root: Tensor) -> None:
    """What torch.autograd.backward does to a scalar, one node after the other.

    A gradient that is not on the device of what it belongs to raises; like PyTorch's engine it sums a gradient over
    what was broadcast and casts it to the dtype of what it belongs to.
    """
    assert root.grad_fn is not None
    waiting = _count_edges(root.grad_fn)
    gradients: defaultdict[Any, dict[int, Tensor]] = defaultdict(dict)
    gradients[root.grad_fn][root.output_nr] = torch.ones_like(root)
    ready = [root.grad_fn]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            given = gradients.pop(node, {})
            for (follower, number), gradient in zip(node.next_functions, _apply(node, given), strict=False):
                if follower is None:
                    continue
                if gradient is not None:
                    fitted, held = _fit(gradient, follower._input_metadata[number]), gradients[follower]
                    held[number] = held[number] + fitted if number in held else fitted
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready.append(follower)


def _count_edges(start: Any) -> Counter[Any]:
    edges: Counter[Any] = Counter()
    left, seen = [start], {start}
    while left:
        for follower, _ in left.pop().next_functions:
            if follower is None:
                continue
            edges[follower] += 1
            if follower not in seen:
                seen.add(follower)
                left.append(follower)
    return edges


def _apply(node: Any, given: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    if hasattr(node, "variable"):
        for gradient in given.values():
            leaf = node.variable
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return ()
    inputs = [given.get(number) for number in range(len(node._input_metadata))]
    if not given:
        return (None,) * len(node.next_functions)
    if isinstance(node, BackwardCFunction):  # written in Python: it does not expect that nothing is handed to it
        found = node.apply(
            *(
                torch.zeros(of.shape, dtype=of.dtype, device=of.device) if one is None else one
                for one, of in zip(inputs, node._input_metadata, strict=True)
            )
        )
        found = found if isinstance(found, tuple) else (found,)
        # It returns something for every argument, while the followers are of those that are tensors.
        wanted = iter([one for one, needed in zip(found, node.needs_input_grad, strict=False) if needed])
        return tuple(None if follower is None else next(wanted) for follower, _ in node.next_functions)
    found = node(*inputs)
    return found if isinstance(found, tuple) else (found,)


def _fit(gradient: Tensor, belongs_to: Any) -> Tensor:
    assert gradient.device == belongs_to.device, f"a gradient on {gradient.device} of something on {belongs_to.device}"
    shape = tuple(belongs_to.shape)
    return (gradient if tuple(gradient.shape) == shape else gradient.sum_to_size(shape)).to(belongs_to.dtype)


def _pinned(tensor: Tensor, *_: Any) -> Tensor:
    found = tensor.clone()
    setattr(found, PINNED, True)
    return found


def _as_method(function: Any) -> Any:
    return lambda tensor: function(tensor)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Autograd wants to know streams of a device. PyTorch puts a guard that has none in place of a GPU's where a build
    for CUDA finds no GPU; in builds without CUDA the guard of fake tensors' own device stands in.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    if sys.platform != "linux":
        pytest.skip("a PyTorch without CUDA is made to know the device on Linux alone")
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * (META_SLOT + 1)).in_dll(library, REGISTRY)
    before, registry[CUDA_SLOT] = registry[CUDA_SLOT], registry[META_SLOT]
    try:
        yield
    finally:
        registry[CUDA_SLOT] = before
