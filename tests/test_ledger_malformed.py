"""Files from strangers: an error that names the reason, and nothing else."""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
from safetensors.numpy import save

import forwardtune as ft
from forwardtune.ledger import read
from forwardtune.ledger.fingerprint import combined, digests
from forwardtune.ledger.format import checksum
from forwardtune.ledger.journal import MAGIC, frame
from tests.helpers.runs import Net, recorded, same


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """The header of a sound run, as JSON gives it."""
    path = tmp_path_factory.mktemp("run") / "run.ledger"
    recorded(path, steps=1)
    return json.loads(read(path).header.to_json())


def journal(header, *payloads, schema=1):
    """A journal with all its checksums right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data, crc = MAGIC, 0
    for payload in (b"H" + bytes([schema]) + text, *payloads):
        framed, crc = frame(payload, crc)
        data += framed
    return data


def numbers(*values):
    """A step of the sound run's one group: kind, queries, six settings, then probes and offsets."""
    return b"S" + struct.pack(f"<{len(values)}d", *values)


def parameter(header, **changes):
    return {**header, "parameters": [{**header["parameters"][0], **changes}]}


def group(header, **changes):
    return {**header, "groups": [{**header["groups"][0], **changes}]}


def export_of(header, steps, **columns):
    """An export that claims to have many steps, in a few bytes, with its checksum right."""
    arrays = {name.replace("_", "."): np.array(values) for name, values in columns.items()}
    metadata = {"format": "forwardtune ledger", "schema": "1", "header": json.dumps(header), "steps": str(steps)}
    metadata |= {"columns": "{}", "anchors": "[]", "state": "[]", "buffers": "0"}
    return save(arrays, metadata | {"crc": str(checksum(arrays, metadata))})


