"""What import-linter cannot see: who creates groups, names a device, or imports in a function."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mimo", "bridge", "data", "encoders")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

GROUP_MAKERS = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "HyperCommGrid"}
DEVICE_NAMES = {"cuda", "nccl", "gloo"}
MAY_NAME_DEVICES = {"mimo/device.py", "mimo/engines/megatron/cpu.py"}
MAX_LINES = 400

AUDIO_WORDS = {"audio", "whisper", "wav", "wave", "mel", "waveform"}
# The forms of other people's chats name media, and files are packed under a suffix of theirs.
KNOW_AUDIO = {
    "data/modalities/audio.py",
    "encoders/whisper.py",
    "data/text/forms.py",
    "data/pack.py",
    # Its names are those of transformers' methods and tokens.
    "data/modalities/transformers.py",
    "mimo/engines/fsdp/halves.py",
    "mimo/engines/fsdp/language_half.py",
    "mimo/checkpoint/hf/examples.py",
    "mimo/checkpoint/hf/shrink.py",
    "mimo/checkpoint/hf/tiny_class.py",
    "mimo/model/gate.py",
}

PIXEL_WORDS = {"image_size", "PIL", "row_pixels", "item_width", "item_height"}
# Beside the media and the encoders: example and packed data, and what reads checkpoints or
# transformers' own processors, whose keys are about images.
KNOW_PIXELS = (
    "data/modalities/",
    "data/pack.py",
    "data/__init__.py",
    "encoders/",
    "mimo/check/points.py",
    "mimo/check/workload.py",
    "mimo/checkpoint/hf/",
)

# Imports of another room inside a function: `file` or `file:function`, and why.
MAY_IMPORT_LATE = {
    "mimo/cli/": "--help and typing mistakes are answered at once",
    "mimo/families/languages/": "the engine takes ten seconds; checks need settings alone",
    "mimo/families/whole_models.py": "as above",
    "mimo/checkpoint/hf/conversion.py": "as above",
    "mimo/checkpoint/hf/pipelines.py:schedule_of": "it loads torch",
    "mimo/checkpoint/hf/recipes.py:item_keys": "data loads numpy",
    "mimo/families/hf_config.py:image_defaults_of_processor": "data loads numpy",
    "mimo/config/training.py:_has_no_credentials": "data loads numpy",
}


def refuse(
    search: Callable[[Path], Iterable[tuple[str, str]]],
    refused: Callable[[str], bool],
    allowed: Iterable[str] = (),
) -> None:
    """Fail for each refused name that a search finds in a file, unless its path is allowed."""
    wrong = [
        f"{where}: {name}"
        for path in FILES
        if not _name(path).startswith(tuple(allowed))
        for where, name in search(path)
        if refused(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_topology_creates_process_groups() -> None:
    refuse(_calls, GROUP_MAKERS.__contains__, ["mimo/parallel/groups.py"])


def test_only_the_device_file_and_the_cpu_adapter_name_a_device_or_a_backend() -> None:
    refuse(_device_names, bool, MAY_NAME_DEVICES)


def test_the_data_know_nothing_of_ranks() -> None:
    imports = [name for path in (ROOT / "data").rglob("*.py") for name in _imports(path)]
    assert not [name for name in imports if name.startswith("torch.distributed")]


def test_a_media_is_known_to_its_own_file_its_encoder_and_example_data_alone() -> None:
    """So a new encoder of a new media is one file in encoders/ and one in data/modalities/."""
    refuse(_words, AUDIO_WORDS.__contains__, KNOW_AUDIO)


def test_pixels_are_known_to_the_media_and_the_encoders_alone() -> None:
    refuse(_words, PIXEL_WORDS.__contains__, KNOW_PIXELS)


def test_files_stay_small_enough_to_read() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: size for name, size in sizes.items() if size > MAX_LINES}


def test_rooms_are_imported_at_the_top_but_for_a_few_that_cost_seconds() -> None:
    late = [(where, room) for path in FILES for where, room in _late_imports(path)]
    allowed = tuple(MAY_IMPORT_LATE)
    refused = [f"{where}: {room}" for where, room in late if not where.startswith(allowed)]
    assert not refused, "\n".join(refused)
    for prefix in allowed:
        assert any(where.startswith(prefix) for where, _ in late), f"{prefix} no longer needs leave"


@pytest.mark.parametrize(
    ("checked", "rooms"),
    [
        ("def f():\n    from mimo.checkpoint.hf.tiny import main", ["mimo.checkpoint"]),
        ("class A:\n    async def f(self):\n        if x:\n            import data", ["data"]),
        ("def f():\n    from mimo import device", ["mimo.device"]),
        ("def f():\n    def g():\n        from ..checkpoint import folder", ["mimo.checkpoint"]),
        ("def f():\n    from mimo.train.rank import run_rank", []),
        ("def f():\n    from . import rank", []),
        ("def f():\n    import torch", []),
        ("from mimo.checkpoint.hf.tiny import main", []),
        ("if TYPE_CHECKING:\n    from mimo.checkpoint.hf.tiny import main", []),
        ("def f():\n    if TYPE_CHECKING:\n        from mimo.checkpoint.hf.tiny import main", []),
    ],
)
def test_the_search_for_late_imports_finds_them(checked: str, rooms: list[str]) -> None:
    path = ROOT / "mimo" / "train" / "x.py"
    assert [room for _, room in _late_imports(path, checked)] == rooms


@pytest.mark.parametrize(
    ("search", "checked", "expected"),
    [
        ("_calls", "dist.new_group([0])", "new_group"),
        ("_calls", "HyperCommGrid([1], ['tp'])", "HyperCommGrid"),
        ("_device_names", "torch.cuda.synchronize()", "torch.cuda"),
        ("_device_names", "x = 'cuda:0'", "'cuda:0'"),
        ("_device_names", "f(backend='nccl')", "'nccl'"),
        ("_device_names", "from torch import cuda", "import torch.cuda"),
        ("_words", "from PIL import Image", "PIL"),
        ("_words", "x = {'a.wav': 1}", "wav"),
        ("_words", "# an audio clip\ndef f(row_pixels): ...", "row_pixels"),
        ("_words", "def f() -> None:\n    'Of audio.'", "audio"),
    ],
)
def test_the_searches_find_what_they_look_for(
    search: str, checked: str, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.py"
    path.write_text(checked)
    assert expected in [name for _, name in globals()[search](path)]


def _words(path: Path) -> Iterator[tuple[str, str]]:
    """Every word of a file, in strings and comments too; in lower case unless all capitals."""
    name = _name(path)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for word in re.findall(r"[A-Za-z_]+", line):
            yield f"{name}:{number}", word if word.isupper() else word.lower()


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), str(path)))


def _calls(path: Path) -> Iterator[tuple[str, str]]:
    for node in _nodes(path):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                yield f"{_name(path)}:{node.lineno}", function.attr
            elif isinstance(function, ast.Name):
                yield f"{_name(path)}:{node.lineno}", function.id


def _imports(path: Path) -> Iterator[str]:
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _device_names(path: Path) -> Iterator[tuple[str, str]]:
    """`torch.cuda`, however it is reached, and strings such as "cuda:0" or "nccl"."""
    for name in _imports(path):
        if name.startswith("torch.cuda"):
            yield _name(path), f"import {name}"
    for node in _nodes(path):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield f"{_name(path)}:{node.lineno}", "torch.cuda"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.partition(":")[0] in DEVICE_NAMES
        ):
            yield f"{_name(path)}:{node.lineno}", repr(node.value)


def _late_imports(path: Path, text: str | None = None) -> Iterator[tuple[str, str]]:
    """`file:function` and the other room, for every import of one inside a function."""
    own = path.relative_to(ROOT).with_suffix("").parts

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(child, function or child.name)
            elif isinstance(child, ast.Import | ast.ImportFrom) and function:
                rooms = {_room(name) for name in _imported(child, own)}
                for room in sorted(rooms - {None, _room(own)}, key=str):
                    yield f"{_name(path)}:{function}", str(room)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for other in child.orelse:
                    yield from walk(ast.Module([other], []), function)
            else:
                yield from walk(child, function)

    yield from walk(ast.parse(path.read_text() if text is None else text, str(path)), "")


def _imported(node: ast.Import | ast.ImportFrom, own: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The parts of every imported name; own: those of the importing file."""
    for alias in node.names:
        start = own[: -node.level] if isinstance(node, ast.ImportFrom) and node.level else ()
        module = node.module if isinstance(node, ast.ImportFrom) else None
        yield (*start, *(module.split(".") if module else ()), *alias.name.split("."))


def _room(parts: tuple[str, ...]) -> str | None:
    """The room of a module of ours, such as `mimo.checkpoint.hf` or `data`; else None."""
    if parts[0] not in FOLDERS:
        return None
    return ".".join(parts[:2]) if parts[0] == "mimo" else parts[0]
