"""Samples from webdataset shards to token ids and image patches. Imports nothing else of ours."""

from data.chat import ChatTokenizer, EncodedSample
from data.digits import prepare_digits
from data.images import ImageProcessor, image_size, open_image
from data.index import Index, Processors, SkippedSample, check_lengths
from data.index_build import build_index
from data.index_store import load_index, load_or_build_index, save_index
from data.item_text import MediaText, item_text_problem
from data.messages import MessagesError, PlaceholderError, UnknownMediaError
from data.order import SampleOrder
from data.positions import mrope_position_ids
from data.processor import ItemProcessor, Part, PartPlan
from data.reader import SampleReader, UnreadableSample
from data.square_images import SquareImageProcessor
from data.videos import TimedVideoProcessor, VideoProcessor

__all__ = [
    "ChatTokenizer",
    "EncodedSample",
    "ImageProcessor",
    "Index",
    "ItemProcessor",
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
    "image_size",
    "item_text_problem",
    "load_index",
    "load_or_build_index",
    "mrope_position_ids",
    "open_image",
    "prepare_digits",
    "save_index",
]
