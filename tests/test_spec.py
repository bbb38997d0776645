"""Specs: what is accepted, what is refused and how, and what a run's id depends on."""

from pathlib import Path

import pytest
import torch

from forwardtune import presets
from forwardtune.errors import ExperimentError
from forwardtune.experiments import spec as specs
from forwardtune.experiments.plan import plan
from tests.helpers.comparisons import TEXT, parse


def test_counting_queries_leaves_torchs_generator_alone():
    state = torch.get_rng_state()
    assert [method.queries_per_step for method in parse().methods] == [2, 3]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plan_is_every_workload_seed_method_and_rate():
    runs = plan(parse())
    assert [(run.seed, run.method.label, run.lr) for run in runs] == [
        (seed, label, lr) for seed in (0, 1) for label, lr in (("VS2P", 1.0), ("VS2P", 4.0), ("STP", 1e-3))
    ]
    assert len({run.id for run in runs}) == 6
    assert [run.id for run in plan(parse())] == [run.id for run in runs]


def test_what_decides_the_outcome_decides_the_id_and_nothing_else():
    ids = {run.id for run in plan(parse())}
    same = [
        TEXT.replace("a test", "another title"),
        TEXT.replace('network = "cnn"', 'network = "cnn"\nname = "mine"'),
        TEXT.replace('method = "STP"', 'method = "STP"\nlabel = "three points"'),
        TEXT + "# a remark\n",
        TEXT.replace(
            "batch = 8", 'batch = 8\nscale = "relative"\nrho = 1e-2\ndecay = "cosine"'
        ),  # the defaults, spelled out
    ]
    for text in same:
        assert {run.id for run in plan(parse(text))} == ids
    other = [
        TEXT.replace("queries = 60", "queries = 66"),
        TEXT.replace("batch = 8", "batch = 9"),
        TEXT.replace("batch = 8", 'batch = 8\ndecay = "none"'),
        TEXT.replace("batch = 8", 'batch = 8\ndistribution = "rademacher"'),
        TEXT.replace("batch = 8", "batch = 8\ndirections = 2"),
        TEXT.replace("batch = 8", 'batch = 8\nscale = "absolute"'),
        TEXT.replace('weights = "random"', 'weights = "other.pth"'),
        TEXT.replace('weights = "random"', 'weights = "random"\npretrain = {data = "digits", steps = 3}'),
    ]
    for text in other:
        assert not {run.id for run in plan(parse(text))} & ids
    rho = TEXT.replace("batch = 8", "batch = 8\nrho = 2e-3")  # STP has none
    assert len({run.id for run in plan(parse(rho))} & ids) == 2
    more = TEXT.replace("[1, 4]", "[1, 4, 3]").replace("[0, 1]", "[0, 1, 2]")
    assert {run.id for run in plan(parse(more))} > ids


def test_equal_queries():
    """STP asks for three a step and gets two thirds of the steps; so does what has several directions."""
    spec = parse(
        TEXT.replace(
            "lr = [1e-3]", "lr = [1e-3]\n\n[[methods]]\nmethod = 'VS2P'\nlabel = 'two'\ndirections = 2\nlr=[1]"
        )
    )
    vs2p, stp, two = spec.methods
    assert [m.queries_per_step for m in spec.methods] == [2, 3, 4]
    assert [specs.steps(spec.workloads[0], m, 60) for m in spec.methods] == [30, 20, 15]
    assert [m.title for m in (vs2p, stp, two)] == ["VS2P", "STP\N{PRIME}", "two"]


