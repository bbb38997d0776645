"""The Python that a spec names: found, executed, known by its files, and its failures told.

Only a function that is declared to return an `OwnTask` is called, so that a spec without a file beside it cannot call
whatever happens to be installed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forwardtune.errors import ExperimentError, ForwardTuneError, is_lack_of_memory
from forwardtune.toml_tables import nearest

DECLARED = "OwnTask"
_brought: dict[str, ModuleType] = {}
"""Modules from files beside specs, by name."""


class Code:
    """The function that a task names, and its files: that of its module, and those beside it that this one imports."""

    def __init__(self, task: str, folder: Path) -> None:
        self.task = task
        self.files: Mapping[Path, bytes] = {}
        name, _, function = task.partition(":")
        module = self._imported(name, folder.resolve())
        where = _origin(module) or name
        make = getattr(module, function, None)
        if not callable(make):
            functions = [key for key, value in vars(module).items() if _is_declared(value)]
            raise ExperimentError(
                f"the task {task}: {where} has no function {function!r}{nearest(function, functions)}"
            )
        if not _is_declared(make):
            raise ExperimentError(
                f"the task {task}: {function} in {where} is not declared to return an {DECLARED}; write "
                f"`def {function}(...) -> {DECLARED}:`"
            )
        self._make: Callable[..., Any] = make

    @property
    def digest(self) -> str:
        """Of the content of all files, whatever folder they are in."""
        contents = sorted((file.name, content) for file, content in self.files.items())
        return hashlib.sha256(repr(contents).encode()).hexdigest()

    def make(self, options: Mapping[str, object]) -> Any:
        """What the function returns."""
        try:
            signature = inspect.signature(self._make)
            signature.bind(**options)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "none"
            raise ExperimentError(f"the options of the task {self.task}: {error}; its function takes {takes}") from None
        with self.telling(self.task.partition(":")[2]):
            return self._make(**options)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tells failures of the user's code with the line of it that they come from."""
        try:
            yield
        except ForwardTuneError:
            raise
        except (Exception, SystemExit) as error:
            if is_lack_of_memory(error):
                raise
            text = error.msg if isinstance(error, SyntaxError) else error
            raise ExperimentError(
                f"the task {self.task}: {what} failed with {type(error).__name__}: {text} ({self._line(error)})"
            ) from error

    def _line(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError):
            return f"{error.filename}, line {error.lineno}"
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if Path(frame.filename) in self.files]
        frame = (own or frames)[-1]
        return f"{frame.filename}, line {frame.lineno}: {frame.line}"

    def _imported(self, name: str, folder: Path) -> ModuleType:
        """The module from a file in the spec's folder, executed anew, or else one that is installed."""
        if sys.path[0] != str(folder):
            sys.path.insert(0, str(folder))  # for good, since functions may import when they are called
        file = folder / f"{name}.py"
        importlib.invalidate_caches()
        with self.telling("its import"):
            if file.is_file():
                self.files = sources(file, folder)
                return self._execute(name, file)
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not (error.name and f"{name}.".startswith(f"{error.name}.")):
                    raise
                raise ExperimentError(
                    f"the task {self.task}: there is no file {file}, and no module {name!r} is installed"
                ) from None
            if origin := _origin(module):
                self.files = sources(origin, origin.parent if module.__package__ else origin)
            return module

    def _execute(self, name: str, file: Path) -> ModuleType:
        """Executes the very bytes by which the file is known; what it imports from beside it is imported anew."""
        for key, imported in list(sys.modules.items()):
            if _brought.get(key) is imported or _origin(imported) in self.files:
                del sys.modules[key]
        for beside in (own for own in self.files if own.parent == file.parent):
            if other := sys.modules.get(beside.stem):
                raise ExperimentError(
                    f"the task {self.task}: there is another module {beside.stem!r} ({_origin(other) or 'built in'}); "
                    f"give {beside} another name"
                )
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # which may be stale for a second
        try:
            exec(compile(self.files[file], str(file), "exec", dont_inherit=True), vars(module))
        finally:
            sys.dont_write_bytecode = writes
            _brought.update({key: own for key, own in list(sys.modules.items()) if _origin(own) in self.files})
        return module


def _origin(module: ModuleType) -> Path | None:
    """The file that a module is in."""
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None


def _is_declared(value: object) -> bool:
    """Whether it is a function that is said to return an `OwnTask`; annotations may be texts."""
    said = getattr(value, "__annotations__", {}).get("return") if inspect.isfunction(value) else None
    name = said if isinstance(said, str) else getattr(said, "__name__", "")
    return name.strip("'\"").rpartition(".")[2] == DECLARED


def sources(file: Path, folder: Path) -> dict[Path, bytes]:
    """A file of Python and those in a folder that it imports, and so on: found without executing them."""
    found: dict[Path, bytes] = {}
    waiting = [file]
    while waiting:
        here = waiting.pop()
        if here in found or not here.is_file() or not here.is_relative_to(folder):
            continue
        found[here] = here.read_bytes()
        for node in ast.walk(ast.parse(found[here], str(here))):
            for parent, name in _imports(node, here, folder):
                path = parent.joinpath(*name.split("."))
                waiting += [path.with_name(f"{path.name}.py"), path / "__init__.py"] if name else []
    return found


def _imports(node: ast.AST, here: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """What a statement may import: a folder, and the name of a module there."""
    if isinstance(node, ast.Import):
        yield from ((folder, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parent = here.parents[node.level - 1] if node.level else folder
        module = node.module or ""
        yield parent, module
        yield from ((parent, f"{module}.{alias.name}".strip(".")) for alias in node.names if alias.name != "*")
