"""Valid files, changed at random, for every reader: what leaves it is an error of ours, soon, in little memory.

    python -m tests.fuzz READER --seconds 60

Contents change by their structure (kinds, missing and additional keys, extreme numbers, nesting), with checksums
computed anew, and files byte by byte. The tests make a few such files for each reader, this command as many as it can.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from itertools import count
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
from torch import nn

import forwardtune as ft
from forwardtune.errors import ForwardTuneError
from forwardtune.experiments import spec as specs
from forwardtune.experiments.evidence import Evidence
from forwardtune.experiments.plan import plan
from forwardtune.experiments.result import RunResult
from forwardtune.experiments.scoring import score
from forwardtune.experiments.store import SCHEMA, Store
from forwardtune.finetuning import tuned
from forwardtune.ledger.format import checksum
from forwardtune.ledger.journal import FRAME, MAGIC, frame, read_journal
from forwardtune.ledger.states import State, pack_states, read_states, state_paths
from forwardtune.tasks.identity import fingerprint
from forwardtune.tasks.texts.data import from_files, plain_texts
from tests.helpers import tiny

SECONDS, MEGABYTES = 2.0, 300
"""Of the processor and of memory: more than any of these small files may take."""

RAW = {
    "@huge": "1e400",
    "@digits": "9" * 5000,
    "@many": "9" * 401,
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@nested": "[" * 300 + "]" * 300,
    "@tables": '{"a":' * 300 + "1" + "}" * 300,
}
"""What a strategy names and a file spells out."""
INTEGERS = [0, 1, -1, 2, 3, 7, 255, 300, 2**15, 2**16 - 1, 2**16, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63), 10**400]
FLOATS = [0.5, -0.0, 1e-320, 1e-9, 1e9, 1e300, math.inf, -math.inf, math.nan]
TEXTS = ["", "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "a\u202eb", "\ud800", "../../etc/passwd", "load", "nan", "x" * 5000]
VALUES = st.one_of(
    st.none() | st.booleans() | st.sampled_from(INTEGERS) | st.sampled_from(FLOATS),
    st.sampled_from([*TEXTS, *RAW]),
    st.sampled_from([[], {}, [[]], [None], [1, 2], [1.0, "a"], {"a": 1}, {"": None}, [[0, 0]], [{}]]),
    st.integers() | st.floats() | st.text(max_size=4),
)


@st.composite
def changed(draw, documents):
    """One of the documents with some of its values replaced, taken away, added, wrapped or exchanged."""
    root = [deepcopy(draw(st.sampled_from(documents)))]
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        places = list(_places(root))
        parent, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap", "exchange", "repeat"])):
            case "replace":
                parent[key] = deepcopy(draw(VALUES))
            case "remove" if parent is not root:
                del parent[key]
            case "add" if isinstance(parent[key], dict):
                parent[key][draw(st.text(max_size=4))] = deepcopy(draw(VALUES))
            case "wrap":
                parent[key] = [parent[key]]
            case "exchange":
                other, there = places[draw(st.integers(0, len(places) - 1))]
                parent[key] = deepcopy(other[there])
            case "repeat" if isinstance(parent[key], list):
                parent[key] = parent[key] * draw(st.sampled_from([2, 7, 100]))
    return root[0]


def _places(root):
    """Where every value is: the list or table that holds it, and its index or key."""
    left = [(root, 0)]
    while left:
        parent, key = left.pop()
        yield parent, key
        value = parent[key]
        left += (
            [(value, inner) for inner in (value if isinstance(value, dict) else range(len(value)))]
            if isinstance(value, dict | list)
            else []
        )


@st.composite
def damaged(draw, contents):
    """One of the files with bytes that are changed, cut, added or repeated, or in another encoding."""
    data = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["set", "set", "cut", "add", "repeat", "recode"])):
            case "set" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.sampled_from([1, 10, len(data)]))]
            case "add":
                data[at:at] = draw(
                    st.binary(max_size=9) | st.sampled_from([b'"', b"\0", b"\r", b"\xff\xfe", b"[" * 5000])
                )
            case "repeat":
                data[at:at] = data[at : at + draw(st.sampled_from([1, 10, 1000]))]
            case "recode":
                data = bytearray(bytes(data).decode("latin1").encode(draw(st.sampled_from(["utf-16", "utf-8-sig"]))))
    return bytes(data)


def as_json(document) -> bytes:
    text = json.dumps(document)
    for name, spelled in RAW.items():
        text = text.replace(f'"{name}"', spelled)
    return text.encode()


def as_toml(document) -> bytes:
    """A table as TOML, with inline tables inside."""
    lines = (
        [f"{json.dumps(key)} = {_toml(value)}\n" for key, value in document.items()] if _is_table(document) else [""]
    )
    return "".join(lines).encode("utf-8", "surrogatepass")


def _toml(value) -> str:
    if isinstance(value, str):
        return RAW.get(value, json.dumps(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return (
        {None: '""', True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


def _is_table(value) -> bool:
    return isinstance(value, dict)


class Reader:
    """`files` is a strategy of what is read: names and contents; `read` reads them in a folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folder = home / "files"
        self.folder.mkdir(parents=True)

    files: st.SearchStrategy

    def read(self) -> None:
        raise NotImplementedError

    def given(self, files) -> str:
        """Reads the files; what came of it."""
        for name, data in files.items():
            (self.folder / name).write_bytes(data)
        begun = time.process_time()
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                self.read()
            outcome = "accepted"
        except ForwardTuneError as error:
            text = str(error)
            assert text.replace("\n", "").isprintable(), text
            assert 0 < len(text) < 3000, text
            outcome = "refused"
        assert time.process_time() - begun < SECONDS
        assert _peak() - before < MEGABYTES * 1000
        return outcome


