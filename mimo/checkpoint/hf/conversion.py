"""Convert tensors on disk to those of a model in memory and back, one tensor at a time.

When transformers loads a folder it renames tensors, and merges, splits or transposes some of them
(`transformers.conversion_mapping`). This module applies its rules and operations.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.errors import InputError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Tensors that are converted together.

    name: of the first tensor in memory. converter: a `WeightConverter`; None if it is only renamed.
    sources: names on disk by pattern of the converter, in order. on_disk: the same names by those
    that the converter uses. targets: shapes by name in memory.
    """

    name: str
    converter: Any = None
    sources: dict[str, list[str]] = field(default_factory=dict)
    on_disk: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Shape] = field(default_factory=dict)

    @property
    def keeps_rows(self) -> bool:
        """True if row n of the result consists of row n of the only tensor."""
        from transformers.core_model_loading import Transpose

        operations = self.converter.operations
        return all(isinstance(op, Transpose) and 0 not in (op.dim0, op.dim1) for op in operations)

    @property
    def has_row_per_source(self) -> bool:
        """True if row n of the result consists of the n-th tensor of every pattern."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *others = self.converter.operations
        is_stacked = isinstance(first, MergeModulelist) and first.dim == 0
        return is_stacked and all(isinstance(op, Concatenate) and op.dim > 0 for op in others)


class Conversion:
    """The tensors on disk that make up each tensor in memory, by the rules of transformers.

    model: the whole one, which may be on meta. stored: shapes by name on disk. problems: why a
    tensor cannot be converted, by name in memory. It has no tensors, so rank 0 can send it.
    """

    def __init__(self, model: Any, stored: Mapping[str, Shape]) -> None:
        self.problems: dict[str, str] = {}
        self._stored, self._config = stored, model.config
        self._shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        # Folders may have been saved from the base model or from the whole.
        self._prefix = model.base_model_prefix
        self._groups: dict[str, _Group] = {}
        self._ties: dict[str, list[str]] = {}
        tied = defaultdict[int, list[str]](list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied[id(parameter)].append(name)
            self._ties[name] = tied[id(parameter)]
        for group in self._groups_of_rules(model):
            self._add(group)

    @classmethod
    def of_folder(cls, folder: Path, stored: Mapping[str, Shape]) -> Self:
        """Return the conversion for a ``config.json``. Raises InputError if its model fails."""
        from transformers import AutoConfig

        from mimo.engines.fsdp.models import on_meta

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            return cls(on_meta(config, "eager", torch.float32), stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{folder / 'config.json'}: transformers: {error}") from error

    def _groups_of_rules(self, model: Any) -> list[_Group]:
        """Group stored tensors as `convert_and_load_state_dict_in_model` of transformers does."""
        from transformers import conversion_mapping
        from transformers import core_model_loading as rules

        transforms = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [x for x in transforms if isinstance(x, rules.WeightRenaming)]
        converters = [x for x in transforms if isinstance(x, rules.WeightConverter)]
        converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
        groups: dict[str, _Group] = {}
        for disk in sorted(self._stored, key=rules.dot_natural_key):
            known = self._shapes
            name, pattern = rules.rename_source_key(
                disk, renamings, converters, self._prefix, known
            )
            if name not in known and disk in known:
                name, pattern = rules.rename_source_key(disk, [], [], self._prefix, known)
            if name not in known or (pattern is None and name in groups):
                continue
            converter = copy.deepcopy(converter_of[pattern]) if pattern is not None else None
            group = groups.setdefault(name, _Group(name, converter))
            group.sources.setdefault(pattern or "", []).append(disk)
            group.on_disk[self._base(rules.apply_renamings(disk, renamings))] = disk
        return list(groups.values())

    def _base(self, name: str) -> str:
        return name.removeprefix(f"{self._prefix}.")

    def _add(self, group: _Group) -> None:
        """Add a group, with shapes and problems from converting it on meta in both directions."""
        self._groups[group.name] = group
        stored = {disk: self._stored[disk] for disk in group.on_disk.values()}
        sources = {
            pattern: [torch.empty(stored[disk], device="meta") for disk in disks]
            for pattern, disks in group.sources.items()
        }
        try:
            tensors = self._convert(group, sources)
            self._groups |= dict.fromkeys(tensors, group)
            group.targets.update({name: tuple(x.shape) for name, x in tensors.items()})
            fits = all(self._shapes.get(name) == shape for name, shape in group.targets.items())
            if fits:  # else the caller compares shapes
                written = {disk: tuple(x.shape) for disk, x in self._invert(group, tensors).items()}
                assert written == stored, "it cannot be written as it is stored"
        except (AssertionError, ValueError, RuntimeError, LookupError, AttributeError) as error:
            shapes = ", ".join(str(list(shape)) for shape in sorted({*stored.values()}))
            self.problems[group.name] = (
                f"cannot be made of {len(stored)} tensors from {next(iter(stored))} on, {shapes}: "
                f"{error}"
            )

    def _convert(
        self,
        group: _Group,
        sources: Mapping[str, list[Tensor]],
        shapes: Mapping[str, Shape] | None = None,
    ) -> dict[str, Tensor]:
        """Return tensors by name in memory. sources: by pattern; they are freed.

        shapes: in memory; None for whole tensors.
        """
        if group.converter is None:
            ((tensor,),) = sources.values()
            return {group.name: tensor}
        group.converter.collected_tensors.update(sources)
        return self._by_name(group.converter, group.name, shapes or self._shapes)

    def _invert(self, group: _Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name on disk. tensors: at least the group's, by name in memory."""
        first_disk, name = next(iter(group.on_disk.values())), ""
        of_target = {
            target: next(tensors[key] for key in self._ties.get(target, [target]) if key in tensors)
            for target in group.targets
        }
        if group.converter is None:
            return {first_disk: of_target[group.name]}
        inverse = group.converter.reverse_transform()
        for target, tensor in of_target.items():
            renamed, pattern = inverse.rename_source_key(target)
            name = name or renamed
            inverse.collected_tensors[pattern].append(tensor)
        # In this direction, an operation that needs the target's shape gets that on disk.
        converted = self._by_name(inverse, name, {name: self._stored[first_disk]})
        return {group.on_disk[self._base(name)]: tensor for name, tensor in converted.items()}

    def _by_name(self, converter: Any, name: str, wanted: Mapping[str, Shape]) -> dict[str, Tensor]:
        # Operations use only the shapes of the model's parameters.
        model = SimpleNamespace(get_parameter=lambda k: torch.empty(wanted[k], device="meta"))
        converted = converter.convert(name, model=model, config=self._config)
        return {key: x[0] if isinstance(x, list) else x for key, x in converted.items()}

    def _groups_of(self, key: str) -> list[_Group]:
        """Return the groups of a tensor; several if tied parameters are stored more than once."""
        names = self._ties.get(key, [key])
        return [self._groups[name] for name in names if name in self._groups]

    def _name_in(self, group: _Group, key: str) -> str:
        return next((name for name in self._ties.get(key, [key]) if name in group.targets), key)

    def shape(self, key: str) -> Shape | None:
        """Return the shape of a tensor in memory; None if it is not stored or has a problem."""
        groups = self._groups_of(key)
        return groups[0].targets.get(self._name_in(groups[0], key)) if groups else None

    def sources(self, key: str) -> list[str]:
        """Return the names on disk of all sources of a tensor, also of duplicates."""
        return [disk for group in self._groups_of(key) for disk in group.on_disk.values()]

    def in_memory(self, disk: str) -> str:
        """Return the name in memory of the tensor with this name on disk; itself if unknown."""
        groups = self._groups.values()
        return next((group.name for group in groups if disk in group.on_disk.values()), disk)

    def is_tied(self, key: str) -> bool:
        return len(self._ties.get(key, ())) > 1

    def group(self, key: str) -> str:
        """Return the name of a tensor's group; `to_disk` needs all tensors of a group together."""
        return self._groups_of(key)[0].name

    def read(
        self, folder: WeightsFolder, key: str, rows: slice, columns: slice | None = None
    ) -> Tensor:
        """Return these rows of a tensor in memory, and of a matrix these columns of them.

        If a tensor is stored as in memory, or row by row, nothing else is read.
        """
        group = self._groups_of(key)[0]
        if group.converter is None:
            (disk,) = group.on_disk.values()
            return folder.read(disk, rows, columns)
        name, wanted = self._name_in(group, key), slice(None)
        if group.keeps_rows:
            ((pattern, (disk,)),) = group.sources.items()
            stored = folder.read(disk, rows)
            # Whether to transpose follows from the shape.
            shapes = {name: (len(stored), *group.targets[name][1:])}
            part = self._convert(group, {pattern: [stored]}, shapes)[name]
            return part if columns is None else part[:, columns]
        if group.has_row_per_source and range(group.targets[name][0])[rows]:
            wanted, rows = rows, wanted
        sources = {
            pattern: [folder.read(disk) for disk in disks[wanted]]
            for pattern, disks in group.sources.items()
        }
        part = self._convert(group, sources)[name][rows]
        return part if columns is None else part[:, columns]

    def to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name on disk. tensors: by name in memory, whole groups."""
        stored: dict[str, Tensor] = {}
        for key in tensors:
            for number, group in enumerate(self._groups_of(key)):
                if self._name_in(group, key) == next(iter(group.targets)):
                    for disk, tensor in self._invert(group, tensors).items():
                        # safetensors refuses two names for the same memory.
                        stored[disk] = tensor.clone() if number else tensor.contiguous()
        return stored


class SameNames(Conversion):
    """The conversion of a folder whose tensors are the parameters of its module, as in diffusers.

    stored: shapes by name.
    """

    def __init__(self, stored: Mapping[str, Shape]) -> None:
        self.problems = {}
        self._stored, self._ties = stored, {}
        self._groups = {
            name: _Group(name, None, {"": [name]}, {name: name}, {name: shape})
            for name, shape in stored.items()
        }
