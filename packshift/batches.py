"""A whole batch at once: gathered from the store in one go, and taken by the stock `default_collate` as it is.

DataLoader calls a dataset's `__getitems__` with the indices of a batch and hands what comes back to its collate function.
Here that is a `Batch`: a sequence of samples to everybody, and to `default_collate` a finished batch, which it recognises
by the type of its first sample.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from packshift.buffers import shared_pool
from packshift.record import bytes_of
from packshift.slots import SlotTensor, rebuild, reference_to, take_slot

Finish = Callable[[torch.Tensor], torch.Tensor]
"""Of a tensor over all of a batch's memory, makes the one to be returned."""


class BatchSample(tuple[torch.Tensor, int]):
    """One `(image, label)` of a batch; a tuple in every respect but its type."""

    __slots__ = ()


class Batch(Sequence[BatchSample]):
    """Samples that lie in one piece of memory.

    Behaves as a sequence of `(image, label)`, made as they are asked for; the images are views of the batch's memory.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64], finish: Finish) -> None:
        self._images = images
        self._labels = labels
        self._finish = finish
        self._parts: list[torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch_of, tuple(self.parts)

    @property
    def parts(self) -> list[torch.Tensor]:
        """What `default_collate` makes of it: images (B, C, H, W) uint8, channels last, and labels (B,) int64.

        In a worker a `SlotTensor` where there is a slot, sent as a reference, and an `InlineTensor`.
        """
        if self._parts is None:
            labels = torch.from_numpy(self._labels) if get_worker_info() is None else inline(self._labels)
            self._parts = [self._finish(torch.from_numpy(self._images)), labels]
        return list(self._parts)

    def __len__(self) -> int:
        return len(self._labels)

    @overload
    def __getitem__(self, index: int) -> BatchSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[BatchSample]: ...
    def __getitem__(self, index: int | slice) -> BatchSample | list[BatchSample]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return BatchSample((torch.from_numpy(self._images[index]), int(self._labels[index])))

    def __iter__(self) -> Iterator[BatchSample]:
        return map(BatchSample, zip(torch.from_numpy(self._images).unbind(), self._labels.tolist(), strict=True))

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]


def _batch_of(images: torch.Tensor, labels: torch.Tensor) -> Batch:
    return Batch(images.numpy(), labels.numpy(), _as_it_is)


def _collate_samples(batch: Sequence[Any], *, collate_fn_map: Any = None) -> list[Any]:
    """`default_collate` for a whole `Batch`, which is finished, and for other samples of ours, stacked part by part."""
    if isinstance(batch, Batch):
        parts = batch.parts
        return SentParts(parts) if type(parts[0]) is SlotTensor and type(parts[1]) is InlineTensor else parts
    return [_collate_part(part, collate_fn_map) for part in zip(*batch, strict=True)]


def _collate_part(part: tuple[Any, ...], collate_fn_map: Any) -> Any:
    first = part[0]
    if type(first) is torch.Tensor and first.device.type == "cpu" and all(same_kind(each, first) for each in part):
        place = place_for((len(part), *first.shape), first.dtype)
        torch.stack(part, out=place.tensor)
        return place.finish(place.tensor)
    return collate(part, collate_fn_map=collate_fn_map)


def same_kind(tensor: Any, other: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.shape == other.shape and tensor.dtype == other.dtype


default_collate_fn_map[BatchSample] = _collate_samples


class InlineTensor(torch.Tensor):
    """A tensor that travels to the parent inside the message, not as shared memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # what torch documents for "no __torch_function__", though it types the name as a method

    memory: tuple[NDArray[Any], int]
    """What this is a tensor over, and its address, where `inline` has made it."""

    @property
    def memory_as_made(self) -> NDArray[Any] | None:
        """What this is a tensor over, where that is all of it as `inline` has made it."""
        made: tuple[NDArray[Any] | None, int] = getattr(self, "memory", (None, 0))
        memory, address = made
        as_made = self.data_ptr() == address and self.is_contiguous()
        if memory is None or not as_made or self.shape != memory.shape:
            return None
        return memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(torch.Tensor)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def inline(memory: NDArray[Any]) -> InlineTensor:
    """A tensor over a flat array, sent without an operation of torch."""
    tensor = torch.from_numpy(memory).as_subclass(InlineTensor)
    tensor.memory = memory, tensor.data_ptr()
    return tensor


def _reduce_inline(tensor: InlineTensor) -> tuple[Any, ...]:
    memory = tensor.memory_as_made
    if memory is not None:
        return _rebuild_flat, (bytearray(bytes_of(memory)), tensor.dtype)
    plain = tensor.as_subclass(torch.Tensor)
    if plain.dim() == 1 and plain.is_contiguous():
        return _rebuild_flat, (bytearray(bytes_of(plain.view(torch.uint8).numpy())), plain.dtype)
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)  # as it lies in memory
    in_order = plain.permute(order).contiguous()
    return _rebuild_inline, (
        bytearray(bytes_of(in_order.view(-1).view(torch.uint8).numpy())),
        plain.dtype,
        in_order.shape,
        order,
    )


def _rebuild_flat(data: bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype)


def _rebuild_inline(data: bytearray, dtype: torch.dtype, shape: Sequence[int], order: list[int]) -> torch.Tensor:
    tensor = torch.frombuffer(data, dtype=dtype).view(shape)
    return tensor.permute([order.index(dimension) for dimension in range(len(order))])