def _peak() -> int:
    """The most memory that this process has had since it was last asked, in kilobytes."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )


class Net(nn.Module):
    """Tied weights, a buffer, and a loss for every example."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self):
        self.calls += 1
        return self.last(self.first(torch.eye(3)).tanh()).square()[:, 0]


def _recorded(path: Path, kind, steps: int, **options) -> None:
    model = Net()
    groups = [{"params": list(model.first.named_parameters())}, {"params": list(model.last.named_parameters())}]
    optimizer = kind(groups, **options, recorder=ft.Ledger(path, model))
    by_example = not isinstance(options.get("directions", 1), int)
    for step in range(steps):
        optimizer.step(lambda: model() if by_example else model().mean())
        if step == steps // 2:
            optimizer.param_groups[0]["note"] = "changed"
    optimizer.recorder.close()


RUNS = {
    "vs2p": lambda path: _recorded(path, ft.VS2P, 3, lr=1.0),
    "auto": lambda path: _recorded(path, ft.VS2P, 25, lr="auto", directions="auto"),
    "s2p": lambda path: _recorded(path, ft.S2P, 3, step_size="dynamic", L=1.0, directions=2),
}


def document_of(path: Path):
    """What a journal consists of."""
    contents = read_journal(path)
    steps = [
        {
            "numbers": list(struct.unpack(f"<{len(row.numbers) // 8}d", row.numbers)),
            "settings": _loaded(row.settings),
        }
        for row in contents.rows
    ]
    anchors = [[anchor.step, anchor.digest, anchor.checkpoint] for anchor in contents.anchors]
    states = [
        {"step": step, "states": [[s.name, s.dtype, list(s.shape), s.value.hex()] for s in states]}
        for step, states in read_states(path, contents.identity).values()
    ]
    header = json.loads(contents.header)
    return {"schema": 4, "header": header, "steps": steps, "anchors": anchors, "states": states}


def encoded(document) -> bytes:
    """As a journal, as far as the document has what one consists of."""
    return b"".join(_framed(document))


def _framed(document) -> list[bytes]:
    table = document if _is_table(document) else {}
    schema = table.get("schema")
    payloads = [b"H" + bytes([schema if schema in range(256) else 0]) + as_json(table.get("header"))]
    for step in _items(table.get("steps")):
        step = step if _is_table(step) else {}
        if step.get("settings") is not None:
            payloads.append(b"C" + as_json(step["settings"]))
        numbers = [_float(number) for number in _items(step.get("numbers"))]
        payloads.append(b"S" + struct.pack(f"<{len(numbers)}d", *numbers))
    payloads += [b"A" + as_json(anchor) for anchor in _items(table.get("anchors"))]
    frames, crc = [MAGIC], 0
    for payload in payloads:
        framed, crc = frame(payload, crc)
        frames.append(framed)
    return frames


def _files(document) -> dict[str, bytes]:
    """The journal, and its state files."""
    frames = _framed(document)
    identity = zlib.crc32(frames[1][FRAME.size :])
    table = document if _is_table(document) else {}
    return {"run.ledger": b"".join(frames), **_states(_items(table.get("states")), identity)}


