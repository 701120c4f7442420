"""The processor of transformers that a folder holds, for texts and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mimo.families.hf_preprocessing import processor_class


def load_processor(directory: str | Path) -> Any:
    """As `AutoProcessor.from_pretrained`, but images are prepared by pillow, videos not at all.

    On every machine alike: where torchvision is installed, transformers prepares images by it, with
    other rounding; where it is not, there is no processor for videos, which those of the Qwen
    families ask for. Never downloads anything.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    where: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    where["pretrained_model_name_or_path"] = str(directory)
    base = processor_class(directory)

    class ImagesOnly(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(**where, backend="pil"),
        "tokenizer": AutoTokenizer.from_pretrained(**where),
    }
    settings, _ = base.get_processor_dict(**where)
    return ImagesOnly.from_args_and_dict([parts.get(n) for n in base.get_attributes()], settings)
