"""The scripts that compare with other libraries: what goes wrong is told, and nothing hangs."""

import copy
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

fresh = pytest.importorskip("fresh", reason="no benchmarks beside the tests")

import build_and_size  # noqa: E402
import compatibility  # noqa: E402
import libraries  # noqa: E402
import readme  # noqa: E402
import timing  # noqa: E402
from compatibility_checks import CHECKS, Check  # noqa: E402
from fresh import AbsentError, Outcome  # noqa: E402

# --------------------------------------------------------------------- calls in fresh interpreters

FUNCTIONS = r"""
import os, subprocess, sys, time
from fresh import AbsentError

def adds(a, b):
    print("noise on stdout")
    return {"sum": a + b}

def fails():
    raise ValueError("\n  \x1b[96mthe first line\x1b[0m\nthe second\n")

def announces():
    raise RuntimeError("Error(s) in loading:\n\tMissing key(s): a\n\tand more")

def says_nothing():
    assert False

def is_absent():
    raise AbsentError("onnx is not installed")

def crashes():
    os.abort()

def leaves():
    sys.stderr.write("first words\nlast words\n")
    sys.stderr.flush()
    os._exit(3)

def exits():
    sys.exit("enough")

def gives_no_json():
    return object()

def hangs(place):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(place, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def functions(tmp_path):
    file = tmp_path / "functions_to_call.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    return file


def call(file, function, limit=60.0, **arguments):
    return fresh.call(sys.executable, file, function, arguments, limit)


def test_a_call_returns_what_the_function_returns(functions):
    outcome = call(functions, "adds", a=1, b=2)
    assert (outcome.status, outcome.message, outcome.value) == ("pass", "", {"sum": 3})
    assert outcome.seconds > 0


@pytest.mark.parametrize(
    ("function", "status", "message"),
    [
        ("fails", "fail", "ValueError: the first line"),
        ("announces", "fail", "RuntimeError: Error(s) in loading: Missing key(s): a"),
        ("says_nothing", "fail", "AssertionError: (no message)"),
        ("is_absent", "absent", "onnx is not installed"),
        ("crashes", "fail", "crash: ended by signal SIGABRT"),
        ("leaves", "fail", "crash: last words"),
        ("exits", "fail", "SystemExit: enough"),
        ("gives_no_json", "fail", "TypeError: Object of type object is not JSON serializable"),
        ("misspelt", "fail", "AttributeError: module 'functions_to_call' has no attribute"),
    ],
)
def test_what_went_wrong_is_told_in_one_line(functions, function, status, message):
    outcome = call(functions, function)
    assert outcome.status == status
    assert outcome.message.startswith(message)
    assert "\n" not in outcome.message


def test_a_missing_interpreter_is_told(functions):
    outcome = fresh.call("/no/such/python", functions, "adds", {}, 10)
    assert (outcome.status, outcome.message.split(":")[0]) == ("fail", "FileNotFoundError")


def gone(process):
    """Ended, or a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")


@needs_proc
def test_a_hanging_call_is_ended_with_all_it_started(functions, tmp_path, monkeypatch):
    place = tmp_path / "processes"
    started = functools.partial(lambda: place.exists() and len(place.read_text().split()) == 2)
    waited = []

    def wait(process, limit=None, original=fresh.subprocess.Popen.wait):
        if limit is None:
            return original(process)
        waited.append(limit)  # the limit is over as soon as the function hangs, however slow
        assert wait_until(started)
        raise fresh.subprocess.TimeoutExpired("python", limit)

    monkeypatch.setattr(fresh.subprocess.Popen, "wait", wait)
    outcome = call(functions, "hangs", limit=17.0, place=str(place))
    assert (outcome.status, outcome.message) == ("fail", "TimeoutError: not done after 17 s")
    assert waited == [17.0]
    assert all(wait_until(lambda p=p: gone(p)) for p in place.read_text().split())


def test_the_limit_is_kept(functions, tmp_path):
    start = time.monotonic()
    outcome = call(functions, "hangs", limit=0.5, place=str(tmp_path / "processes"))
    assert outcome.message == "TimeoutError: not done after 0.5 s"
    assert time.monotonic() - start < 60