SETTINGS = [1.0] * 6
COLUMNS = {"kind": [0], "t_0_0": [0.0]}
MALFORMED = {
    "empty": (lambda header: b"", "is not a ledger, or is damaged"),
    "a database": (lambda header: b"SQLite format 3\0" + bytes(100), "is not a ledger, or is damaged"),
    "a pickle": (lambda header: b"cos\nsystem\n(S'touch /tmp/owned'\ntR.", "is not a ledger, or is damaged"),
    "no header": (lambda header: MAGIC, "the header of .* is damaged"),
    "zeros": (lambda header: MAGIC + bytes(100), "the header of .* is damaged"),
    "deep nesting": (lambda header: journal(b"[" * 100_000), "header is invalid .it is nested too deeply"),
    "empty header": (lambda header: journal({}), "header is invalid .*'groups'"),
    "null header": (lambda header: journal(None), "header is invalid .*'NoneType'"),
    "noise version": (lambda header: journal({**header, "noise": 99}), "made with noise version 99"),
    "seed": (lambda header: journal({**header, "seed": -1}), "header is invalid .seed must be an integer from 0"),
    "distribution": (
        lambda header: journal({**header, "distribution": "../../etc/passwd"}),
        r"header is invalid .distribution '\.\./\.\./etc/passwd'",
    ),
    "directions": (lambda header: journal({**header, "directions": 10**9}), "header is invalid .direction must be"),
    "shape": (lambda header: journal(parameter(header, shape=[-1])), r"header is invalid .shape \(-1,\)"),
    "group of a parameter": (lambda header: journal(parameter(header, group=7)), "header is invalid .group 7"),
    "unknown field": (lambda header: journal({**header, "unknown": 1}), "header is invalid .*argument 'unknown'"),
    "counters": (lambda header: journal({**header, "queries": "many"}), "header is invalid .counters"),
    "settings": (lambda header: journal(group(header, settings=[1])), "header is invalid .a group's settings"),
    "memory": (lambda header: journal(group(header, memory=3)), "header is invalid .a group's settings"),
    "names": (lambda header: journal(group(header, names=[1])), "header is invalid .a group's names"),
    "auto": (lambda header: journal({**header, "auto": 5}), "header is invalid .auto"),
    "scale": (lambda header: journal({**header, "scale": "log"}), "header is invalid .scale 'log'"),
    "scale of a parameter": (lambda header: journal(parameter(header, scale=0)), "header is invalid .scale 0"),
    "a long review": (
        lambda header: journal(header, numbers(16, 4, 1000, 1, 1, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid .a review of 1000 steps",
    ),
    "a review of nothing": (
        lambda header: journal(header, numbers(16, 4, 3, 1, 1, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid: it reviews steps that are not in it",
    ),
    "half a number": (lambda header: journal(header, numbers(*range(9))[:-3]), "step 0 .* is invalid .unpack requires"),
    "too few numbers": (lambda header: journal(header, numbers(0, 2, 5)), r"step 0 .* is invalid .zip\(\) argument 2"),
    "not a count": (
        lambda header: journal(header, numbers(0, math.nan, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid .cannot convert float NaN",
    ),
    "negative queries": (
        lambda header: journal(header, numbers(0, -2, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid .-2 queries",
    ),
    "infinite queries": (
        lambda header: journal(header, numbers(0, math.inf, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid .cannot convert float infinity",
    ),
    "an offset that is no number": (
        lambda header: journal(header, numbers(0, 2, *SETTINGS, 0, 1, 1, 0, 1, 1, math.nan)),
        "step 0 .* is invalid .offset nan",
    ),
    "an infinite probe": (
        lambda header: journal(header, numbers(0, 2, *SETTINGS, 0, 1, math.inf, 0, 1, 1, 1)),
        "step 0 .* is invalid .offset inf",
    ),
    "an offset out of reach": (
        lambda header: journal(header, numbers(0, 2, *SETTINGS, 0, 1, 1, 0, 1, 1, 1e300)),
        r"step 0 .* is invalid .offset 1e\+300",
    ),
    "an export with an infinite offset": (
        lambda header: export_of(
            header, 1, loss=[0.0], visited_0=[1], probe_0_0_0=[1.0], **{**COLUMNS, "t_0_0": [math.inf]}
        ),
        "step 0 .* is invalid .offset inf",
    ),
    "half a probe": (
        lambda header: journal(header, numbers(0, 2, *SETTINGS, 0, 1, 1, 0, 1, 1)),
        "step 0 .* is invalid .6 numbers",
    ),
    "half a direction": (
        lambda header: journal(header, numbers(0, 2, *SETTINGS, 0.5, 1, 1, 0.5, 1, 1, 1)),
        "step 0 .* is invalid .direction 0.5",
    ),
    "kind of step": (
        lambda header: journal(header, numbers(99, 2, *SETTINGS, 0, 1, 1, 0, 1, 1, 1)),
        "step 0 .* is invalid .kind 99",
    ),
    "kind of record": (lambda header: journal(header, b"X"), "the ledger is damaged .*unknown kind b'X'"),
    "empty anchor": (lambda header: journal(header, b"A[]"), "the ledger is damaged .*not enough values to unpack"),
    "infinite anchor": (
        lambda header: journal(header, b'A[Infinity, "", 0]'),
        "the ledger is damaged .*cannot convert float infinity",
    ),
    "too many steps": (
        lambda header: export_of(header, 10**13, loss=[0.0], visited_0=[1], **COLUMNS),
        r"is damaged .column loss has shape \(1,\)",
    ),
    "many steps": (
        lambda header: export_of(header, 10**8, loss=[0.0], visited_0=[1], **COLUMNS),
        r"is damaged .column loss has shape \(1,\)",
    ),
    "no losses": (lambda header: export_of(header, 10**8, visited_0=[1]), "is damaged .column loss is missing"),
    "no checksum": (lambda header: save({}, {"format": "forwardtune ledger", "schema": "1"}), "is damaged .'crc'"),
    "newer export": (
        lambda header: save({}, {"format": "forwardtune ledger", "schema": "99"}),
        "has format 99, newer than 4; install a newer forwardtune",
    ),
    "newer journal": (
        lambda header: journal(header, schema=99),
        "has format 99, newer than 4; install a newer forwardtune",
    ),
    "other safetensors": (lambda header: save({}), "is not a ledger$"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_an_error_that_names_the_reason(header, tmp_path, case):
    make, reason = MALFORMED[case]
    (tmp_path / "strange").write_bytes(make(header))
    model = Net()
    with pytest.raises(ft.LedgerError, match=reason):
        ft.replay(model, tmp_path / "strange")
    assert same(model.state_dict(), Net().state_dict())
    assert [file.name for file in tmp_path.iterdir()] == ["strange"]


def test_a_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(ft.LedgerError, match="there is no ledger at"):
        ft.replay(Net(), tmp_path / "nowhere")


def test_an_anchor_outside_the_run_is_ignored(header, tmp_path):
    path = tmp_path / "strange"
    whole = combined(digests(Net().parameters()))
    path.write_bytes(journal(header, b"A" + json.dumps([-5, whole, True]).encode()))
    assert read(path).anchors == []
    assert same(ft.replay(Net(), path).state_dict(), Net().state_dict())
