"""Whole policies out of the store, for whoever runs one: full versions as they are, adapters merged into their base.

An adapter version holds the low-rank factors A ``[rank, in]`` and B ``[out, rank]`` of each target weight and names
its base by digest. A replica needs neither peft nor the adapter's own arithmetic: it gets W0 + scaling · B A, computed
in float32 from the base that was verified, never from weights merged earlier, so that no rounding piles up.

Memory: tensors are mapped, one is merged at a time. A :class:`PolicyReader` keeps the base mapped for its lifetime;
its pages are the store's own files on a local store. Otherwise they are a download without a name, which takes the
base's size in ``TMPDIR`` until the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from pa_core.errors import StoreError
from pa_core.store.shards import TensorTable, dtype_name, memory_of

if TYPE_CHECKING:
    from pa_core.store.weights import Manifest, WeightStore


@dataclass(frozen=True)
class AdapterTable:
    """What an adapter version adds to, and how.

    Attributes:
        base_sha256: digest of the base's weights.
        scaling: factor of B A, alpha / rank.
        pairs: for each target weight, under the base's name, the names of its tensors A and B.
    """

    base_sha256: str
    scaling: float
    pairs: Mapping[str, tuple[str, str]]


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """``weight[out, in]`` + scaling · ``b[out, rank]`` ``a[rank, in]``: summed in float32, then of weight's dtype."""
    return (b.float() @ a.float()).mul_(scaling).add_(weight).to(weight.dtype)


def layer_of(name: str) -> str | None:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``; None for a tensor outside numbered layers."""
    match = re.match(r"(?:.+?\.)??\d+(?=\.)", name)
    return match[0] if match else None


@dataclass(frozen=True)
class Delivery:
    """Tensors of a version that a model is to take over, all verified.

    Attributes:
        manifest: the version's manifest.
        whole: whether they are the whole policy; otherwise what differs from the version delivered before.
        table: their names, dtypes and shapes, and the tied names among them.
        read: the tensor of a name in ``table.entries``, on the CPU; usable while the delivery is open.
    """

    manifest: Manifest
    whole: bool
    table: TensorTable
    read: Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class _Base:
    sha256: str
    table: TensorTable
    read: Callable[[str], torch.Tensor]


class PolicyReader:
    """Delivers one version after the other to one model, whose weights nobody else changes.

    Args:
        weights: the run's versions.
        whole_layers: deliver every tensor of a layer that has a changed one, for models that fuse a layer's weights.
    """

    def __init__(self, weights: WeightStore, *, whole_layers: bool = False) -> None:
        self._weights = weights
        self._whole_layers = whole_layers
        self._base: _Base | None = None
        self._held: tuple[str, frozenset[str]] | None = None

    @contextlib.contextmanager
    def open(self, version: int, *, whole: bool = False) -> Iterator[Delivery]:
        """A version's tensors, once every digest agrees; a base is hashed only on its first use.

        The first delivery is whole, and so is one after a full version, after another base or other targets, after
        a delivery whose ``with`` block raised, and where ``whole`` asks for it.

        Raises:
            StoreError: the version or its base is missing or damaged, or they do not fit together.
        """
        with contextlib.ExitStack() as stack:
            manifest, paths = stack.enter_context(self._weights.verified(version))
            read = _reading(manifest.table, paths, stack)
            if manifest.adapter is None:
                self._held = None
                yield Delivery(manifest, True, manifest.table, read)
                return
            base = self._base_of(manifest)
            _check_pairs(manifest, base.table)
            held = (base.sha256, frozenset(manifest.adapter.pairs))
            whole = whole or held != self._held
            self._held = None
            table = base.table if whole else self._changed(base.table, manifest.adapter)
            yield Delivery(manifest, whole, table, _merging(base, manifest.adapter, read))
            self._held = held

    def load_into(self, version: int, targets: Mapping[str, torch.Tensor]) -> Manifest:
        """Copy a version into a model's tensors, one at a time, as :meth:`WeightStore.load_into` does.

        Raises:
            StoreError: the version is missing or damaged, or does not fit ``targets``.
        """
        with self.open(version) as delivery, torch.no_grad():
            table = delivery.table
            if not delivery.whole:
                names = table.entries.keys() | table.tied.keys()
                targets = {name: target for name, target in targets.items() if name in names}
            for name, places in _match(version, table, targets).items():
                tensor = delivery.read(name)
                for place in places:
                    place.copy_(tensor)
        return delivery.manifest

    def _base_of(self, manifest: Manifest) -> _Base:
        """The base that an adapter version belongs to, verified when it is first used."""
        assert manifest.adapter is not None
        wanted = manifest.adapter.base_sha256
        if self._base is None or self._base.sha256 != wanted:
            with self._weights.base.verified(0) as (base, paths):
                if base.weights_sha256 != wanted:
                    raise StoreError(
                        f"policy version {manifest.version} is an adapter of weights {wanted[:12]}, and the run's base "
                        f"has {base.weights_sha256[:12]}; remove the version and publish it again"
                    )
                # Mapped files stay readable when a download's folder is removed here.
                self._base = _Base(wanted, base.table, _reading(base.table, paths))
        return self._base

    def _changed(self, table: TensorTable, adapter: AdapterTable) -> TensorTable:
        """The part of a base's table that another adapter of the same targets changes."""
        names = set(adapter.pairs)
        if self._whole_layers:
            layers = {layer_of(name) for name in names}
            names = set(table.entries) if None in layers else {n for n in table.entries if layer_of(n) in layers}
        entries = {name: entry for name, entry in table.entries.items() if name in names}
        return TensorTable(entries, {name: owner for name, owner in table.tied.items() if owner in names})


