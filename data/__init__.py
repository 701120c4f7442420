"""Samples from webdataset shards to token ids and image patches. Imports nothing else of ours."""

from data.digits.shards import prepare_digits
from data.index.reader import SampleReader, UnreadableSample
from data.index.samples import Index, Processors, SkippedSample, check_lengths, check_rows
from data.index.store import build_index, load_or_build_index
from data.media.image_files import image_size, open_image
from data.media.images import ImageProcessor
from data.media.processor import Media, Part, PartPlan
from data.media.square_images import SquareImageProcessor
from data.media.videos import TimedVideoProcessor, VideoProcessor
from data.order import SampleOrder
from data.positions import mrope_position_ids
from data.text.chat import ChatTokenizer, EncodedSample
from data.text.item_text import MediaText, item_text_problem
from data.text.messages import MessagesError, PlaceholderError, UnknownMediaError

__all__ = [
    "ChatTokenizer",
    "EncodedSample",
    "ImageProcessor",
    "Index",
    "Media",
    "MediaText",
    "MessagesError",
    "Part",
    "PartPlan",
    "PlaceholderError",
    "Processors",
    "SampleOrder",
    "SampleReader",
    "SkippedSample",
    "SquareImageProcessor",
    "TimedVideoProcessor",
    "UnknownMediaError",
    "UnreadableSample",
    "VideoProcessor",
    "build_index",
    "check_lengths",
    "check_rows",
    "image_size",
    "item_text_problem",
    "load_or_build_index",
    "mrope_position_ids",
    "open_image",
    "prepare_digits",
]