def test_epochs_are_those_of_a_two_point_method():
    spec = parse(TEXT.replace("queries = 60", "epochs = 3"))
    assert spec.workloads[0].budget(100) == 2 * 3 * (100 // 8)
    with pytest.raises(ExperimentError, match="a batch of 8 is more than the 7 training examples"):
        spec.workloads[0].budget(7)


def test_a_workload_may_have_its_own_budget():
    spec = parse(TEXT.replace('weights = "random"', 'weights = "random"\nepochs = 2\nbatch = 4'))
    assert (spec.workloads[0].queries, spec.workloads[0].epochs, spec.workloads[0].batch) == (None, 2, 4)


def test_a_method_that_lacks_a_setting():
    with pytest.raises(ExperimentError, match=r"the method 'S2P': S2P needs a step_size, its rule"):
        parse(TEXT.replace('"STP"', '"S2P"'))


def test_a_rate_may_be_left_to_the_method():
    text = TEXT.replace("lr = [1, 4]", 'lr = "auto"')
    (auto, *_), _ = [[run for run in plan(parse(text)) if run.seed == seed] for seed in (0, 1)]
    assert (auto.lr, auto.decay, auto.title) == ("auto", "none", "digits-cnn VS2P lr auto seed 0")
    assert parse(text).methods[0].queries_per_step == 2
    assert "rho" not in parse(text).methods[0].settings
    scaled = parse(TEXT.replace("batch = 8", 'batch = 8\nscale = "relative"'))
    assert [method.settings["scale"] for method in scaled.methods] == ["relative", "relative"]


def test_rates_are_not_tried_out():
    assert parse(TEXT.replace("[1e-3]", "[1e9]")).methods[1].queries_per_step == 3


S2P = "method = 'S2P'\nlr = [1]\nstep_size = 1\nalpha0 = 1.0"


def test_all_methods_can_be_compared():
    spec = parse(TEXT.replace('method = "STP"\nlr = [1e-3]', f"{S2P}\nsteps = 30"))
    assert spec.methods[1].queries_per_step == 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "title",
            "titel",
            r"the spec 'test': the key 'titel' is not known \(did you mean 'title'\?\); choose ",
        ),
        ("seeds", "seed", r"the key 'seed' is not known \(did you mean 'seeds'\?\)"),
        ("network", "net", r"the workload 'digits-None': the key 'net' is not known"),
        ('title = "a test"', "", "the spec 'test' has no 'title'; give it"),
        ('"a test"', "3", "the spec 'test': title must be text, not 3"),
        ("queries = 60", "queries = 60.5", "the workload 'digits-cnn': queries must be a whole number, not 60.5"),
        ("queries = 60", "queries = true", "queries must be a whole number, not True"),
        ("queries = 60", "", "the workload 'digits-cnn': the budget is given by either queries or epochs"),
        ("queries = 60", "queries = 60\nepochs = 2", "the budget is given by either queries or epochs"),
        ("queries = 60", "queries = 6", "6 queries are 3 steps of VS2P, too few for 4 evaluations; raise the budget"),
        ("queries = 60", "queries = -1", "queries must be at least 1, not -1"),
        ("batch = 8", "batch = 0", "batch must be at least 1, not 0"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "seeds must be different"),
        ("seeds = [0, 1]", "seeds = []", "seeds must be a list with at least one entry"),
        ("seeds = [0, 1]", "seeds = 3", "seeds must be a list with at least one entry, not 3"),
        ('"digits"', '"mnits"', "data 'mnits' is not known .did you mean 'mnist'"),
        ('"cnn"', '"resnet"', "network 'resnet' is not known .did you mean 'resnet18'"),
        ("batch = 8", 'batch = 8\ndecay = "step"', "decay 'step' is not known; choose one of cosine, linear, none"),
        ('"STP"', '"stp"', "method 'stp' is not known .did you mean 'STP'"),
        ('"STP"', '"STP"\nrho = 1e-3', "the method 'STP': the setting 'rho' is not known"),
        ('"VS2P"', '"VS2P"\nwindow = 1', "the method 'VS2P': window must be an integer of at least 2"),
        ("[1e-3]", "[0.0]", "lr must list different rates above zero"),
        ("[1, 4]", '"best"', "lr must be a list of rates, or \"auto\", not 'best'"),
        (
            "lr = [1, 4]",
            'lr = "auto"\nrho = 1e-3',
            'lr = "auto" finds the distance of probes, too',
        ),
        ("batch = 8", "batch = 8\nscale = 'log'", "the method 'VS2P': unknown scale 'log'"),
        ("[1e-3]", "[inf]", "must be finite"),
        ("[1e-3]", "[1, 1]", "lr must list different rates above zero"),
        ("lr = [1e-3]", "", "the method 'STP' has no 'lr'"),
        ("STP", "VS2P", "two methods are called 'VS2P'; give each a label of its own"),
        ('network = "cnn"', 'network = "cnn"\nname = "a/b"', "name must be text without any of"),
        ('network = "cnn"', 'network = "resnet18"\nbatch = 1', "resnet18 normalizes over the batch"),
        ('"STP"', '"STP"\nlabel = "a|b"', "label must be text without any of"),
        ("[1e-3]", f"[1{'0' * 400}]", "lr must be a number"),
        ('weights = "random"', "weights = 'random'\npretrain = {data = 'digits'}", "pretrain has no 'steps'; give it"),
        ('title = "a test"', 'title = "a test', "the spec 'test' is not TOML: .*line 2"),
        ("batch = 8", "batch = 8\ndistribution = 'gauss'", "the method 'VS2P': .*gauss"),
    ],
)
def test_bad_specs_are_refused_in_a_sentence(old, new, complaint):
    assert old in TEXT
    with pytest.raises(ExperimentError, match=complaint) as caught:
        parse(TEXT.replace(old, new))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ExperimentError, match=r"nothing.toml cannot be read .*`forwardtune presets` lists"):
        specs.load(Path("nothing.toml"))


