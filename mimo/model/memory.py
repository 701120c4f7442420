"""Estimates of the memory that a rank needs, by its role.

Weights, gradients and optimizer state are exact; activations and buffers are estimates for full
microbatches: see `mimo.model.activations`. The device's context, memory of libraries such as NCCL,
and fragmentation come on top.
"""

from dataclasses import asdict, replace
from itertools import pairwise

from mimo.config.schema import Recipe
from mimo.model.activations import Activations, Estimate, microbatches_in_flight
from mimo.model.module_sizes import CUT_BY_COLUMNS as CUT_BY_COLUMNS
from mimo.model.module_sizes import IN_LAYER, ModuleSizes
from mimo.model.module_sizes import RoleMemory as RoleMemory
from mimo.parallel.grids import LANGUAGE, Layout


def memory_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Return the memory of every encoder, then of the language model's different stages."""
    roles = []
    for role in parameters_by_role(recipe, layout):
        module = ModuleSizes(recipe, layout, role.module)
        kind = FsdpActivations if module.grid.engine == "fsdp" else Activations
        stage = module.grid.coords(role.ranks[0]).pp
        roles.append(replace(role, **asdict(kind(module).of_stage(stage))))
    return roles


def parameters_by_role(recipe: Recipe, layout: Layout) -> list[RoleMemory]:
    """Like `memory_by_role`, but of weights, gradients and optimizer state only."""
    roles: list[RoleMemory] = []
    for name, grid in layout.grids.items():
        module = ModuleSizes(recipe, layout, name)
        if grid.engine == "fsdp":
            roles.append(module.sharded_parameters())
            continue
        starts = sorted({0, min(1, grid.pp - 1), grid.pp - 1})
        roles += (module.stage_parameters(range(*ends)) for ends in pairwise([*starts, grid.pp]))
    return roles


class FsdpActivations(Activations):
    """The estimate for a module of transformers.

    A layer keeps, of each token, the inputs of both norms, in fp32 too, and what they return;
    gathered inputs of all linears, and outputs of the first linears; rotated queries and keys, and
    the activated half of the MLP.
    """

    def of_stage(self, stage: int) -> Estimate:
        waiting = microbatches_in_flight(self.recipe, self.layout, self.name, stage)
        unit, layers = self.tokens * self.size, self.module.layers
        width, kept = self._widths()
        inside = unit * kept
        frozen = self.is_frozen
        forward, layer, end = self._messages()
        absent = inside if self.recomputes else 0
        buffers = max((0 if frozen else inside) + layer, max(forward, end) - absent)
        activations = inside if frozen else waiting * layers * inside
        if self.recomputes and not frozen:
            activations = waiting * layers * unit * width + inside
        logits = self.block_of_logits if self.name == LANGUAGE else 0.0
        return Estimate(self.inputs(), activations, logits, buffers)

    def _messages(self) -> tuple[float, float, float]:
        """Bytes of FSDP2's messages: in a forward, in the backward of a layer and of an end.

        The next unit is gathered, where nothing stays gathered, and exists twice, as received and
        as used. Gradients are reduced while those of the next unit are computed, in the dtype of
        the computation; the message is in fp32, and so is the share that results.
        """
        module, size, wide = self.module, self.size, self.wide
        layer, embedding = module.held["layer"], module.embedding
        outside = module.held["first"] + module.held["last"] - embedding
        following = 0 if module.keeps_layers else layer
        received = module.shares > 1  # without other lanes there are no messages
        gathered = (following + 2 * layer * received) * size
        ends = (module.trained["first"], module.trained["last"])
        end = max(ends) if embedding else sum(ends)
        per_element = 2 * size + wide + 2 * wide / module.shares
        forward = (embedding + max(embedding, outside) * received + layer * received) * size
        in_layer = gathered + module.trained["layer"] * per_element
        return max(forward, gathered), in_layer, gathered + end * per_element

    def _widths(self) -> tuple[float, float]:
        """Elements of a token on a rank: between layers, and kept in a layer for backward."""
        module, tp, in_fp32 = self.module, self.grid.tp, self.wide // self.size
        shapes = module.shapes.items()
        layer = {n: s for n, s in shapes if IN_LAYER(n) or module.is_one_unit}
        linears = {n.split(".")[-2]: shape for n, shape in layer.items() if n.endswith(".weight")}
        # Norms keep their input, its fp32 copy, and the normalized copy.
        norm = 2 + in_fp32
        if "linear_qkv" not in linears:  # named as in transformers
            width = module.hidden / self.parts
            outputs = sum(rows for rows, columns in layer.values() if columns > 1) / module.listed
            return width, 2 * norm * width + 2 * module.hidden + norm * outputs / tp
        fc1, fc2 = (linears[f"linear_{name}"] for name in ("fc1", "fc2"))
        qkv, proj = (module.mean(f"self_attention.linear_{n}.weight") for n in ("qkv", "proj"))
        width = qkv[1] / self.parts
        # The inputs of two norms, and of the linears that follow them.
        inside = (qkv[0] + proj[1] + fc1[0] + fc2[1]) / tp
        if chosen := self.chosen:
            each, shared = (
                module.mean(f"{n}.linear_fc2.weight")[1] for n in ("experts", "_expert")
            )
            inside = (qkv[0] + proj[1] + 4 * shared) / tp + width * (shared > 0)
            inside += chosen * (2 * qkv[1] * self.grid.etp + 4 * each) / tp
        # Queries and keys have norms as well, and are rotated; the gate is activated first.
        inside += (norm * qkv[0] + fc2[1]) / tp
        return width, 2 * norm * width + 2 * qkv[1] + inside
