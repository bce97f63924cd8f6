"""The compiled kernel: how it is built, kept, refused and done without."""

import ctypes
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import econv
from econv import filter_basis
from econv.engines.spectral import native
from econv.plan import spectral_plan

needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty folder for kernels, and nothing loaded."""
    monkeypatch.setenv("ECONV_CACHE", str(tmp_path / "kernels"))
    native._library.cache_clear()
    yield tmp_path / "kernels"
    native._library.cache_clear()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a kernel in it."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECONV_CACHE", str(folder))
        native._library.cache_clear()
        assert what_runs() == ["spectral/native"]
    return folder


@pytest.fixture
def full(built, fresh):
    """The folder of the user's with a kernel in it, and nothing loaded."""
    shutil.copytree(built, fresh, dirs_exist_ok=True)
    fresh.chmod(0o700)
    native._library.cache_clear()
    return fresh


def what_runs():
    layer = econv.GroupConv2d(1, 1, "p4", engine="spectral")
    with econv.engine() as ran:
        layer(torch.randn(1, 4, 6, 6))
    return ran


def test_a_variable_forbids_it(monkeypatch):
    monkeypatch.setenv("ECONV_NATIVE", "0")
    assert native.reason() == "forbidden by ECONV_NATIVE=0"
    assert what_runs() == ["spectral/torch"]


def test_without_a_compiler_torch_runs(fresh, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.reason() == "no C++ compiler found (CXX, c++, g++, clang++)"
    assert what_runs() == ["spectral/torch"]
    assert not fresh.exists()


def test_a_compiler_that_fails_is_named_and_torch_runs(fresh, monkeypatch, tmp_path):
    script = tmp_path / "broken"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such luck >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert "no such luck" in native.reason()
    assert str(script) in native.reason()
    assert what_runs() == ["spectral/torch"]
    assert not any(fresh.iterdir())  # nothing half-made


def test_other_dtypes_have_no_kernel():
    assert native.reason(torch.float16) == "there is no kernel for torch.float16"


@needs_compiler
def test_the_kernel_is_built_once_and_kept(full, monkeypatch):
    (kept,) = full.glob("*.so")
    assert kept.stat().st_mode & 0o022 == 0

    def refuse(*arguments):
        raise AssertionError("built again")

    monkeypatch.setattr(native, "_compile", refuse)
    assert what_runs() == ["spectral/native"]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "text", "digest", "no digest", "writable", "link"])
def test_a_kept_kernel_that_is_not_as_it_was_written_is_built_again(full, monkeypatch, damage):
    (kept,) = full.glob("*.so")
    whole, digest = kept.read_bytes(), kept.with_suffix(".sha256")
    kept.unlink()  # a loaded one must not be changed
    if damage == "link":
        (full.parent / "elsewhere.so").write_bytes(whole)
        kept.symlink_to(full.parent / "elsewhere.so")
    else:
        kept.write_bytes({"cut": whole[:5000], "text": b"no library"}.get(damage, whole))
        kept.chmod(0o666 if damage == "writable" else 0o600)
    if damage == "digest":
        digest.write_text("0" * 64)
    elif damage == "no digest":
        digest.unlink()
    asked = []

    def build(compiler, real, openmp, target):
        asked.append(target)
        target.write_bytes(whole)

    monkeypatch.setattr(native, "_compile", build)
    assert what_runs() == ["spectral/native"]
    assert len(asked) == 1
    assert not kept.is_symlink()
    assert sorted(path.suffix for path in full.iterdir()) == [".sha256", ".so"]


SILENT = """extern "C" int econv_{}(const void*, long) { return 0; }\n"""


@needs_compiler
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "is no kernel of econv"),
        (SILENT.replace("{}", "means"), "is no kernel of econv"),
        (SILENT.replace("{}", "means") + SILENT.replace("{}", "spectral"), "differs from operat"),
    ],
    ids=["nothing", "half", "silent"],
)
def test_a_kernel_that_was_built_wrongly_is_not_believed(
    fresh, monkeypatch, tmp_path, caplog, source, says
):
    other = tmp_path / "other.cpp"
    other.write_text(source)
    monkeypatch.setattr(native, "_SOURCE", other)
    with caplog.at_level("WARNING", "econv.engines"):
        assert says in native.reason()
    assert "no compiled kernel for CPUs" in caplog.text
    assert what_runs() == ["spectral/torch"]


