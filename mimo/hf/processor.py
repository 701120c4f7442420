"""The processor of transformers that a folder holds, also where videos cannot be decoded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_processor(directory: str | Path) -> Any:
    """What `AutoProcessor.from_pretrained` returns, with images prepared by pillow.

    The processors of the Qwen families also make a processor for videos, which needs torchvision.
    Without torchvision they are made for images alone. Never downloads anything.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(directory)}
    where["local_files_only"] = True
    config = AutoConfig.from_pretrained(**where)
    base: Any = PROCESSOR_MAPPING[type(config)]
    has_videos = "video_processor" in base.get_attributes()
    if not has_videos or importlib.util.find_spec("torchvision") is not None:
        return AutoProcessor.from_pretrained(**where, backend="pil")

    class ImagesOnly(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor" and argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    tokenizer = AutoTokenizer.from_pretrained(**where)
    return ImagesOnly(
        image_processor=AutoImageProcessor.from_pretrained(**where, backend="pil"),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