def _states(files, identity: int) -> dict[str, bytes]:
    packed = {path.name: b"" for path in state_paths(Path("run.ledger"))}
    for name, file in zip(packed, files, strict=False):
        if not _is_table(file) or not isinstance(file.get("step"), int) or not 0 <= file["step"] < 2**64:
            continue
        states = [
            State(entry[0], entry[1], entry[2], bytes.fromhex(entry[3]))
            for entry in _items(file.get("states"))
            if isinstance(entry, list) and len(entry) == 4 and _is_hex(entry[3])
        ]
        packed[name] = pack_states(identity, file["step"], states)
    return packed


class Ledger(Reader):
    """Of a live ledger: read, shown, compared, replayed, exported and resumed."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.model = Net().state_dict()
        documents, contents = [], []
        for name, record in RUNS.items():
            path = home / f"{name}.ledger"
            record(path)
            documents.append(document_of(path))
            contents.append(path.read_bytes())
        self.file = self.folder / "run.ledger"
        self.files = st.one_of(changed(documents).map(_files), damaged(contents).map(self._beside))

    def _beside(self, data: bytes) -> dict[str, bytes]:
        return {"run.ledger": data, "run.ledger.state0": b"", "run.ledger.state1": b""}

    def read(self) -> None:
        _use(self.file, self.home / "vs2p.ledger", self.home / "out.safetensors")
        model = Net()
        optimizer, _ = ft.resume(model, self.file, repair=True)
        repr(optimizer)
        optimizer.recorder.close()

    def given(self, files) -> str:
        (self.folder / "run.ledger.damaged").unlink(missing_ok=True)
        return super().given(files)


def _use(file: Path, other: Path, out: Path) -> None:
    """What is done with a ledger of either kind."""
    run = ft.ledger.read(file)
    repr(run)
    for record in run.records():
        str(record) if record.lines else None
        run.trail(record)
    ft.ledger.diff(file, other)
    model = Net()
    ft.replay(model, file, until=run.end)
    if not run.damage:
        assert all(torch.isfinite(p).all() for p in model.parameters())
    out.unlink(missing_ok=True)
    ft.ledger.export(file, out, until=run.end)


def _loaded(text):
    return None if text is None else json.loads(text)


def _items(value) -> list:
    return value if isinstance(value, list) else []


def _float(value) -> float:
    try:
        return float(RAW.get(value, value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_hex(text) -> bool:
    return isinstance(text, str) and len(text) % 2 == 0 and not set(text) - set("0123456789abcdef")


class Export(Reader):
    """Of an exported ledger: read, compared, replayed and exported once more."""

    TEXTS = ("format", "schema", "steps", "lines", "buffers")

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        documents, contents = [], []
        for name, record in RUNS.items():
            record(home / f"{name}.ledger")
            path = home / f"{name}.safetensors"
            ft.ledger.export(home / f"{name}.ledger", path)
            contents.append(path.read_bytes())
            documents.append(self._document(path))
        self.files = st.one_of(changed(documents).map(self._encoded), damaged(contents)).map(
            lambda data: {"run.safetensors": data}
        )

    def _document(self, path: Path):
        with safe_open(path, "numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = {key: text for key, text in file.metadata().items() if key != "crc"}
        columns = {name: {"kind": array.dtype.str, "values": array.tolist()} for name, array in arrays.items()}
        parsed = {key: text if key in self.TEXTS else json.loads(text) for key, text in metadata.items()}
        return {"metadata": parsed, "columns": columns}

    def _encoded(self, document) -> bytes:
        table = document if _is_table(document) else {}
        arrays, metadata = {}, {}
        for name, column in (table.get("columns") if _is_table(table.get("columns")) else {}).items():
            column = column if _is_table(column) else {}
            try:
                kind = np.dtype(column.get("kind"))
                arrays[_plain(name)] = np.array(column.get("values"), kind if kind.str[1:] in KINDS else "<f8")
            except (TypeError, ValueError, OverflowError, AttributeError, SyntaxError):
                arrays[_plain(name)] = np.array([math.nan])
        for key, value in (table.get("metadata") if _is_table(table.get("metadata")) else {}).items():
            metadata[_plain(key)] = (
                _plain(value) if isinstance(value, str) and key in self.TEXTS else as_json(value).decode()
            )
        metadata["crc"] = str(checksum(arrays, metadata))
        return save(arrays, metadata)

    def read(self) -> None:
        _use(self.folder / "run.safetensors", self.home / "vs2p.safetensors", self.home / "out.safetensors")


KINDS = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1")


def _plain(text: str) -> str:
    """Without what UTF-8 cannot say."""
    return RAW.get(text, text).encode("utf-8", "replace").decode()


SETTINGS = {
    "format": tuned.FORMAT,
    "run": "0123456789abcdef",
    "keep": "best",
    "model": "",
    "setup": "prompt",
    "adapter": "none",
    "dtype": "float32",
    "pad_token": "",
    "max_length": 64,
    "template": "{text} It was",
    "words": ["bad", "good"],
    "columns": ["text"],
    "classes": ["neg", "pos"],
    "low": 0.0,
    "high": 1.0,
    "final": {"train_loss": 0.5, "test_loss": 0.6, "accuracy": None},
}


class Settings(Reader):
    """Of a tuned model: `forwardtune.json`, beside the model that is then asked."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        tiny.causal(self.folder)
        documents = [SETTINGS, {**SETTINGS, "adapter": "lora", "model": "/tmp/b", "words": [], "classes": []}]
        files = st.one_of(changed(documents).map(as_json), damaged(list(map(as_json, documents))))
        self.files = files.map(lambda data: {tuned.SETTINGS: data})

    def read(self) -> None:
        list(tuned.Tuned(self.folder).answers([("a fine film",)] * 2))