def test_a_compiler_that_hangs_is_spoken_of_and_ended(fresh, monkeypatch, tmp_path, caplog):
    script = tmp_path / "hanging"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > {tmp_path}/process\nsleep 99\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(native, "_PATIENCE", 0.2)
    monkeypatch.setattr(native, "_SECONDS", 1.0)
    with caplog.at_level("WARNING", "econv.engines"):
        assert native.reason() == f"{script} did not end within 1 s"
    assert "is building the kernel for CPUs; ECONV_NATIVE=0 forbids it" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


@needs_compiler
def test_what_killed_builds_left_is_removed(fresh, monkeypatch):
    fresh.mkdir(mode=0o700)
    left = [fresh / ".999999999.spectral-float-0.so.o", fresh / ".999999999.spectral-float-0.so"]
    for path in left:
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("built"))
    with pytest.raises(pytest.fail.Exception):
        native.reason()
    assert not any(path.exists() for path in left)


@needs_compiler
@pytest.mark.parametrize("change", ["source", "processor"])
def test_another_source_or_processor_gets_another_kernel(fresh, monkeypatch, tmp_path, change):
    made = []

    def record(compiler, real, openmp, target):
        made.append(target.name)
        raise RuntimeError("not built")

    monkeypatch.setattr(native, "_compile", record)
    assert native.reason() == "not built"
    if change == "source":
        other = tmp_path / "other.cpp"
        other.write_bytes(native._SOURCE.read_bytes() + b"// changed\n")
        monkeypatch.setattr(native, "_SOURCE", other)
    else:
        monkeypatch.setattr(native, "_processor", lambda: "another")
    native._library.cache_clear()
    assert native.reason() == "not built"
    assert len(set(made)) == 2


@needs_compiler
@pytest.mark.parametrize("above", [False, True])
def test_a_folder_that_others_can_write_to_is_not_trusted(full, monkeypatch, above):
    """Nor one that others could put another one in the place of."""
    open_to_all, asked = full.parent if above else full, []
    whole = next(full.glob("*.so")).read_bytes()

    def build(compiler, real, openmp, target):
        asked.append(target)
        target.write_bytes(whole)

    monkeypatch.setattr(native, "_compile", build)
    mode = open_to_all.stat().st_mode
    open_to_all.chmod(0o777)
    try:
        assert what_runs() == ["spectral/native"]
    finally:
        open_to_all.chmod(mode)
    assert [full in path.parents for path in asked] == [False]