@needs_proc
def test_an_interrupted_caller_leaves_nothing_running(functions, tmp_path):
    place = tmp_path / "processes"
    outcomes = []
    waiting = threading.Thread(
        target=lambda: outcomes.append(call(functions, "hangs", limit=600, place=str(place)))
    )
    waiting.start()
    assert wait_until(lambda: place.exists() and len(place.read_text().split()) == 2)
    fresh.end_all()
    waiting.join(30)
    assert [outcome.message for outcome in outcomes] == ["crash: ended by signal SIGKILL"]
    assert all(wait_until(lambda p=p: gone(p)) for p in place.read_text().split())


@needs_proc
def test_a_script_that_is_terminated_ends_what_it_waits_for(functions, tmp_path):
    place = tmp_path / "processes"
    script = (
        f"import sys; sys.path.insert(0, {str(fresh.HERE)!r}); import fresh, pathlib\n"
        "fresh.end_calls_when_terminated()\n"
        f"fresh.call(sys.executable, pathlib.Path({str(functions)!r}), 'hangs', "
        f"{{'place': {str(place)!r}}}, 600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    assert wait_until(lambda: place.exists() and len(place.read_text().split()) == 2)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert all(wait_until(lambda p=p: gone(p)) for p in place.read_text().split())


def test_paths_of_this_environment_do_not_reach_another(functions, tmp_path, monkeypatch):
    functions.write_text("import os\ndef paths(): return os.environ.get('PYTHONPATH')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert call(functions, "paths").value == str(tmp_path)
    assert fresh.call(str(other), functions, "paths", {}, 60).value is None


# ---------------------------------------------------------------------------------- the script

FAKE = """
def run(name, library):
    if (name, library) in {("second", "escnn"), ("second", "econv")}:
        raise ValueError("broken\\nlines that nobody reads")
    return "to 1e-07"
"""
TWO = [Check(n, t, f"the {n} check", print, True) for n, t in (("first", "A"), ("second", "B"))]


@pytest.fixture
def fake_checks(tmp_path, monkeypatch):
    (tmp_path / "compatibility_checks.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(compatibility, "HERE", tmp_path)
    monkeypatch.setattr(compatibility, "CHECKS", {check.name: check for check in TWO})


@pytest.mark.usefixtures("fake_checks")
def test_the_table_says_pass_and_fail_and_the_first_line(capsys):
    results = compatibility.run_all(TWO, dict.fromkeys(("escnn", "torch"), sys.executable), 60, 2)
    compatibility.print_failures(TWO, results)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == [
        ["escnn", "torch"],
        ["A"],
        ["the", "first", "check", "pass", "pass"],
        ["B"],
        ["the", "second", "check", "FAIL", "pass"],
        ["escnn"],
        ["FAIL", "the", "second", "check:", "ValueError:", "broken"],
    ]


@pytest.mark.usefixtures("fake_checks")
@pytest.mark.parametrize("failing", [True, False])
def test_a_check_that_econv_fails_is_an_error_once_all_is_written(failing, monkeypatch, tmp_path):
    found = {"econv": {"econv": "1.0"}, "escnn": {"escnn": "2.0"}, "e2cnn": None}
    monkeypatch.setattr(compatibility, "versions", lambda pythons, limit: found)
    place = tmp_path / "result.json"
    arguments = ["--json", str(place), "--only", "second" if failing else "first"]
    monkeypatch.setattr(
        compatibility, "interpreters", lambda given: dict.fromkeys(found, sys.executable)
    )
    if failing:
        with pytest.raises(SystemExit, match="econv failed: second"):
            compatibility.main(arguments)
    else:
        compatibility.main(arguments)
    record = json.loads(place.read_text(encoding="utf-8"))
    absent = record["libraries"]["e2cnn"]
    assert absent == {**absent, "versions": None, "results": {}}
    assert record["libraries"]["escnn"]["results"] == (
        {"second": {"status": "fail", "message": "ValueError: broken"}}
        if failing
        else {"first": {"status": "pass", "message": "to 1e-07"}}
    )


def column(*names):
    return {"versions": {"torch": "2"}, "results": {name: {"status": "pass"} for name in names}}


def test_columns_of_libraries_that_were_not_run_are_kept_if_they_are_of_the_same_checks():
    checks = [{"name": "a", "topic": "t", "title": "A"}, {"name": "b", "topic": "t", "title": "B"}]
    old = {"checks": checks, "libraries": {"econv": column("a"), "escnn": column("a", "b")}}
    new = {"checks": checks, "libraries": {"econv": column("a", "b")}}
    kept = compatibility.with_other_columns(new, old)
    assert kept["libraries"] == {"econv": column("a", "b"), "escnn": column("a", "b")}
    assert list(kept["libraries"]) == ["econv", "escnn"]
    with pytest.raises(ValueError, match="other checks"):
        compatibility.with_other_columns({**new, "checks": checks[:1]}, old)


@pytest.mark.usefixtures("fake_checks")
def test_results_of_other_checks_are_not_mixed(tmp_path):
    place = tmp_path / "result.json"
    place.write_text('{"checks": [], "libraries": {}}', encoding="utf-8")
    with pytest.raises(SystemExit, match="results of other checks"):
        compatibility.main(["--libraries", "torch", "--json", str(place)])
    assert place.read_text(encoding="utf-8") == '{"checks": [], "libraries": {}}'


def test_interpreters_are_named_by_library(tmp_path):
    default = compatibility.interpreters([])
    assert default == dict.fromkeys(("econv", "escnn", "e2cnn", "torch"), sys.executable)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)  # as in a virtual environment: the link must not be followed
    both = compatibility.interpreters([str(python)])
    assert both == {**default, "escnn": str(python), "e2cnn": str(python)}
    assert compatibility.interpreters([f"e2cnn={python}"]) == {**default, "e2cnn": str(python)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("e3nn={python}", "one of econv, escnn, e2cnn, torch before '='; got 'e3nn'"),
        ("escnn={folder}", "expected a Python interpreter; got '{folder}'"),
        ("{folder}/absent", "expected a Python interpreter; got '{folder}/absent'"),
    ],
)
def test_a_wrong_interpreter_is_refused(given, words, tmp_path, capsys):
    names = {"python": sys.executable, "folder": tmp_path}
    for script in (compatibility, build_and_size):
        with pytest.raises(SystemExit):
            script.parse(["--python", given.format(**names)])
        assert words.format(**names) in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AbsentError, match="not installed"):
        libraries.get("escnn")
    with pytest.raises(AbsentError):
        libraries.versions("e2cnn")