def _result(evaluations: int, **fields):
    scores = {"train_loss": 0.5, "test_loss": None, "accuracy": 0.75}
    points = range(evaluations)
    return {
        "title": "digits-cnn VS2P lr 1 seed 0",
        "status": "finished",
        "reason": "",
        "queries": 60,
        "metrics": ["accuracy"],
        "final": scores,
        "plateaus": 0,
        "agreement": 0.1,
        "weights": 100,
        "data": {"name": "digits", "train": 1400, "test": 397, "digest": "0" * 16, "note": "", "majority": 0.1},
        "base": {"id": "0" * 16, "digest": "1" * 64},
        "code": {"versions": {"torch": "2.0"}, "commit": None, "dirty": None},
        "device": "cpu",
        "threads": 1,
        "circumstances": {
            "host": {"name": "host", "cpu": "cpu", "cores": 2, "system": "Linux"},
            "started": "2026-01-01T00:00:00+00:00",
            "finished": "2026-01-01T00:01:00+00:00",
            "sessions": 1,
            "seconds": 1.5,
            "peak_memory": 1000,
        },
        "curve": {
            "queries": [30 * i for i in points],
            **{name: [value for _ in points] for name, value in scores.items()},
        },
        "trace": {"queries": [30, 60], "loss": [1.0, None], "gamma": [0.1, 0.2], "alpha": [0.1, 0.1]},
        **fields,
    }


SPEC = {
    "title": "a test",
    "queries": 60,
    "batch": 8,
    "seeds": [0],
    "evaluations": 2,
    "train_examples": 40,
    "test_examples": 40,
    "workloads": [{"name": "digits", "data": "digits", "network": "cnn", "weights": "random"}],
    "methods": [
        {"method": "VS2P", "lr": [1.0]},
        {"method": "STP", "lr": [1e-3], "scale": "absolute", "directions": 2},
    ],
}


class Result(Reader):
    """Of the result of a run in a store: scored and written once more."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.spec = specs.parse(as_toml(SPEC).decode(), "test", home)
        self.store = Store(home / "store")
        self.run = plan(self.spec)[0]
        for run in plan(self.spec):
            self.store.save(RunResult.from_json(self.document(run)))
        document = self.document(self.run)
        files = st.one_of(changed([document]).map(as_json), damaged([as_json(document)]))
        self.folder = self.store.runs
        self.files = files.map(lambda data: {f"{self.run.id}.json": data})

    def document(self, run):
        return {"schema": SCHEMA, "id": run.id, "run": asdict(run.description), **_result(3)}

    def read(self) -> None:
        result = self.store.result(self.run.id)
        assert result.told_score
        json.dumps(result.to_json(), allow_nan=False)
        score(self.spec, self.store)


class EvidenceFile(Result):
    """Of results in one file."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        documents = [self.document(run) for run in plan(self.spec)]
        for document in documents:
            document["trace"] = {"queries": []}
        files = st.one_of(changed([documents]).map(self._lines), damaged([self._lines(documents)]))
        self.folder = self.home
        self.files = files.map(lambda data: {"test.jsonl": data})

    @staticmethod
    def _lines(documents) -> bytes:
        """One by one, under the hash of whatever each describes."""
        for document in _items(documents):
            if _is_table(document) and "id" in document:
                document["id"] = fingerprint(document.get("run"))
        return b"\n".join(map(as_json, _items(documents)))

    def read(self) -> None:
        evidence = Evidence(self.folder / "test.jsonl")
        for run in plan(self.spec):
            if result := evidence.result(run.id):
                assert result.told_score
        score(self.spec, evidence)


