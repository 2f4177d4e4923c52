"""Imports run only from a later room to an earlier one, and never in a circle.

`python -m tests.test_rooms` prints every violation, one a line.
"""

import ast
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from prb_jax.seams import BUILTIN, KINDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "prb_jax"

# A room imports from itself, from its own line and from the lines above it.
ORDER = (
    ("errors", "version", "seams", "plugins"),
    ("platform",),
    ("metrics",),
    ("records",),
    ("text",),
    ("trees",),
    ("models",),
    ("runs",),
    ("personal",),
    ("scoring",),
    ("training",),
    ("study",),
    ("behaviour",),
    ("reports",),
    ("serving",),
    ("building",),
    ("measure",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LINE = {room: line for line, rooms in enumerate(ORDER) for room in rooms}

BEHIND_SEAMS = (
    "prb_jax.models.attention.cudnn",
    "prb_jax.models.attention.first_use",
    "prb_jax.models.attention.stream_kernel",
    "prb_jax.models.checkpoints.adapter_config",
    "prb_jax.models.checkpoints.adapter_folder",
    "prb_jax.models.checkpoints.as_stored",
    "prb_jax.platform.storage",
    "prb_jax.models.checkpoints.encoder_folder",
    "prb_jax.models.checkpoints.expert_tensors",
    "prb_jax.models.checkpoints.fill_quantized",
    "prb_jax.models.checkpoints.tied",
    "prb_jax.models.checkpoints.torch_file",
    "prb_jax.models.config.encoder",
    "prb_jax.models.encoder",
    "prb_jax.models.experts",
    "prb_jax.models.grouped",
    "prb_jax.models.readouts.pair_model",
    "prb_jax.models.readouts.score_pairs",
    "prb_jax.text.pair_tokenizer",
    "prb_jax.models.readouts.gated",
    "prb_jax.models.readouts.heads",
    "prb_jax.models.readouts.registry",
    "prb_jax.text.internlm2_tokenizer",
    "prb_jax.records.sources.benchmarks",
    "prb_jax.records.sources.folders",
    "prb_jax.records.csv_files",
    "prb_jax.records.arrow_tables",
    "prb_jax.records.sources.large",
    "prb_jax.models.attention.batched",
    "prb_jax.models.delta_layer",
    "prb_jax.models.delta_rule",
    "prb_jax.trees.chunk_tables",
    "prb_jax.models.readouts.language_model",
    "prb_jax.trees.even_work",
    "prb_jax.trees.kernel_tables",
    "prb_jax.personal.few_shot",
    "prb_jax.models.checkpoints.exported",
    "prb_jax.models.checkpoints.hub_folder",
    "prb_jax.models.config.experts",
    "prb_jax.models.config.families",
    "prb_jax.models.config.mixed_layers",
    "prb_jax.models.config.recurrence",
    "prb_jax.models.config.ropes",
    "prb_jax.models.config.unknown",
    "prb_jax.models.mixed_stacks",
    "prb_jax.models.readouts.recognise",
    "prb_jax.models.readouts.row",
    "prb_jax.platform.hub",
    "prb_jax.platform.processes.collectives",
    "prb_jax.records.foreign_fields",
    "prb_jax.records.layouts",
    "prb_jax.records.messages",
    "prb_jax.records.other_files",
    "prb_jax.records.remarks",
    "prb_jax.records.template_marks",
    "prb_jax.records.sources.python",
    "prb_jax.records.sources.recorded",
    "prb_jax.scoring.large_table",
    "prb_jax.scoring.paper",
    "prb_jax.scoring.shorten",
    "prb_jax.text.normalisers",
    "prb_jax.text.own_marks",
    "prb_jax.text.template_clock",
)
"""Modules and rooms that the core finds by name, in the table of `prb_jax.seams`, and never imports."""

CORE = {
    "prb_jax.scoring.evaluate": (
        *BEHIND_SEAMS,
        "prb_jax.metrics.clusters",
        "prb_jax.metrics.coverage",
        "prb_jax.metrics.summary",
        "prb_jax.metrics.uncertainty",
        "prb_jax.models.flops",
        "prb_jax.platform.meshes",
        "prb_jax.platform.processes.agreement",
        "prb_jax.plugins",
        "prb_jax.records.digests",
        "prb_jax.records.joined",
        "prb_jax.records.large_lines",
        "prb_jax.records.schema",
        "prb_jax.runs.other_inputs",
        "prb_jax.runs.progress",
        "prb_jax.runs.read_rows",
        "prb_jax.runs.sealed",
        "prb_jax.runs.users",
        "prb_jax.scoring.clusters",
        "prb_jax.scoring.history",
        "prb_jax.scoring.kinds",
        "prb_jax.scoring.summary",
        "prb_jax.text.prompts",
        "prb_jax.text.trained_view",
        "prb_jax.records.benchmarks",
        "prb_jax.records.sources.prepared",
        "prb_jax.trees.sequences",
        "prb_jax.trees.token_store",
        "prb_jax.models.checkpoints.out_of_range",
        "prb_jax.models.lora",
        "prb_jax.models.quantization",
        "prb_jax.models.readouts.module",
        "prb_jax.models.readouts.user_module",
        "prb_jax.scoring.module_model",
        "prb_jax.personal.prompts",
        "prb_jax.runs.blocks",
        "prb_jax.runs.clusters",
        "prb_jax.runs.finished",
        "prb_jax.runs.merging",
        "prb_jax.runs.parts",
        "prb_jax.runs.weights_and_biases",
        "prb_jax.models.readouts.response_logprobs",
        "prb_jax.scoring.baseline_rows",
        "prb_jax.scoring.baselines",
        "prb_jax.scoring.benchmark_scores",
        "prb_jax.scoring.controls",
        "prb_jax.scoring.encode_together",
        "prb_jax.scoring.implicit",
        "prb_jax.scoring.left_out",
        "prb_jax.scoring.plain",
        "prb_jax.scoring.same_choices",
        "prb_jax.scoring.sequence_model",
        "prb_jax.scoring.personalised",
        "prb_jax.scoring.prepared_tokens",
        "prb_jax.scoring.prompt_extras",
        "prb_jax.scoring.remote.score_server",
    ),
    "prb_jax.training.train": (
        *BEHIND_SEAMS,
        "prb_jax.models.lora",
        "prb_jax.models.quantization",
        "prb_jax.models.vocabulary_heads",
        "prb_jax.platform.extras",
        "prb_jax.scoring.inputs",
        "prb_jax.scoring.scorer",
        "prb_jax.text.new_tokenizer",
        "prb_jax.training.adapter_export",
        "prb_jax.training.curves",
        "prb_jax.training.events",
        "prb_jax.training.layouts",
        "prb_jax.training.scratch",
        "prb_jax.training.user_order",
    ),
}
"""The two ways into the core, a score and a gradient, and what they do not import."""

LARGEST = (
    ("prb_jax.scoring.evaluate", 61, 12_950),
    ("prb_jax.training.train", 82, 17_050),
    ("prb_jax.behaviour.rl.ppo", 123, 24_500),
)
"""Ways into the core, and how many files and lines they may reach by imports."""


@dataclass(frozen=True, order=True)
class Import:
    """An import of one module of the package by another one."""

    importer: str
    line: int
    imported: str
    for_types: bool  # under TYPE_CHECKING: it never runs

    def __str__(self) -> str:
        place = f"{self.importer.replace('.', '/')}:{self.line}"
        return f"{place} imports {self.imported}" + (" (for types)" if self.for_types else "")


def modules_of(root: Path) -> dict[str, Path]:
    """The file of each module of the package in ``root``, by the module's name."""
    names = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def room_of(module: str) -> str:
    """The room of a module: the second part of its name; "" for the package's own ``__init__``."""
    return module.partition(".")[2].partition(".")[0]


def named_in(tree: ast.AST, package: str, for_types: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Yield each dotted name that a file may import, wherever it is written, with its line.

    ``from a import b`` yields ``a.b``. A string that is a module's name counts too: tables of modules
    that are imported on first use hold such strings, also as "module:name"; not that of the file's own
    package, whose data files are found by it. Docstrings and f-strings hold longer texts.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for body in node.body:
                yield from named_in(ast.Module([body], []), package, True)
            yield from named_in(ast.Module(node.orelse, []), package, for_types)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{source}.{alias.name}", node.lineno, for_types) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not f"{package}.".startswith(f"{node.value}."):
                module, _, name = node.value.partition(":")
                yield f"{module}.{name}" if name and "." in module else node.value, node.lineno, for_types
        else:
            yield from named_in(node, package, for_types)


@functools.cache
def imports_of(root: Path) -> list[Import]:
    """Every import of one module of the package by another one, also inside functions."""
    modules, imports = modules_of(root), set()
    for importer, path in modules.items():
        if importer == f"{PACKAGE}.seams":  # its table names what the rooms ask for, and imports none of it
            continue
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for name, line, for_types in named_in(ast.parse(path.read_text(encoding="utf-8")), package):
            imported = name if name in modules else name.rpartition(".")[0]
            if imported == PACKAGE and name == f"{PACKAGE}.__version__":
                imported = f"{PACKAGE}.version"
            if imported in modules and imported != importer:
                imports.add(Import(importer, line, imported, for_types))
    return sorted(imports)


def without_room(root: Path) -> list[str]:
    """Modules in no room of the order, and rooms of the order without a module."""
    rooms = {name: room_of(name) for name in modules_of(root) if room_of(name)}
    lost = [f"{name} is in no room" for name, room in rooms.items() if room not in LINE]
    return lost + [f"room {room} has no module" for room in LINE if room not in rooms.values()]


def upward(root: Path) -> list[str]:
    """Imports from an earlier room to a later one, and of the public names by the package itself."""
    wrong = []
    for one in imports_of(root):
        above, below = room_of(one.importer), room_of(one.imported)
        if one.importer == PACKAGE:  # the public names are imported on first use, from every room
            continue
        if below == "" or (above in LINE and below in LINE and LINE[below] > LINE[above]):
            wrong.append(f"{one} ({above or PACKAGE} before {below or 'the public names'})")
    return wrong


def reached(start: str, root: Path) -> set[str]:
    """The modules that a module may import, itself or through others."""
    imported: dict[str, set[str]] = {}
    for one in imports_of(root):
        if not one.for_types:
            imported.setdefault(one.importer, set()).add(one.imported)
    found, left = set[str](), {start}
    while left:
        found.add(module := left.pop())
        left |= imported.get(module, set()) - found
    return found


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """The shortest circles, none of which shares a name with a shorter one that is listed."""
    after: dict[str, set[str]] = {}
    for start, end in edges:
        after.setdefault(start, set()).add(end)
    closed: list[list[str]] = []
    for start, end in sorted(edges):
        ways = deque([[end]])
        seen = {end}
        while ways:
            way = ways.popleft()
            if way[-1] == start:
                closed.append([start, *way])
                break
            new = sorted(after.get(way[-1], set()) - seen)
            seen.update(new)
            ways.extend([*way, name] for name in new)
    listed: list[list[str]] = []
    for circle in sorted(closed, key=len):
        if all(set(circle).isdisjoint(other) for other in listed):
            listed.append(circle)
    return listed


def circles_between_modules(root: Path) -> list[list[str]]:
    """Circles of imports between modules; imports for types never run and cannot close one."""
    edges = {(one.importer, one.imported) for one in imports_of(root) if not one.for_types}
    return circles({edge for edge in edges if PACKAGE not in edge})


def circles_on_a_line(root: Path) -> list[list[str]]:
    """Circles of imports between rooms that share a line of the order."""
    rooms = {(room_of(one.importer), room_of(one.imported)) for one in imports_of(root)}
    return circles({(a, b) for a, b in rooms if a != b and a in LINE and LINE.get(b) == LINE[a]})


def violations(root: Path) -> list[str]:
    """Every violation of the order in ``root``, as lines of text."""
    closed = circles_between_modules(root) + circles_on_a_line(root)
    return without_room(root) + upward(root) + [f"circle: {' -> '.join(circle)}" for circle in closed]


def test_imports_run_from_a_later_room_to_an_earlier_one_and_in_no_circle():
    wrong = violations(ROOT)
    assert not wrong, "\n".join([f"{len(wrong)} violations:", *wrong])


def test_the_core_imports_nothing_behind_a_seam():
    modules = modules_of(ROOT)
    for start, behind in CORE.items():
        found = sorted(reached(start, ROOT))
        assert len(found) > 50, start
        for room in behind:
            assert [name for name in modules if f"{name}.".startswith(f"{room}.")], room
            assert not [name for name in found if f"{name}.".startswith(f"{room}.")], start


@pytest.mark.parametrize(("start", "files", "lines"), LARGEST)
def test_the_core_stays_small(start, files, lines):
    modules = modules_of(ROOT)
    found = [modules[name] for name in reached(start, ROOT)]
    assert len(found) <= files
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found) <= lines


def test_every_place_of_the_table_of_seams_is_a_value():
    modules = modules_of(ROOT)
    types = {name: place for name, place in KINDS.items() if place.startswith(PACKAGE)}
    for kind, table in {**BUILTIN, "types of plug-ins": types}.items():
        for name, place in table.items():
            module, _, value = place.partition(":")
            assert value in ast_names(modules[module]), f"{kind} {name}: {place}"


def ast_names(path: Path) -> set[str]:
    """The names that a file defines or imports at its top level."""
    found = set[str]()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= {alias.asname or alias.name for alias in getattr(node, "names", ())}
        found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        parts = [part for target in targets if target for part in ast.walk(target)]
        found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found


def test_violations_are_found(tmp_path):
    files = {
        "__init__": "from prb_jax.cli import main",
        "errors": "",
        "version": "",
        "platform": "import prb_jax.errors\nfrom prb_jax import __version__",
        "records.__init__": "",
        "records.record": "def late():\n    from prb_jax.text.template import render",
        "records.files": "from . import record\nfrom .record import Record",
        "text.__init__": "TABLE = {'render': 'prb_jax.models.decoder:Decoder', 'prb_jax.models': 1}",
        "text.template": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import prb_jax.cli",
        "models.__init__": '"""It says prb_jax.cli, and imports nothing."""',
        "models.decoder": "from prb_jax.models import layers",
        "models.layers": "from ..models.decoder import Decoder\nimport numpy",
        "cli": "import prb_jax\nfrom prb_jax.records import record, files",
        "extra": "",
    }
    for name, text in files.items():
        path = tmp_path / PACKAGE / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert upward(tmp_path) == [
        "prb_jax/cli:1 imports prb_jax (cli before the public names)",
        "prb_jax/records/record:2 imports prb_jax.text.template (records before text)",
        "prb_jax/text:1 imports prb_jax.models (text before models)",
        "prb_jax/text:1 imports prb_jax.models.decoder (text before models)",
        "prb_jax/text/template:3 imports prb_jax.cli (for types) (text before cli)",
    ]
    layers, decoder = "prb_jax.models.layers", "prb_jax.models.decoder"
    assert circles_between_modules(tmp_path) == [[decoder, layers, decoder]]
    assert circles_on_a_line(tmp_path) == []
    assert {"prb_jax.extra is in no room", "room measure has no module"} <= set(without_room(tmp_path))
    assert circles({("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")}) == [["a", "b", "c", "a"]]


if __name__ == "__main__":
    print(*violations(ROOT), sep="\n")
