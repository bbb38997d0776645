"""Long runs are replayed and resumed hundreds of steps at a time, exactly as step by step."""

import importlib
import math
import struct

import pytest
import torch

import forwardtune as ft
from forwardtune.auto import is_review_due
from forwardtune.ledger.format import Row
from forwardtune.ledger.journal import Journal, read_journal
from forwardtune.ledger.reader import LiveRun
from forwardtune.optimizer import LineSearch
from tests.helpers.runs import METHODS, Net, loss, recorded, same

MODULES = [importlib.import_module(f"forwardtune.ledger.{name}") for name in ("replay", "resume")]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    for module in MODULES:
        monkeypatch.setattr(module, "SEGMENT", 16)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ledger"


def resume(path, model, *, by_step=False):
    """The optimizer, and how many steps it took up one by one."""
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        whole = LineSearch.fast_forward
        patch.setattr(LineSearch, "fast_forward", lambda self, record: (counted.append(0), whole(self, record)))
        if by_step:
            patch.setattr(LiveRun, "plain", lambda *_: None)
        optimizer, _ = ft.resume(model, path)
    optimizer.recorder._journal.disown()
    return optimizer, len(counted)


def check(path, make=Net):
    """Resumes both ways; returns how many steps were taken up one by one of so many."""
    fast, slow = make(), make()
    (optimizer, few), (reference, all_of_them) = resume(path, fast), resume(path, slow, by_step=True)
    assert same(fast.state_dict(), slow.state_dict())
    assert optimizer.state_dict() == reference.state_dict()
    assert optimizer.last_step == reference.last_step
    return few, all_of_them


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("method", METHODS)
def test_as_step_by_step(path, method, groups):
    """With a scheduler, so that the rate differs in every step; S2P makes two queries in some and four in others."""
    recorded(path, method, steps=36, groups=groups)[1].recorder.close()
    assert check(path) == (3, 36)


@pytest.mark.parametrize(
    ("options", "one_by_one"),
    [({"distribution": "sphere"}, 2), ({"probes": "layerwise"}, 2), ({"directions": 2}, 20)],
    ids=["sphere", "layerwise", "two directions"],
)
def test_with_options(path, options, one_by_one):
    recorded(path, "VS2P auto", steps=20, **options)[1].recorder.close()
    assert check(path) == (one_by_one, 20)


def test_plateaus_are_counted_and_steps_that_were_not_taken_go_one_by_one(path):
    def closure(step, model):
        return torch.tensor(math.nan) if step == 20 else 0 * loss(model) if step in (3, 7, 40) else loss(model)

    with pytest.warns(RuntimeWarning, match="Step not taken"):
        optimizer = recorded(path, steps=60, closure=closure)[1]
    optimizer.recorder.close()
    assert optimizer.plateaus == 3
    assert check(path) == (3 + 16, 60)


@pytest.mark.parametrize("retreats", [False, True])
def test_reviews_that_reach_into_the_segment_before(path, retreats):
    """A review goes along the ten steps before it, and back to where they began if they did damage."""
    x = {"x": torch.ones(50)}
    draw = torch.Generator().manual_seed(0)
    with ft.Ledger(path, x) as ledger:
        optimizer = ft.MeZO(x.values(), lr="auto", recorder=ledger)
        for step in range(100):
            due = is_review_due(optimizer.auto)
            optimizer.param_groups[0]["lr"] = 100.0 if retreats and 40 < step <= 50 and not due else 1.0
            optimizer.step(lambda: (x["x"] ** 2).sum() + torch.rand((), generator=draw))
    records = [ft.ledger.read(path).record(step) for step in range(100)]
    assert any(record.review and record.review.back for record in records) == retreats
    assert len([record for record in records if record.review]) > 5

    class Only(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(50))

    few, _ = check(path, Only)
    assert few == 7
    one = Only()
    ft.replay(one, path)
    assert torch.equal(one.x, x["x"])


@pytest.mark.parametrize(("place", "what"), [(-1, "decision"), (-2, "probe"), (-3, "loss")])
def test_a_search_that_decides_otherwise_is_told_of_as_step_by_step(path, place, what):
    """The numbers of a step are its kind, queries, settings, two probes (0, loss, offset) and its decision."""
    recorded(path, steps=40)[1].recorder.close()
    contents = read_journal(path)
    numbers = bytearray(contents.rows[20].numbers)
    value = struct.unpack_from("<d", numbers, len(numbers) + 8 * place)[0]
    struct.pack_into("<d", numbers, len(numbers) + 8 * place, value * 1.01)
    rows = [*contents.rows[:20], Row(bytes(numbers)), *contents.rows[21:]]
    states = {file: file.read_bytes() for file in path.parent.glob("*.state*")}
    path.unlink()
    journal = Journal.create(path, contents.header, "never")
    journal.append(rows, 39)
    journal.close()
    for file, content in states.items():
        file.write_bytes(content)
    told = []
    for by_step in (False, True):
        with pytest.raises(ft.LedgerError, match=r"can be replayed but not resumed: step 20 was made by another") as e:
            resume(path, Net(), by_step=by_step)
        told.append(str(e.value))
    assert told[0] == told[1]


UNSOUND = {
    "kind": (0, -1.0),
    "queries": (1, -1.0),
    "decision": (-1, 1e300),
    "offset": (-2, 1e300),
    "loss": (-3, math.inf),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_numbers_that_no_step_has_are_left_to_the_slow_way(path, name):
    """Without a warning of numpy's."""
    recorded(path, steps=4)[1].recorder.close()
    run, (place, wrong) = ft.ledger.read(path), UNSOUND[name]
    assert len(run.plain(0, 4).t) == 4
    for value in (math.inf, math.nan, wrong):
        numbers = bytearray(run._rows[2].numbers)
        struct.pack_into("<d", numbers, 8 * place if place >= 0 else len(numbers) + 8 * place, value)
        run._rows[2] = Row(bytes(numbers))
        assert run.plain(0, 4) is None
