"""What transformers' vision towers compute, and how ours are compared with it.

fp32 on a CPU. Rows differ by at most 1e-5 (they are of order one), gradients by 1e-5 of their
largest element.

Letters: P patches, C numbers per patch, N rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import lone_module
from tests.lone_module import Weights, noise

TOLERANCE = 1e-5


@dataclass(frozen=True)
class TowerReference:
    """What transformers computed, with weights and gradients under our names.

    patches: (P, C). rows: (N, H), or (N, (1 + levels)·H); row_gradients: what went backward.
    """

    weights: Weights
    patches: Tensor
    row_gradients: Tensor
    rows: Tensor
    gradients: Weights
    patch_gradients: Tensor

    @classmethod
    def of(
        cls,
        model: nn.Module,
        forward: Callable[[Tensor], Tensor],
        patches: Tensor,
        to_ours: Callable[[Weights], Weights],
    ) -> TowerReference:
        """Run ``model`` with its weights as they are.

        forward: patches (P, C) -> rows by ``model``. to_ours: transformers' weights or gradients ->
        the same under our names and in our layout.
        """
        patches = patches.clone().requires_grad_()
        rows = forward(patches)
        row_gradients = noise(2, *rows.shape)
        rows.backward(row_gradients)
        assert patches.grad is not None
        return cls(
            weights=to_ours(dict(model.named_parameters())),
            patches=patches.detach(),
            row_gradients=row_gradients,
            rows=rows.detach(),
            gradients=to_ours(lone_module.gradients(model)),
            patch_gradients=patches.grad,
        )

    def check_rows(self, passes: Sequence[Tensor]) -> None:
        """Check the rows of all images that each forward pass returned."""
        assert 0.1 < self.rows.std() < 10, "an absolute tolerance needs rows of order one"
        for rows in passes:
            torch.testing.assert_close(rows, self.rows, rtol=0, atol=TOLERANCE)

    def check_gradients(self, results: Sequence[dict[str, Any]]) -> None:
        """The gradients of every parameter and of the patches, from all ranks' results."""
        error, name = lone_module.worst_error(
            lone_module.join_gradients(results) | {"patches": results[0]["patch_gradients"]},
            self.gradients | {"patches": self.patch_gradients},
        )
        assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"