@needs_compiler
@pytest.mark.slow
def test_two_processes_build_one_kernel(tmp_path):
    count = tmp_path / "count"
    script = tmp_path / "counting"
    script.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo >> {count};; esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    code = "from econv.engines.spectral.native import reason; assert reason() is None, reason()"
    environment = {**os.environ, "CXX": str(script), "ECONV_CACHE": str(tmp_path / "kernels")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert count.read_text() == "\n"


def test_importing_builds_nothing(tmp_path):
    code = "import econv; econv.GroupConv2d(2, 2, 'p8', engine='spectral')"
    environment = {**os.environ, "ECONV_CACHE": str(tmp_path / "kernels")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not (tmp_path / "kernels").exists()


@needs_compiler
@pytest.mark.parametrize("flags", [["-pthread"], ["-pthread", "-mavx2", "-mfma"]])
def test_kernels_for_other_processors_are_equal(fresh, monkeypatch, flags):
    """Without OpenMP, and for narrower vectors than this processor has."""
    if "-mavx2" in flags and "avx2" not in native._processor():
        pytest.skip("the processor has no AVX2")
    layer = econv.GroupConv2d(3, 5, "p4", dtype=torch.float64)
    x = torch.randn(3, 12, 9, 21, dtype=torch.float64, requires_grad=True)
    probe = torch.randn(3, 20, 9, 21, dtype=torch.float64)

    def everything(engine):
        with econv.engine(engine) as ran:
            result = layer(x)
        return ran, [result, *torch.autograd.grad(result, [x, layer.weight], probe)]

    monkeypatch.setattr(native, "_TUNED", (flags,))
    monkeypatch.setattr(native, "_loaded_openmp", lambda: None)
    ran, found = everything("spectral")
    assert ran == ["spectral/native"]
    for a, b in zip(found, everything("dense")[1], strict=True):
        assert float((a - b).detach().abs().max()) <= 1e-11 * float(b.detach().abs().max())


@needs_compiler
def test_a_kernel_with_another_layout_refuses_to_run():
    library = native._library("float")
    job = (ctypes.c_int64 * 1000)()
    codes = [library.econv_spectral(ctypes.addressof(job), count) for count in range(1000)]
    assert sorted(set(codes)) == [1, 2]  # the one layout is refused for its stencils of size 0
    assert codes.count(2) == 1


@pytest.mark.parametrize("size", [1, 3, 5, 7, 9])
@pytest.mark.parametrize("group", ["p3", "p4", "p16", "p4m"])
def test_symmetry_classes_hold_the_whole_stencils(group, size):
    """The patch rebuilt from its parts, formed as the kernel forms them."""
    operators = "order<=0" if size == 1 else "order<=2" if size == 3 else "paper"
    stencils = spectral_plan(
        filter_basis(group, operators, size=size), "scalar", "regular"
    ).stencils
    start, chosen, adds, factors = native.symmetry_classes(stencils)
    patch = np.random.default_rng(0).normal(size=(size, size))
    r = size // 2

    def split(lines):
        opposite = [(lines[r + i], lines[r - i]) for i in range(1, r + 1)]
        return [lines[r]] + [a + b for a, b in opposite], [a - b for a, b in opposite]

    even, odd = split(patch.T)  # along x: lists of columns
    table = {}
    for name, side in (("even", even), ("odd", odd)):
        for x, column in enumerate(side):
            sums, gaps = split(column)
            for y, value in enumerate(sums):
                table["even", y, name, x] = value
            for y, value in enumerate(gaps):
                table["odd", y, name, x] = value

    def diagonal(kind, count, sign):
        found = []
        for a in range(count):
            if sign > 0:
                found.append(table[kind, a, kind, a])
            for b in range(a + 1, count):
                found.append(table[kind, a, kind, b] + sign * table[kind, b, kind, a])
        return found

    parts = [
        diagonal("even", r + 1, 1),
        diagonal("even", r + 1, -1),
        [table["odd", y, "even", x] for y in range(r) for x in range(r + 1)],
        [table["even", y, "odd", x] for x in range(r) for y in range(r + 1)],
        diagonal("odd", r, 1),
        diagonal("odd", r, -1),
    ]
    found = np.full(len(stencils), np.nan)
    place = 0
    for number, part in enumerate(parts):
        for entry in range(start[number], start[number + 1]):
            value = float(np.dot(factors[place : place + len(part)], part))
            place += len(part)
            found[chosen[entry]] = value + (found[chosen[entry]] if adds[entry] else 0.0)
    assert place == len(factors)
    wanted = (stencils * patch).sum(axis=(1, 2))
    assert np.abs(found - wanted).max() <= 1e-12 * np.abs(wanted).max()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("group", "source"), [("p8", "regular"), ("p4m", "lift")])
def test_every_threads_share_is_in_the_gradients(group, source, batch, threads):
    """Of the input, the weight and the bias; the output too. Threads divide images and rows."""
    order = econv.Group(group).order
    options = {"bias": True, "dtype": torch.float64}
    if source == "lift":
        layer, channels = econv.LiftConv2d(2, 3, group, **options), 2
    else:
        layer, channels = econv.GroupConv2d(2, 3, group, **options), 2 * order
    before = torch.get_num_threads()
    found = {}
    try:
        torch.set_num_threads(threads)
        for engine in ("dense", "spectral/native"):
            # Rows enough that a thread has some of its own in a single image.
            x = torch.randn(batch, channels, 67, 33, generator=torch.Generator().manual_seed(1))
            x = x.double().requires_grad_(True)
            layer.engine = engine
            layer.zero_grad()
            with econv.engine() as ran:
                out = layer(x)
            assert ran == [engine]
            weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
            (out * weights).sum().backward()
            gradients = layer.weight.grad.clone(), layer.bias.grad.clone()
            found[engine] = out.detach(), x.grad, *gradients
    finally:
        torch.set_num_threads(before)
    for ours, wanted in zip(found["spectral/native"], found["dense"], strict=True):
        assert float((ours - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max())