def test_versions_are_those_of_the_interpreter():
    found = compatibility.versions({"econv": sys.executable}, 60)
    # The installed package may leave out what the build adds, such as +cpu.
    assert found["econv"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["econv"]["econv"]


# ------------------------------------------------------------------------------------ the checks

SLOW = {"compiled_train", "compiled_eval", "int8_weights", "distributed"}
WITH_PACKAGES = {"onnx_dynamo", "onnx_legacy", "onnx_of_plain", "int8_weights"}


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it is going to change
@pytest.mark.parametrize(
    ("name", "library"),
    [
        pytest.param(name, library, marks=[pytest.mark.slow] * (name in SLOW | WITH_PACKAGES))
        for name, check in CHECKS.items()
        for library in ("torch", "econv")
        if check.control or library == "econv"  # an ordinary network is not equivariant
    ],
)
def test_an_ordinary_network_and_ours_pass(name, library):
    chosen = libraries.get(library)
    torch.manual_seed(0)
    try:
        CHECKS[name].function(chosen)
    except AbsentError as missing:
        assert name in WITH_PACKAGES
        pytest.skip(str(missing))


class Defective(libraries.Torch):
    """An ordinary network whose second convolution is replaced."""

    def __init__(self, layer):
        self.layer = layer

    def convolution(self, group, before, after):
        if not before:
            return super().convolution(group, before, after)
        channels = before * libraries.order_of(group), after * libraries.order_of(group)
        return self.layer(*channels, 5, padding=2, bias=False)


class Cached(nn.Conv2d):
    """Keeps its filters as a buffer in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self._buffers.pop("kept", None)
        else:
            self.register_buffer("kept", self.weight.detach().clone())
        return self

    def forward(self, x):
        weight = self.weight if self.training else self.kept
        return nn.functional.conv2d(x, weight, padding=2)


class Branches(nn.Conv2d):
    """Looks at its input."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > -1e9 else x


class PerSize(nn.Conv2d):
    """Runs other code for some batch sizes."""

    def forward(self, x):
        for size in (5, 6, 7):
            if x.shape[0] == size:
                x = x + 0.0
        return super().forward(x)


class Lock(nn.Conv2d):
    """Holds what neither copies nor pickles."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.lock = threading.Lock()


class CopiesAreTheSame(nn.Conv2d):
    def __deepcopy__(self, memory):
        return self


class Single(nn.Conv2d):
    """Computes in float32, come what may."""

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight.float(), padding=2)


SHARED = {}


class Shared(nn.Conv2d):
    """All layers of a shape use the same buffer."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.common = nn.Module()
        key = self.weight.shape
        if key not in SHARED:
            SHARED[key] = nn.BatchNorm2d(key[0]).eval()
        self.common = SHARED[key]

    def forward(self, x):
        return self.common(super().forward(x))


class Contiguous(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).contiguous()


class Detached(nn.Conv2d):
    """Loses its gradient under autocast."""

    def forward(self, x):
        out = super().forward(x)
        return out.detach() if torch.is_autocast_enabled("cpu") else out


class Strange:
    pass


class ExtraState(nn.Conv2d):
    def get_extra_state(self):
        return Strange()

    def set_extra_state(self, state):
        pass


class Counting(nn.Conv2d):
    """Gives something else in every call."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x * self.calls)


class Swallows(nn.Conv2d):
    """Takes any number of channels."""

    def forward(self, x):
        return super().forward(nn.functional.pad(x, (0, 0, 0, 0, 0, 32))[:, : self.in_channels])


class SaysNothing(nn.Conv2d):
    def forward(self, x):
        raise AssertionError


class Functional(nn.Conv2d):
    """Reads a copy of its weight that functional_call does not know."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.hidden = [self.weight]

    def forward(self, x):
        return nn.functional.conv2d(x, self.hidden[0], padding=2)


class WholeBatch(nn.Conv2d):
    """Mixes the images of a batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


NOES = [
    (Branches, ["graph_breaks_train", "graph_breaks_eval", "torch_export_train", "func_vmap"]),
    (Branches, ["torch_export_eval", "torch_export_of_plain"]),
    (PerSize, ["recompilations_train", "recompilations_eval"]),
    (Single, [f"dtypes_{dtype}_train" for dtype in ("float64", "float16", "bfloat16")]),
    (Single, [f"dtypes_{dtype}_eval" for dtype in ("float64", "float16", "bfloat16")]),
    (Shared, ["dtype_of_others"]),
    (Contiguous, ["channels_last_train", "channels_last_eval"]),
    (Detached, ["autocast_bfloat16", "autocast_float16"]),
    (Cached, ["same_state", "loads_across_train", "loads_across_eval", "live_weights"]),
    (Cached, ["learns_in_eval", "functional_call_eval", "parametrised_eval"]),
    (Functional, ["functional_call_train", "func_grad", "parametrised_train"]),
    (WholeBatch, ["per_sample_gradients", "func_vmap"]),
    (Lock, ["deepcopy_train", "deepcopy_eval", "pickled_train", "pickled_eval"]),
    (Lock, ["saved_whole_train", "saved_whole_eval"]),
    (CopiesAreTheSame, ["deepcopy_train", "deepcopy_eval"]),
    (ExtraState, ["state_saved_train", "state_saved_eval"]),
    (Counting, ["checkpointed", "plain_export"]),
    (SaysNothing, ["plain_tensors", "wrong_channels"]),
    (Swallows, ["wrong_channels"]),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "name"), [(layer, name) for layer, names in NOES for name in names]
)
def test_a_check_says_no_to_a_defect(layer, name):
    torch.manual_seed(0)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the check says what the matter is
        CHECKS[name].function(Defective(layer))
    assert not isinstance(caught.value, AbsentError | NotImplementedError | NameError)


class Unconverted(libraries.Torch):
    def synchronised(self, network):
        return network

    def exported(self, network):
        network.head[2].__class__ = type("Linear", (nn.Linear,), {"__module__": "econv.layers"})
        return network


class Unequal(libraries.Torch):
    def exported(self, network):
        other = copy.deepcopy(network)
        other.head[2].bias.data += 0.1
        return other

    def synchronised(self, network):
        return super().synchronised(self.exported(network))


@pytest.mark.parametrize(
    ("library", "name", "words"),
    [
        (Unconverted, "synchronised", "not converted: features.1, features.4, features.7"),
        (Unconverted, "plain_export", "a module of econv is left: Linear"),
        (Unequal, "plain_export", "the output differs"),
        (Unequal, "synchronised", "the output differs"),
    ],
)
def test_a_check_says_no_to_a_helper_that_does_nothing(library, name, words):
    with pytest.raises(AssertionError, match=words):
        CHECKS[name].function(library())


class PoolsInSingle(libraries.Torch):
    """Its pooling forgets dtype and layout."""

    def pool(self, group, fields):
        return nn.Sequential(super().pool(group, fields), Forgetful())


class Forgetful(nn.Module):
    def forward(self, x):
        return x.float().contiguous()


@pytest.mark.parametrize("name", ["pooling_dtype", "pooling_layout"])
def test_a_check_says_no_to_a_pooling_that_forgets(name):
    with pytest.raises((AssertionError, RuntimeError)):
        CHECKS[name].function(PoolsInSingle())
    CHECKS[name.replace("pooling_layout", "channels_last_eval")].function(libraries.Torch())


class Unequivariant(libraries.Econv):
    """One of its convolutions is an ordinary one."""

    def convolution(self, group, before, after):
        if before:
            return super().convolution(group, before, after)
        return nn.Conv2d(3, after * libraries.order_of(group), 5, padding=2)


@pytest.mark.parametrize("name", [n for n, check in CHECKS.items() if not check.control])
def test_a_check_of_equivariance_says_no_to_an_ordinary_convolution(name):
    with pytest.raises(AssertionError, match="differs by"):
        CHECKS[name].function(Unequivariant())


# ----------------------------------------------------------------------------------------- costs


def test_times_are_related_interleaved(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def run(name, seconds):
        order.append(name)
        clock[0] += seconds

    found = build_and_size.compare(lambda: run("ours", 3.0), lambda: run("plain", 2.0), 4)
    assert found == {"ratio": 1.5, "ratio_of_fastest": 1.5, "paired_quartiles": [1.5, 1.5]}
    assert order[6:] == ["ours", "plain", "plain", "ours"] * 2


@pytest.mark.parametrize("library", ["econv", "torch"])
def test_the_checkpoint_is_the_same_in_train_and_eval(library, monkeypatch):
    monkeypatch.setattr(build_and_size, "WIDTHS", (2, 3))
    found = build_and_size.sizes(library, "p4")
    assert found["train_bytes"] == found["eval_bytes"] > found["parameter_bytes"]
    assert found["parameter_bytes"] == 4 * found["parameters"]


SMALL = {"group": "p4", "fields": 2, "batch": 2, "size": 9, "repeats": 2}


def test_a_layer_is_timed_in_every_pass_and_format():
    found = build_and_size.layer_times("econv", threads=torch.get_num_threads(), **SMALL)
    assert set(found) == {"contiguous_format", "channels_last"}
    for passes in found.values():
        assert set(passes) == {"forward", "forward+backward", "eval"}
        assert all(figures["ratio"] > 0 for figures in passes.values())


def test_layers_that_disagree_are_not_timed(monkeypatch):
    monkeypatch.setattr(libraries.Econv, "filters", lambda self, layer: 1.1 * layer.filters())
    with pytest.raises(AssertionError, match="disagree"):
        build_and_size.layer_times("econv", threads=torch.get_num_threads(), **SMALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--group", "C8"], "expected a group such as p8 or p4m; got 'C8'"),
        (["--group", "p0"], "got 'p0'"),
        (["--repeats", "1"], "expected a whole number ≥ 2; got '1'"),
        (["--fields", "two"], "expected a whole number ≥ 1; got 'two'"),
    ],
)
def test_costs_refuse_bad_options(arguments, words, capsys):
    with pytest.raises(SystemExit):
        build_and_size.parse(arguments)
    assert words in capsys.readouterr().err


def test_libraries_are_asked_interleaved_and_the_first_round_does_not_count(monkeypatch):
    asked = []

    def answer(python, file, function, arguments, limit):
        asked.append(arguments["library"])
        return Outcome("pass", value=float(len(asked)))

    monkeypatch.setattr(build_and_size.fresh, "call", answer)
    measurement = build_and_size.Measurement({"econv": "a", "escnn": "b"})
    assert measurement.medians("import_seconds", 3) == {"econv": 5.0, "escnn": 6.0}
    assert asked == ["econv", "escnn"] * 4


def test_a_measurement_that_fails_ends_the_script(monkeypatch):
    monkeypatch.setattr(build_and_size.fresh, "call", lambda *_: Outcome("fail", "ValueError: x"))
    with pytest.raises(SystemExit, match="escnn: sizes ended with ValueError: x"):
        build_and_size.Measurement({"escnn": os.devnull}).ask("escnn", "sizes")


# ---------------------------------------------------------------------------------------- tables

STAMP = {"revision": "abcdef", "finished": "2026-01-02T03:04:05Z"}
RECORD = {
    "limit_s": 300,
    "checks": [
        {"name": "a", "topic": "`compile`", "title": "fullgraph"},
        {"name": "b", "topic": "`compile`", "title": "breaks"},
        {"name": "c", "topic": "turns", "title": "exact"},
    ],
    "libraries": {
        "econv": {
            "versions": {"econv": "1.0", "torch": "2.13", "onnx": None},
            **STAMP,
            "results": {
                "a": {"status": "pass", "message": ""},
                "b": {"status": "pass", "message": "to 1e-07"},
                "c": {"status": "pass", "message": ""},
            },
        },
        "escnn": {
            "versions": {"escnn": "1.0.11", "torch": "2.13"},
            **STAMP,
            "results": {
                "a": {"status": "fail", "message": "E: a|b `c` " + "x" * 200},
                "b": {"status": "pass", "message": ""},
                "c": {"status": "absent", "message": "no such layer"},
            },
        },
        "e2cnn": {"versions": None, "results": {}},
        "torch": {
            "versions": {"torch": "2.13"},
            **STAMP,
            "results": {
                "a": {"status": "pass", "message": ""},
                "b": {"status": "pass", "message": ""},
                "c": {"status": "absent", "message": "not equivariant"},
            },
        },
    },
}


def test_the_summary_counts_what_passes_of_what_applies():
    lines = readme.compatibility_summary(RECORD).splitlines()
    assert lines[:5] == [
        "|  | **econv** | escnn 1.0.11 | e2cnn |",
        "|---|---|---|---|",
        "| `compile` | 2 of 2 | 1 of 2 | not installed |",
        "| turns | 1 of 1 | 0 of 0 | not installed |",
        "| **all checks** | **3 of 3** | **1 of 2** | **not installed** |",
    ]
    assert lines[5] == "| causes of what fails | 0 | 1 | 0 |"
    assert "control, passes 2 of 2." in lines[-1]


def test_the_details_show_the_error_and_keep_the_table_whole():
    text = readme.compatibility_details(RECORD)
    message = "E: a\\|b 'c' " + "x" * 200
    assert text.splitlines() == [
        "## What fails, by cause",
        "",
        "| checks that fail because | **econv** | escnn 1.0.11 | e2cnn |",
        "|---|---|---|---|",
        f"| {message} | 0 | 1 | 0 |",
        "| **causes** | **0** | **1** | **0** |",
        "",
        "## `compile`",
        "",
        "|  | **econv** | escnn 1.0.11 | e2cnn |",
        "|---|---|---|---|",
        f"| fullgraph | pass | **fail** `{message[:118]} …` | not installed |",
        "| breaks | pass (to 1e-07) | pass | not installed |",
        "",
        "## turns",
        "",
        "|  | **econv** | escnn 1.0.11 | e2cnn |",
        "|---|---|---|---|",
        "| exact | pass | – (no such layer) | not installed |",
        "",
        "- econv: econv 1.0, torch 2.13; code of revision abcdef, 2026-01-02",
        "- escnn: escnn 1.0.11, torch 2.13; code of revision abcdef, 2026-01-02",
        "- e2cnn: not installed",
        "- control: torch 2.13; code of revision abcdef, 2026-01-02",
    ]


def test_failures_of_one_cause_are_told_together():
    failed = {"status": "fail", "message": "AssertionError: x"}
    found = copy.deepcopy(RECORD)
    found["checks"] = [
        {"name": name, "topic": "t", "title": name}
        for name in ("deepcopy_eval", "live_weights", "pickled_train", "unheard_of")
    ]
    results = {check["name"]: failed for check in found["checks"]}
    pickle = {"status": "fail", "message": "AttributeError: Can't pickle local object"}
    found["libraries"]["escnn"]["results"] = {**results, "pickled_train": pickle}
    causes = readme.causes_of(found, "escnn")
    assert [len(titles) for titles in causes.values()] == [2, 1, 1]
    first, second, third = causes
    assert first.startswith("filters are cached in eval mode")
    assert "pickle" in second
    assert third == "AssertionError: x"


def test_every_failure_of_the_record_has_a_cause_that_somebody_looked_for():
    found = readme.read("compatibility.json")
    for library in ("escnn", "e2cnn"):
        assert set(readme.causes_of(found, library)) <= set(readme.CAUSES)
    assert readme.causes_of(found, "econv") == {}


def test_the_costs_are_told_library_by_library():
    passes = {"forward+backward": {"ratio": 1.024}, "eval": {"ratio": 0.996}}
    kept = {"parameter_bytes": 100, "train_bytes": 101, "eval_bytes": 1500}
    found = {
        **STAMP,
        "settings": {
            "widths": [24, 96],
            "fields": 16,
            "group": "p8",
            "threads": 1,
            "batch": 8,
            "size": 32,
        },
        "versions": {"econv": {"econv": "1.0"}, "escnn": {"escnn": "1.0.11"}, "e2cnn": None},
        "import_s": {"econv": 0.251, "escnn": 12.3, "torch": 1.5},
        "build_s": {"econv": 0.5, "escnn": 9.64, "torch": 0.01},
        "checkpoint": dict.fromkeys(("econv", "escnn", "torch"), kept),
        "layer": {name: {"contiguous_format": passes} for name in ("econv", "escnn", "torch")},
    }
    assert readme.costs_table(found).splitlines()[:6] == [
        "|  | **econv** | escnn 1.0.11 | e2cnn | ordinary CNN |",
        "|---|---|---|---|---|",
        "| import, after torch's | 0.25 s | 12 s | not installed | – |",
        "| build 2 layers, 24–96 fields | 0.50 s | 9.64 s | not installed | 0.01 s |",
        "| checkpoint over its parameters, train / eval mode | 1.01 / 15.00 | 1.01 / 15.00 "
        "| not installed | 1.01 / 15.00 |",
        "| layer 16→16 over plain Conv2d, training / eval | 1.02 / 1.00 | 1.02 / 1.00 "
        "| not installed | 1.02 / 1.00 |",
    ]


def test_tables_go_between_their_markers_and_nowhere_else():
    text = "a\n<!-- table: x -->\nold\n<!-- end -->\nb"
    made = readme.with_tables(text, {"x": r"new \1 \\"})
    assert made == "a\n<!-- table: x -->\nnew \\1 \\\\\n<!-- end -->\nb"
    with pytest.raises(SystemExit, match="markers of table 'y' once; found 0"):
        readme.with_tables(text, {"y": ""})
    with pytest.raises(SystemExit, match="found 2"):
        readme.with_tables(text + text, {"x": ""})