ForkingPickler.register(InlineTensor, _reduce_inline)


class SentParts(list[torch.Tensor]):
    """`[images, labels]` in a worker: one object in the message to the parent, where it is a list again."""


def _reduce_parts(parts: SentParts) -> tuple[Any, ...]:
    if len(parts) == 2:
        images, labels = parts
        memory = labels.memory_as_made if isinstance(labels, InlineTensor) else None
        if memory is not None and memory.dtype == np.int64 and isinstance(images, SlotTensor):
            reference = reference_to(images)
            if reference is not None:
                return _rebuild_parts, (reference, memory.tobytes())
    return list, (list(parts),)


def _rebuild_parts(reference: tuple[Any, ...], labels: bytes) -> list[torch.Tensor]:
    return [rebuild(*reference), torch.frombuffer(bytearray(labels), dtype=torch.int64)]


ForkingPickler.register(SentParts, _reduce_parts)


class Place(NamedTuple):
    """Memory for a batch: `tensor`, in one piece, to be filled; `finish` makes a view of all of it ready to be returned."""

    tensor: torch.Tensor
    finish: Finish


def place_for(shape: tuple[int, ...], dtype: torch.dtype) -> Place:
    """Memory for a batch of this shape, contiguous, where it is going to be used: reused in this process, or shared with a
    worker's parent.

    In a worker that is a slot (`slots`); where none can be had, torch's shared memory; and where /dev/shm has no room for
    that, ordinary memory whose content is sent through the pipe, with one warning.
    """
    memory, finish = _memory_for(prod(shape) * dtype.itemsize)
    return Place(torch.from_numpy(memory).view(dtype).view(shape), finish)


class ImageMemory(NamedTuple):
    """Memory, as of a `Place`, for a batch of images: (B, C, H, W) uint8, channels last, and the same flat, (nbytes,).

    As arrays: after a batch was copied, what torch does is no longer in the processor's cache, so it is done once, then.
    """

    images: NDArray[np.uint8]
    flat: NDArray[np.uint8]
    finish: Finish


def memory_for_images(count: int, shape: tuple[int, int, int]) -> ImageMemory:
    """For `count` images of `shape` (H, W, C)."""
    height, width, channels = shape
    nbytes = height * width * channels
    sizes, strides = (count, channels, height, width), (nbytes, 1, width * channels, channels)
    flat, finish = _memory_for(count * nbytes)
    return ImageMemory(np.ndarray(sizes, np.uint8, flat, 0, strides), flat, finish)


def _memory_for(nbytes: int) -> tuple[NDArray[np.uint8], Finish]:
    """uint8 (nbytes,), and `Place.finish`."""
    if get_worker_info() is None:
        return shared_pool().take(nbytes), _as_it_is
    taken = take_slot(nbytes)
    if taken is not None:
        return taken
    shared = _torch_shared_memory(nbytes) if os.path.isdir(_DEV_SHM) else _new_shared(nbytes)
    if shared is not None:
        return shared.numpy(), partial(_same_over, shared)
    return np.empty(nbytes, np.uint8), lambda tensor: tensor.as_subclass(InlineTensor)


def _same_over(shared: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, but as one of torch's shared memory, which it is not where numpy was in between."""
    return shared.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _torch_shared_memory(nbytes: int) -> torch.Tensor | None:
    """uint8 (nbytes,) in torch's shared memory; None, and a warning, where /dev/shm cannot hold it.

    The pages are claimed here (newer versions of torch do it themselves): without that, a /dev/shm that is too small
    shows itself as a bus error at the first write.
    """
    try:
        worker = get_worker_info()
        at_once = worker.num_workers if worker is not None else 1
        if shutil.disk_usage(_DEV_SHM).free < nbytes * at_once:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        storage = torch.UntypedStorage._new_shared(nbytes)
        if get_sharing_strategy() == "file_descriptor":
            os.posix_fallocate(storage._share_fd_cpu_()[0], 0, nbytes)
    except (OSError, RuntimeError) as error:
        _warn_of_dev_shm(nbytes, error)
        return None
    return _over(storage)


def _new_shared(nbytes: int) -> torch.Tensor:
    """uint8 (nbytes,) in torch's shared memory, on systems where that has no folder to look at."""
    return _over(torch.UntypedStorage._new_shared(nbytes))


def _over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


_DEV_SHM = "/dev/shm"
_warned_of_dev_shm = False


def _warn_of_dev_shm(nbytes: int, error: OSError | RuntimeError) -> None:
    """Once a run: all workers see the same /dev/shm, so the first of them tells."""
    global _warned_of_dev_shm
    worker = get_worker_info()
    if _warned_of_dev_shm or worker is None or worker.id != 0:
        return
    _warned_of_dev_shm = True
    room = shutil.disk_usage(_DEV_SHM)
    warnings.warn(
        f"/dev/shm has room for {room.free / 1e6:,.0f} of {room.total / 1e6:,.0f} MB, a batch takes {nbytes / 1e6:,.1f} MB "
        f"({error}): batches are sent through pipes instead, which is slow. Enlarge /dev/shm (docker run "
        "--shm-size=1g), or use fewer workers, smaller batches or prefetch_factor=1",
        RuntimeWarning,
        stacklevel=2,
    )
