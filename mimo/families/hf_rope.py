"""Rotary settings of a configuration: which of them transformers reads for each kind of scaling.

Source: transformers `modeling_rope_utils`, and `compute_default_rope_parameters` and
`compute_axial_rope_parameters` of its models.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo.families.hf_config import Config

# The keys that transformers reads for the kinds we compute. The other keys are for other kinds:
# they may be present with these kinds, but change nothing.
_READ = {
    "default": {"rope_theta"},
    "axial": {"rope_theta"},
    "linear": {"rope_theta", "factor", "partial_rotary_factor"},
}
_KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor"),
    *("original_max_position_embeddings", "mrope_section", "mrope_interleaved", "truncate"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class Rope:
    """base: of the frequencies. factor: positions are divided by it."""

    base: float
    factor: float


def rope_settings(section: Config, where: str, *kinds: str) -> Rope:
    """What transformers computes for ``section``, the rotary settings under the key ``where``.

    kinds: the values of ``rope_type`` that the caller computes. Raises ValueError for another kind,
    for a key that no kind has, and for partially rotated heads.
    """
    kind = section["rope_type"]
    if kind not in kinds:
        names = " and ".join(repr(one) for one in kinds)
        are = "is" if len(kinds) == 1 else "are"
        raise ValueError(f"{where}.rope_type is {kind!r}; only {names} {are} supported")
    unknown = [f"{where}.{key} is unknown" for key in section if key not in _KNOWN]
    if unknown:
        raise ValueError("; ".join(unknown))
    read = {key: value for key, value in section.items() if key in _READ[kind]}
    if (part := read.get("partial_rotary_factor", 1.0)) != 1:
        raise ValueError(f"{where}.partial_rotary_factor is {part!r}; only 1 is supported")
    return Rope(float(read["rope_theta"]), float(read.get("factor", 1.0)))
