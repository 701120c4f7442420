"""GPUs and the figures of their data sheets: memory, peak FLOP/s and links."""

from dataclasses import dataclass, replace

from mimo.errors import InputError

_GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU of a cluster. memory: bytes that tensors may take.

    flops: peak of dense bf16 products per second. node, network: bytes per second that it sends to
    a GPU of its node, and of another.
    """

    name: str
    memory: float
    flops: float
    node: float
    network: float


# From NVIDIA's data sheets: NVLink in one direction; one network card per GPU, 200 Gbit/s for an
# A100, else 400. `memory` leaves room for the driver, the CUDA context and NCCL.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 78 * _GIB, 989e12, 450e9, 50e9),
        Gpu("h200", 138 * _GIB, 989e12, 450e9, 50e9),
        Gpu("b200", 176 * _GIB, 2250e12, 900e9, 50e9),
        Gpu("a100-40", 38 * _GIB, 312e12, 300e9, 25e9),
        Gpu("a100-80", 78 * _GIB, 312e12, 300e9, 25e9),
    )
}


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by its name, or an H100 with this many GiB. Raises InputError."""
    if text in GPUS:
        return GPUS[text]
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < 1e6:
        names = ", ".join(GPUS)
        raise InputError(f"--gpu: got {text!r}; give one of {names}, or its memory in GiB")
    return replace(GPUS["h100"], name=f"{text} GiB", memory=gib * _GIB)
