"""Which tensors live on: what operations made and something still holds, by their storages."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Remembers the storage of everything that an operation returns inside the context, and how large it is."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return output

    def alive(self) -> dict[int, int]:
        """Bytes of each storage that something still holds, by its number."""
        gc.collect()
        return {number: size for number, (storage, size) in self._found.items() if not storage.expired()}