def _reading(
    table: TensorTable, paths: list[Path], stack: contextlib.ExitStack | None = None
) -> Callable[[str], torch.Tensor]:
    """Reads tensors from mapped safetensors files, which are closed with ``stack``, or with the last reference."""
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise StoreError(f"{path}: not a safetensors file: {error}") from None
        files[path.name] = file if stack is None else stack.enter_context(file)

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = files[table.entries[name].file].get_tensor(name)
        return tensor

    return read


def _merging(
    base: _Base, adapter: AdapterTable, read_adapter: Callable[[str], torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        weight = base.read(name)
        if name not in adapter.pairs:
            return weight
        a, b = adapter.pairs[name]
        return merged(weight, read_adapter(a), read_adapter(b), adapter.scaling)

    return read


def _check_pairs(manifest: Manifest, base: TensorTable) -> None:
    """Raise :class:`StoreError` where a target is not in the base or its factors have other shapes."""
    assert manifest.adapter is not None
    for name, (a, b) in manifest.adapter.pairs.items():
        shapes = [
            table.entries[key].shape if key in table.entries else None
            for table, key in ((base, name), (manifest.table, a), (manifest.table, b))
        ]
        weight, left, right = shapes
        if not weight or not left or not right or (right[0], left[1], right[1]) != (*weight, left[0]):
            raise StoreError(
                f"policy version {manifest.version} does not fit its base: {name} is {weight}, "
                f"{a} is {left} and {b} is {right}"
            )


def _match(version: int, table: TensorTable, targets: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Where each stored tensor goes. Names that share memory are one place and need one source."""
    places: dict[str, list[torch.Tensor]] = {name: [] for name in table.entries}
    sources: dict[tuple[object, ...], str] = {}
    unmatched = []
    problems = []
    for name, target in targets.items():
        owner = table.tied.get(name, name)
        if owner not in table.entries:
            unmatched.append(name)
            continue
        entry = table.entries[owner]
        if (entry.shape, entry.dtype) != (tuple(target.shape), dtype_name(target.dtype)):
            problems.append(
                f"{name} is {entry.dtype}{list(entry.shape)} there and "
                f"{dtype_name(target.dtype)}{list(target.shape)} in the model"
            )
        source = sources.setdefault(memory_of(target), owner)
        if source != owner:
            problems.append(f"{name} and {source} are one tensor in the model and two there")
        elif not any(place is target for place in places[owner]):
            places[owner].append(target)
    problems += [f"{name} is not in it" for name in unmatched if memory_of(targets[name]) not in sources]
    problems += [f"{name} is not in the model" for name, found in places.items() if not found]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise StoreError(f"policy version {version} does not fit the model: {shown}")
    return places
