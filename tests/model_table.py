"""Write the table of models of transformers: `python -m tests.model_table docs/models.md`."""

from __future__ import annotations

import sys
from pathlib import Path

HEADER = """# Models of transformers

Every class of `AutoModelForImageTextToText` in transformers {version}, as
`python -m tests.model_table docs/models.md` wrote it.

- *modalities*: items that the tower encodes on ranks of its own
- *samples*: how the samples of a lane run; packed ones share a sequence, others are padded to a
  batch of the lane's samples
- *tp*: whether `language.grid.tp: 2` splits the tiny copy by transformers' plan
- *folder*: how the tests compare the folder of `mimo tiny CLASS`, trained on three ranks from chat
  and pixels to the exported folder, with transformers. *fp64*, *fp32*: inputs, loss, every gradient
  and all weights agree in this precision. *rounded*: not trained, as fp32 misses 1e-5. *no*: the
  cause is below

A class is accepted if a tiny copy in two halves gives the loss and every gradient of the whole
model; the tests train each on three ranks. Models of the families `qwen2_5`, `qwen3`, `qwen3_moe`,
`qwen3_5`, `qwen3_5_moe` and `gemma3` also have code of their own, see [families](families.md).

| class | modalities | samples | tp | folder |
|---|---|---|---|---|
"""
NO_FOLDER = """
Classes whose folder is not compared, with the cause:

| class | cause |
|---|---|
"""
REFUSED = """
Refused in training, with the cause:

| class | cause |
|---|---|
"""


def write_page(path: Path) -> None:
    """Compare every class and write the page."""
    import transformers

    from mimo.checkpoint.hf.shrink import TABLES
    from mimo.engines.fsdp.tp_plans import plan_problems
    from mimo.model.gate import compare_halves
    from tests.mimo.model import test_any_folder as folders
    from tests.mimo.model.tiny_classes import CLASSES, REFUSALS, tiny_config

    compared = dict.fromkeys(folders.FP64, "fp64") | dict.fromkeys(folders.FP32, "fp32")
    compared |= dict.fromkeys(folders.ROUNDED, "rounded")
    causes = TABLES["refused"] | folders.REFUSED
    causes["cosmos3_omni"] = "transformers has no processor for it"
    accepted, without_folder, refused = [], [], []
    for name in CLASSES:
        if name in REFUSALS:
            refused.append(f"| `{name}` | {REFUSALS[name]} |")
            continue
        config = tiny_config(name)
        verdict = compare_halves(config)
        assert not verdict.problem, f"{name}: {verdict.problem}"
        try:
            can_cut = not [*plan_problems(config, 2)]
        except Exception:  # whatever a class's own code raises
            can_cut = False
        samples = "padded" if verdict.packing is None else "packed"
        cut = "yes" if can_cut else "no"
        folder = compared.get(name, "no")
        modalities = ", ".join(verdict.outputs)
        accepted.append(f"| `{name}` | {modalities} | {samples} | {cut} | {folder} |")
        print(accepted[-1], flush=True)
        if folder == "no":
            without_folder.append(f"| `{name}` | {causes[name]} |")
    parts = [HEADER.format(version=transformers.__version__), *accepted]
    parts += [NO_FOLDER, *without_folder, REFUSED, *refused]
    path.write_text("".join(f"{part.rstrip()}\n" for part in parts), encoding="utf-8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