class SpecFile(Reader):
    """Of a comparison: parsed and planned."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        texts = {
            **SPEC,
            "rho": 0.01,
            "workloads": [
                {
                    "data": "files",
                    "network": "transformer",
                    "weights": "model",
                    "train": "a.csv",
                    "text": ["a", "b"],
                    "label": "c",
                    "words": ["yes", "no"],
                }
            ],
        }
        pretrained = {**SPEC["workloads"][0], "pretrain": {"data": "digits", "steps": 3, "shift": 1}}
        auto = {
            **SPEC,
            "distribution": "rademacher",
            "workloads": [pretrained],
            "methods": [{"method": "VS2P", "lr": "auto", "directions": "auto"}],
        }
        s2p = {"method": "S2P", "label": "mine", "lr": [1.0], "rounding": "nearest", "probes": "in-place"}
        own = {**SPEC, "workloads": [{"task": "os:system", "options": {"command": "touch owned"}}]}
        documents = [SPEC, texts, auto, {**SPEC, "methods": [{**s2p, "L": 1.0, "step_size": "dynamic"}]}]
        documents[3]["methods"] = [{"method": "MeZO", "label": "mine", "lr": [1.0], "rho": 1e-3, "rounding": "nearest"}]
        documents.append(own)
        for document in documents:
            specs.parse(as_toml(document).decode(), "test", home)
        files = st.one_of(changed(documents).map(as_toml), damaged(list(map(as_toml, documents))))
        self.files = files.map(lambda data: {"mine.toml": data})

    def read(self) -> None:
        spec = specs.load(self.folder / "mine.toml")
        for run, _ in zip(plan(spec), range(10), strict=False):
            assert (run.id, run.title) != ("", "")


class Table(Reader):
    """Of texts: .csv, .tsv, .jsonl and .txt, with labels and without."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        rows = [{"text": f"a fine film {i}", "label": i % 2, "more": [i]} for i in range(8)]
        table = [["text", "label"], *([f"a, fine {i}", str(i % 2)] for i in range(8))]
        delimited = {"csv": ",", "tsv": "\t"}
        strategies = [changed([rows]).map(lambda rows: ("jsonl", b"\n".join(map(as_json, _items(rows)))))]
        for kind, delimiter in delimited.items():
            strategies.append(changed([table]).map(lambda t, k=kind, d=delimiter: (k, self._delimited(t, d))))
            strategies.append(damaged([self._delimited(table, delimiter)]).map(lambda data, k=kind: (k, data)))
        strategies.append(damaged([b"\n".join(map(as_json, rows))]).map(lambda data: ("jsonl", data)))
        strategies.append(damaged([b"a fine film\nand a bad one\n" * 4]).map(lambda data: ("txt", data)))
        self.files = st.one_of(strategies).map(lambda file: {f"table.{file[0]}": file[1]})

    @staticmethod
    def _delimited(table, delimiter: str) -> bytes:
        lines = (
            delimiter.join(f'"{cell}"' if delimiter in str(cell) else str(cell) for cell in _items(row))
            for row in _items(table)
        )
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def given(self, files) -> str:
        self.file = self.folder / next(iter(files))
        return super().given(files)

    def read(self) -> None:
        texts = plain_texts(self.file, None, ("text",))
        assert all(own.encode() is not None for text in (*texts.train, *texts.test) for own in text)
        if self.file.suffix != ".txt":
            assert from_files(self.file, None, ("text",), "label").digest


READERS: dict[str, Callable[[Path], Reader]] = {
    "ledger": Ledger,
    "export": Export,
    "settings": Settings,
    "result": Result,
    "evidence": EvidenceFile,
    "spec": SpecFile,
    "table": Table,
}


def fuzz(reader: Reader, examples: int, number: int | None = None) -> Counter[str]:
    """Gives a reader so many changed files; with a number, others than before. Returns how many were refused."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )
    @given(reader.files)
    def read(files):
        outcomes[reader.given(files)] += 1

    (read if number is None else seed(number)(read))()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reader, outcomes = READERS[asked.reader](Path(folder)), Counter()
        end = time.monotonic() + asked.seconds
        for number in count():
            outcomes += fuzz(reader, 200, number)
            if time.monotonic() > end:
                break
    told = ", ".join(f"{n:,} {what}" for what, n in sorted(outcomes.items()))
    print(f"{asked.reader}: {outcomes.total():,} files in {asked.seconds:g} seconds ({told}); nothing else left it")


if __name__ == "__main__":
    main()