def test_an_unknown_preset():
    with pytest.raises(ExperimentError, match=r"there is no preset 'digit' .did you mean 'digits'"):
        presets.load("digit")


PAPER = {
    "VS2P": (1, 1.5, 3, 5),
    "MeZO": (2.5e-4, 1e-4, 7.5e-5, 5e-5, 2.5e-5, 1e-5),
    "STP": (2.5e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4),
}


@pytest.mark.parametrize("name", presets.files())
def test_presets(name):
    spec = presets.load(name)
    assert spec.title
    assert spec.description
    assert plan(spec)
    kind, _, stem = name.rpartition("/")
    texts = spec.workloads[0].network == "transformer"
    if kind == "full" and texts:
        assert {m.label: m.lr for m in spec.methods} == {
            name: pytest.approx([lr / 10 for lr in rates]) for name, rates in PAPER.items()
        }
        epochs = {"mrpc": 500, "sst2": 100, "qnli": 100, "stsb": 500, "rte": 500}
        assert {w.data: w.epochs for w in spec.workloads} == epochs
        assert {(w.batch, w.seeds, w.weights) for w in spec.workloads} == {(32, (0, 1, 2), "gpt2")}
        assert spec.rates_from == "mrpc"
        chosen = plan(spec, {method.label: method.lr[0] for method in spec.methods})
        assert len(chosen) == 3 * (4 + 6 + 6) + 4 * 3 * 3
    elif kind == "full" and stem != "vgg11-failure":
        assert {m.label: m.lr for m in spec.methods} == PAPER
        assert {w.network for w in spec.workloads} == {"densenet121", "resnet18", "vgg11", "vit_b_16"}
        assert {(w.batch, w.epochs, w.seeds) for w in spec.workloads} == {(1024, int(stem.split("-")[1]), (0, 1, 2))}
    if kind == "reduced":  # one of every full one, and every grid widened alike
        full = presets.load("full/glue" if texts else f"full/{stem}")
        assert {w.network for w in spec.workloads} == {w.network for w in full.workloads}
        steps = {tuple(round(b / a, 6) for a, b in zip(m.lr, m.lr[1:], strict=False)) for m in spec.methods}
        assert len(steps) == 1


def test_lines_that_are_found_need_a_rate_that_is():
    with pytest.raises(ExperimentError, match='directions="auto" needs lr="auto"'):
        parse(
            TEXT.replace("batch = 8", 'batch = 8\ndistribution = "rademacher"').replace(
                'method = "VS2P"', 'method = "VS2P"\ndirections = "auto"'
            )
        )
