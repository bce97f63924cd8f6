"""Converted networks on other sizes than their example: exact, like the source, or an error."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import econv
from econv import convert
from plain_networks import UNet, conv_norm
from test_convert import Of, converted, images, quarter_turn_error

SIZES = (24, 25, 26, 27, 30, 32, 35)


# Branches on sizes


@pytest.mark.parametrize("example", [27, 32])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_u_net_runs_on_every_size_whatever_its_example(example, transposed):
    network = converted(UNet((8, 8, 16), transposed=transposed), size=example)
    for size in SIZES:
        x = images(size)
        assert network(x).shape == (2, 2, size, size)
        assert quarter_turn_error(network, x) <= 1e-12
    plain = econv.export(network.eval())
    for size in SIZES:
        x = images(size)
        assert torch.allclose(plain(x), network(x), atol=1e-10)
    oblong = torch.randn(1, 3, 29, 33, dtype=torch.float64)
    assert network(oblong).shape == plain(oblong).shape == (1, 2, 29, 33)


def test_a_u_net_has_a_program_for_every_size():
    network = converted(UNet((8, 8)), size=32).eval()
    sides = {2: torch.export.Dim("height", min=12), 3: torch.export.Dim("width", min=12)}
    program = torch.export.export(network, (images(32),), dynamic_shapes=(sides,), strict=False)
    for size in (32, 27, 30):
        assert torch.allclose(program.module()(images(size) * 0 + 1), network(images(size) * 0 + 1))


def resized(self, x, y):
    small = functional.max_pool2d(y, 2)
    large = functional.interpolate(self.conv(small), scale_factor=2.0, mode="bilinear")
    if large.shape != y.shape:
        large = functional.interpolate(large, size=y.shape[2:], mode="bilinear")
    return large + y


def cropped(self, x, y):
    small = functional.max_pool2d(y, 2, ceil_mode=True)
    large = functional.interpolate(self.conv(small), scale_factor=2.0, mode="bilinear")
    if large.size(2) != y.size(2) or large.size(3) != y.size(3):
        top, left = (large.size(2) - y.size(2)) // 2, (large.size(3) - y.size(3)) // 2
        large = large[:, :, top : top + y.size(2), left : left + y.size(3)]
    return large + y


@pytest.mark.parametrize("example", [24, 27])
@pytest.mark.parametrize("function", [resized, cropped])
def test_resizing_and_cropping_to_a_size_are_kept_for_every_size(function, example):
    network = converted(Of(function, conv=nn.Conv2d(8, 8, 3, padding=1)), size=example)
    assert not any("is refused" in note for note in network.report.notes)
    for size in SIZES:
        assert quarter_turn_error(network, images(size)) <= 1e-12


def asks_for_more(self, x, y):
    pooled = functional.max_pool2d(y, 2)
    if pooled.shape[2:] != y[:, :, ::2, ::2].shape[2:]:
        pooled = self.conv(functional.pad(pooled, (0, 1, 0, 1)))
    return pooled


def asks_for_one(self, x, y):
    return y if y.shape[2] > 20 else -y


def counts(self, x, y):
    return y * float(int(y.shape[2]) + 0 * len(range(y.shape[3])))


@pytest.mark.parametrize(
    ("function", "other", "text"),
    [
        (asks_for_more, 25, r"if pooled\.shape"),
        (asks_for_one, 16, r"y\.shape\[2\] > 20"),
        (counts, 25, r"int\(y\.shape"),
    ],
)
def test_a_branch_that_does_more_is_for_the_sizes_where_it_was_answered(function, other, text):
    network = converted(Of(function, conv=nn.Conv2d(8, 8, 3, padding=1))).eval()
    plain = econv.export(network)
    same = images(24)
    assert torch.allclose(plain(same), network(same))
    with pytest.raises(ValueError, match=rf"(?s)expected sizes like those of the example.*{text}"):
        network(images(other))
    with pytest.raises(AssertionError, match=text):
        plain(images(other))
    assert any("is refused" in note for note in network.report.notes)


def test_questions_about_channels_and_the_batch_are_not_refused():
    def function(self, x, y):
        assert y.shape[1] == 8
        return y.reshape(int(y.shape[0]), y.shape[1], y.shape[2], y.shape[3])

    network = converted(Of(function))
    assert network(images(27, batch=5)).shape == (5, 5, 27, 27)


def test_questions_about_device_dtype_and_layout_are_not_refused():
    def function(self, x, y):
        if y.is_cuda or y.device.type == "cpu" or not y.is_contiguous():
            y = y + 0
        return y * 2 if y.dtype == torch.float16 else y

    network = converted(Of(function))
    x = images(26).to(memory_format=torch.channels_last)
    assert network(x).shape == (2, 5, 26, 26)
    assert network.float()(x.float()).dtype == torch.float32


def test_rounded_sizes_are_computed_anew():
    import math

    def function(self, x, y):
        side = math.ceil(y.shape[2] / 2) * 2
        return functional.interpolate(y, size=(side, side), mode="bilinear")

    network = converted(Of(function))
    assert [network(images(n)).shape[-1] for n in (24, 25, 30, 31)] == [24, 26, 30, 32]


# Classifiers of a whole map


@pytest.mark.parametrize("pooled", [2, 1])
def test_a_classifier_of_a_flattened_map_refuses_other_sizes_as_the_source_does(pooled):
    side = 12 // pooled
    source = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, pooled, 1)),
        *(nn.Flatten(), nn.Linear(16 * side * side, 4)),
    )
    network = converted(source).eval()
    plain = econv.export(network, images(24))
    assert network(images(24)).shape == (2, 4)
    for size in (20, 32):
        with pytest.raises(ValueError, match=rf"4 reads a map of {side}×{side}"):
            network(images(size))
        with pytest.raises(AssertionError, match=rf"4 reads a map of {side}×{side}"):
            plain(images(size))


# Resizing


def pyramid(self, x, y):
    small = self.conv(functional.max_pool2d(y, 2))
    return y + functional.interpolate(small, size=y.shape[2:], mode="nearest")


RESIZED = {
    "to the size of another map": pyramid,
    "to a size": lambda s, x, y: functional.interpolate(y, size=(48, 48)),
    "to one number": lambda s, x, y: functional.interpolate(y, size=31),
    "by one and a half": lambda s, x, y: functional.interpolate(y, scale_factor=1.5),
    "to a half": lambda s, x, y: functional.interpolate(y, scale_factor=0.5),
    "to a half, linearly": lambda s, x, y: functional.interpolate(
        y, scale_factor=0.5, mode="bilinear"
    ),
    "by one and a half, linearly": lambda s, x, y: functional.interpolate(
        y, scale_factor=1.5, mode="bilinear", align_corners=False
    ),
    "module to a size": lambda s, x, y: s.up(y),
    "module by one and a half": lambda s, x, y: s.by(y),
}


@pytest.mark.parametrize("name", RESIZED)
def test_resizing_is_exact_on_every_size(name):
    parts = {"up": nn.Upsample(33), "by": nn.Upsample(scale_factor=1.5)}
    source = Of(RESIZED[name], conv=nn.Conv2d(8, 8, 3, padding=1), **parts).double()
    network = converted(source)
    for size in (20, *SIZES):
        x = images(size)
        assert network(x).shape == source(x).shape
        assert quarter_turn_error(network, x) <= 1e-12


@pytest.mark.parametrize("size", [24, 26, 48])
def test_nearest_pixels_are_the_source_s_on_multiples(size):
    source = Of(pyramid, conv=nn.Conv2d(8, 8, 1)).double()
    x = images(size)
    options = {"pretrained": True, "options": {"stencils": "central"}}
    network = convert(source, "p1", "fields", example_input=x, **options)
    assert torch.allclose(network(x), source(x), atol=1e-12)


# The process that converts


def test_compiling_after_a_conversion_knows_math():
    program = """
import math, torch, econv
from torch import nn
x = torch.randn(1, 3, 12, 12)
source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
network = econv.convert(source, "p4", "width", example_input=x, measure=False).eval()
compiled = torch.compile(network, fullgraph=True, backend="eager")
assert torch.allclose(compiled(x), network(x), atol=1e-6)
def own(x):
    return x * math.prod((2, x.shape[2])) + torch.arange(x.shape[3]) + torch.zeros(x.shape[3])
assert torch.equal(torch.compile(own, fullgraph=True, backend="eager")(x), own(x))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_only_equal_sizes_are_traced_as_different():
    source = nn.Sequential(conv_norm(3, 8), nn.Conv2d(8, 2, 1))
    assert converted(source).report.notes == ()
