"""What the layers of a step compute, and its gradients, as a few numbers each.

Layers have the names of the checkpoint format, in either engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import override

import torch
from torch import Tensor, nn

from mimo.config.schema import LANGUAGE
from mimo.engines.contract import Module
from mimo.engines.fsdp.module import FsdpModule
from mimo.model.step_plan import StepPlan
from mimo.train.observer import StepObserver


class Statistics:
    """Of all tensors that come by: root mean square and largest of the finite elements."""

    def __init__(self) -> None:
        self._elements = 0
        self._parts: list[Tensor] = []  # (squares, largest, non-finite) of each

    def add(self, values: Tensor) -> None:
        """Count a tensor; the host does not wait for it."""
        wide = values.detach().double()
        finite = wide.isfinite()
        kept = torch.where(finite, wide, 0.0)
        self._elements += wide.numel()
        if wide.numel():
            parts = kept.square().sum(), kept.abs().amax(), (~finite).sum().double()
            self._parts.append(torch.stack(parts))

    def result(self) -> dict[str, float]:
        """The numbers; the host waits."""
        if not self._parts:
            return {"elements": 0, "norm": 0.0, "rms": 0.0, "max": 0.0, "non_finite": 0}
        parts = torch.stack(self._parts)
        squares, bad = float(parts[:, 0].sum()), int(parts[:, 2].sum())
        return {
            "elements": self._elements,
            "norm": math.sqrt(squares),
            "rms": math.sqrt(squares / max(self._elements - bad, 1)),
            "max": float(parts[:, 1].max()),
            "non_finite": bad,
        }


class WatchedLayers(StepObserver):
    """Statistics of what layers compute and of every gradient; keeps the plan of the step."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.activations: dict[str, Statistics] = {}
        self.gradients: dict[str, Statistics] = {}
        self.plan: StepPlan | None = None
        for module in modules.values():
            for name, layer in _layers(module):
                self._watch(name, layer)

    def _watch(self, name: str, layer: nn.Module) -> None:
        found = self.activations.setdefault(name, Statistics())

        def hook(_: nn.Module, __: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.is_floating_point():
                found.add(first)

        layer.register_forward_hook(hook)

    @override
    def planned(self, step: int, plan: StepPlan) -> None:
        self.plan = plan

    @override
    def gradients_complete(self, step: int, modules: Mapping[str, Module]) -> None:
        for module in modules.values():
            for piece in module.gradients():
                self.gradients.setdefault(piece.key, Statistics()).add(piece.values)


def _layers(module: Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer of a stack, and what has weights outside of them, by name."""
    inside: set[nn.Module] = set()
    if isinstance(module, FsdpModule):
        stack = "decoder" if module.name == LANGUAGE else "blocks"
        for number, unit in enumerate(module.whole.units):  # type: ignore[arg-type]
            inside.update(unit.modules())
            yield f"{module.name}.{stack}.layers.{number}", unit
    for name, part in module.whole.named_modules():
        if part in inside:
            continue
        if name.rpartition(".")[2].isdigit():
            inside.update(part.modules())
        elif next(part.children(), None) or not list(part.parameters(recurse=False)):
            continue
        yield f"{module.name}.{name}", part
