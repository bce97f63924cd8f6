"""Why is it not equivariant, and what would help: against closed forms, and planted faults."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv import (
    CentredMaxPool2d,
    Downsample2d,
    GroupActivation2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
    VectorConv2d,
    convert,
    lab,
)
from econv.checking import FieldType
from econv.groups import Group
from econv.lab.advise import _changes
from econv.lab.measure import disc_mask
from econv.lab.motions import turn, velocity
from econv.lab.split import _inside
from econv.testing import smooth_field, transform


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def field(size: int = 49, smoothness: float = 4.0, **options: int) -> Tensor:
    """A smooth image with zeros around it, so that not even its border pixels turn out of sight."""
    inner = lab.windowed(smooth_field(size - 8, smoothness=smoothness, **options), start=0.2)
    return functional.pad(inner, (4, 4, 4, 4))


def filtering(kernel: Tensor) -> nn.Conv2d:
    """One filter as a convolution."""
    size = kernel.shape[-1]
    layer = nn.Conv2d(1, 1, size, padding=size // 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
    return layer


def derivative(axis: str) -> Tensor:
    """∂x, or ∂y upwards, to fourth order."""
    line = torch.tensor([1.0, -8.0, 0.0, 8.0, -1.0], dtype=torch.float64) / 12
    kernel = torch.zeros(5, 5, dtype=torch.float64)
    if axis == "x":
        kernel[2] = line
    else:
        kernel[:, 2] = -line
    return kernel


def gaussian(width: float = 1.5, size: int = 21) -> Tensor:
    line = torch.exp(-((torch.arange(size, dtype=torch.float64) - size // 2) ** 2) / 2 / width**2)
    return line[:, None] * line / line.sum() ** 2


def norm(x: Tensor) -> float:
    return float((x.detach() * disc_mask(x, lab.measure.MARGIN)).norm())


# motions

KINDS = [
    ("scalar", None, 2),
    ("vector", Group("p8"), 4),
    ("regular", Group("p8"), 16),
    ("regular", Group("p5"), 10),
    ("regular", Group("p4m"), 16),
    ("regular", Group("p1m"), 4),
]


@pytest.mark.parametrize(("kind", "group", "channels"), KINDS)
def test_the_velocity_of_a_rotation_is_that_of_small_turns(kind, group, channels):
    x, field_type = field(channels=channels), FieldType(kind, group)
    step = 0.01
    small = (turn(x, field_type, step) - turn(x, field_type, -step)) / (2 * math.radians(step))
    found = velocity(x, field_type, "rotation")
    assert norm(small - found) < 1e-5 * norm(found)


@pytest.mark.parametrize("name", ["p8", "p8m", "p6", "p3"])
def test_turns_by_angles_of_the_group_are_those_of_its_elements(name):
    group = Group(name)
    x = field(33, channels=2 * group.order)
    for element in range(1, group.rotations):
        degrees = 360 * element / group.rotations
        turned = turn(x, FieldType("regular", group), degrees)
        torch.testing.assert_close(turned, transform(x, group, element, "regular"))


def test_half_a_step_twice_is_a_step_but_for_the_highest_frequency():
    for name in ("p5", "p8"):
        group = Group(name)
        x = torch.randn(1, group.order, dtype=torch.float64)
        if group.order % 2 == 0:  # the samples know only its cosine
            sign = torch.tensor([(-1.0) ** k for k in range(group.order)], dtype=torch.float64)
            x = x - (x @ sign)[:, None] * sign / group.order
        half = 180 / group.rotations
        regular = FieldType("regular", group)
        twice = turn(turn(x, regular, half), regular, half)
        torch.testing.assert_close(twice, turn(x, regular, 2 * half))
        assert not torch.allclose(twice, x)


def test_the_velocities_of_a_wave_are_known():
    y, x = torch.meshgrid(*[torch.arange(81, dtype=torch.float64) - 40] * 2, indexing="ij")
    y = -y
    wave = torch.cos(0.3 * x + 0.2 * y)[None, None]
    slope = -torch.sin(0.3 * x + 0.2 * y)
    scalar = FieldType("scalar")
    wanted = {
        "rotation": (y * 0.3 - x * 0.2) * slope,
        "translation": -0.3 * slope,
        "scale": -(x * 0.3 + y * 0.2) * slope,
    }
    for name, expected in wanted.items():
        found = velocity(wave, scalar, name)
        assert norm(found - expected) < 1e-4 * norm(expected[None, None])
    up = velocity(wave, scalar, "translation", (0.0, 1.0), spacing=2.0)
    assert norm(up + 0.1 * slope) < 1e-4 * norm(up)


# lie_derivatives


def own(model: nn.Module, x: Tensor, transformation: str = "rotation") -> float:
    (layer,) = lab.lie_derivatives(model, x, transformation).layers
    assert layer.own is not None
    return layer.own


def test_an_isotropic_gaussian_commutes_with_turns_and_shifts_but_not_with_scale():
    x = field()
    blur = filtering(gaussian())
    assert own(blur, x) < 1e-6
    assert own(blur, x, "translation") < 1e-8
    # [G, e^{s²Δ/2}] = ± s²Δ e^{s²Δ/2}
    second = torch.tensor([0, 0, 1.0, 0, 0], dtype=torch.float64)
    line = torch.tensor([-1.0, 16.0, -30.0, 16.0, -1.0], dtype=torch.float64) / 12
    laplace = filtering(second[:, None] * line + line[:, None] * second)
    blurred = blur(x)
    expected = 1.5**2 * norm(laplace(blurred)) / norm(blurred)
    assert own(blur, x, "scale") == pytest.approx(expected, rel=0.01)


def test_the_lie_derivative_of_a_derivative_is_the_other_derivative():
    x = field()
    across, upwards = filtering(derivative("x")), filtering(derivative("y"))
    ratio = norm(upwards(x)) / norm(across(x))
    assert own(across, x) == pytest.approx(ratio, rel=1e-3)
    assert own(upwards, x) == pytest.approx(1 / ratio, rel=1e-3)
    # Derivatives commute with shifts, and are of degree one in the scale.
    assert own(across, x, "translation") < 1e-8
    assert own(across, x, "scale") == pytest.approx(1.0, rel=1e-2)


class Ramp(nn.Module):
    """The image times the x of its pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) - (x.shape[-1] - 1) / 2).to(x)


def test_what_depends_on_the_place_is_seen_by_shifts():
    x = field()
    assert own(Ramp(), x, "translation") == pytest.approx(norm(x) / norm(Ramp()(x)), rel=1e-4)
    # [x, G] of the scale is x itself, and of the rotation y.
    assert own(Ramp(), x, "scale") == pytest.approx(1.0, rel=1e-4)


def test_shifts_are_in_pixels_of_the_input_behind_strides():
    model = nn.Sequential(nn.AvgPool2d(2), nn.AvgPool2d(2), Ramp()).double()
    x = field(96, 12.0)
    table = lab.lie_derivatives(model, x, "translation")
    small = model[:2](x)
    expected = norm(small) / norm(Ramp()(small)) / 4  # a pixel of the input is a quarter here
    assert table.layers[2].own == pytest.approx(expected, rel=2e-3)
    assert table.layers[1].own < 1e-2 * expected * norm(Ramp()(small)) / norm(small)


def test_the_mean_of_all_pixels_is_invariant():
    x = field() + 1.0 - 1.0
    model = nn.Sequential(filtering(gaussian()), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    table = lab.lie_derivatives(model, lab.windowed(x, start=0.3) + 0.0)
    assert [entry.kind for entry in table.layers] == ["scalar", "invariant", "invariant"]
    assert table.layers[1].own < 1e-3
    corner = nn.Sequential(nn.Flatten(), nn.Linear(49 * 49, 2)).double()
    assert lab.lie_derivatives(corner, x).layers[0].own > 0.1


def smooth_network() -> nn.Sequential:
    layers = (nn.Conv2d(1, 4, 5, padding=2), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1), nn.GELU())
    return nn.Sequential(*layers).double()


def test_it_is_the_slope_of_the_error_over_the_angle():
    model, x = smooth_network(), field(smoothness=3.0)
    step = 0.02
    slope = lab.output_error(model, x, step) / math.radians(step)
    table = lab.lie_derivatives(model, x)
    assert table.output == pytest.approx(slope, rel=1e-3)
    assert table.layers[-1].total == pytest.approx(table.output)
    assert table.method == "forward mode"


def test_group_features_vectors_and_scores_are_slopes_too():
    regular = nn.Sequential(LiftConv2d(1, 2, "p8"), nn.Tanh(), GroupConv2d(2, 2, "p8"))
    vector = nn.Sequential(*copy.deepcopy(regular), VectorConv2d(2, 1, "p8"))
    pooled = nn.Sequential(*copy.deepcopy(regular), GroupPool2d("p8", "mean"))
    scores = nn.Sequential(*pooled, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = field(smoothness=2.0)
    for model in (regular, vector, pooled, scores):
        step = 0.002
        slope = lab.output_error(model.double(), x, step) / math.radians(step)
        assert lab.lie_derivatives(model, x).output == pytest.approx(slope, rel=1e-2)


def test_shares_are_a_whole_and_blame_what_was_planted():
    def blurs(planted: nn.Module) -> nn.Sequential:
        first, last = filtering(gaussian()), filtering(gaussian(2.0))
        return nn.Sequential(first, nn.Tanh(), planted, nn.Tanh(), last)

    slanted = filtering(gaussian() + 0.5 * functional.pad(derivative("x"), (8, 8, 8, 8)))
    table = lab.lie_derivatives(blurs(slanted), field())
    shares = [layer.share for layer in table.layers]
    assert sum(shares) + table.rest == pytest.approx(1.0, abs=1e-9)
    assert shares[2] == pytest.approx(1.0, abs=1e-2)
    assert table.largest(1)[0].name == "2"
    sound = lab.lie_derivatives(blurs(filtering(gaussian())), field())
    assert sound.output < 1e-3 * table.output


def test_functions_between_the_layers_are_the_rest():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blur = filtering(gaussian())

        def forward(self, x: Tensor) -> Tensor:
            return self.blur(x) * torch.linspace(0, 1, x.shape[-1]).to(x)

    table = lab.lie_derivatives(Shifted(), field())
    assert table.rest == pytest.approx(1.0, abs=1e-3)
    assert table.layers[0].own < 1e-6 < 0.1 < table.output


def test_functions_are_steps_as_modules_are():
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.relu(self.conv(x), inplace=True)
            return functional.max_pool2d(x, 2)[:, :, ::2, ::2].mean(dim=(2, 3))

    model = Functions().double()
    table = lab.lie_derivatives(model, field())
    names = [layer.name for layer in table.layers]
    assert names[:2] == ["conv", "Functions: relu"]
    assert [layer.type for layer in table.layers[3:]] == ["slice", "mean"]
    modules = nn.Sequential(model.conv, nn.ReLU(), nn.MaxPool2d(2))
    same = lab.lie_derivatives(modules, field())
    for one, other in zip(table.layers[:3], same.layers, strict=True):
        assert one.own == pytest.approx(other.own, rel=1e-9)


def test_modules_of_others_may_say_how_they_turn():
    ours = LiftConv2d(1, 2, "p8").double()
    foreign = nn.Conv2d(1, 16, 5, padding=2, bias=False).double()
    with torch.no_grad():
        foreign.weight.copy_(ours.filters())
    x = field()
    silent = own(foreign, x)  # its maps are taken for images
    foreign.group, foreign.output_kind = "p8", "regular"
    assert own(foreign, x) == pytest.approx(own(ours, x), rel=1e-6)
    assert own(ours, x) < 0.1 * silent


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Square(nn.Module):
    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.custom = custom

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x) if self.custom else x * x


def test_without_a_forward_mode_differences_are_taken_and_said():
    layers = nn.Conv2d(1, 4, 3, padding=1).double(), nn.Conv2d(4, 1, 3, padding=1).double()
    custom, known = (nn.Sequential(layers[0], Square(c), layers[1]) for c in (True, False))
    x = field()
    found, expected = lab.lie_derivatives(custom, x), lab.lie_derivatives(known, x)
    assert expected.method == "forward mode"
    assert found.method.startswith("finite differences, because forward mode stops at 1 (Square)")
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.own == pytest.approx(other.own, rel=1e-5, abs=1e-8)
        assert one.total == pytest.approx(other.total, rel=1e-5)
        assert one.share == pytest.approx(other.share, rel=1e-4, abs=1e-7)


def test_single_precision_agrees_with_double():
    model, x = smooth_network(), field()
    double = lab.lie_derivatives(model, x)
    single = lab.lie_derivatives(copy.deepcopy(model).float(), x.float())
    for one, other in zip(single.layers, double.layers, strict=True):
        assert one.own == pytest.approx(other.own, rel=1e-3, abs=1e-5)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p4"), GroupBatchNorm2d(2, "p4"), nn.ReLU(inplace=True), nn.Dropout(0.5)
    ).double()
    before = copy.deepcopy(model.state_dict())
    lab.lie_derivatives(model, field(17))
    lab.split_error(model, field(17))
    lab.advice(model, field(17))
    lab.sizes(model, field(17))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


# split_error


def source(split: lab.ErrorSplit, name: str) -> lab.Source:
    return next((s for s in split.sources if s.name == name), lab.Source(name, 0.0))


def test_the_shares_of_the_sources_are_a_whole():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8"), nn.ReLU(), GroupConv2d(2, 2, "p8"), nn.ReLU(), GroupPool2d("p8")
    ).double()
    split = lab.split_error(model, field(smoothness=3.0))
    assert sum(s.share for s in split.sources) == pytest.approx(1 - split.unexplained)
    assert abs(split.unexplained) < 0.02
    assert split.error == pytest.approx(
        lab.layer_errors(model, field(smoothness=3.0), elements=[1]).output[0].relative
    )
    of_layers = sum(layer.share for layer in split.layers)
    assert of_layers + source(split, "input").share == pytest.approx(1 - split.unexplained)


def test_linear_networks_have_shares_without_a_rest():
    model = nn.Sequential(
        LiftConv2d(1, 4, "p8", stencils="central"), GroupConv2d(4, 4, "p8", stencils="central")
    ).double()
    split = lab.split_error(model, field(65, 1.5))
    assert abs(split.unexplained) < 1e-9
    stencils = source(split, "stencils")
    assert stencils.share > 0.9
    assert stencils.alone == pytest.approx(split.error, rel=0.1)
    assert set(stencils.layers) == {"0 (LiftConv2d)", "1 (GroupConv2d)"}


def test_kinks_are_blamed_where_stencils_are_good_and_bends_are_not():
    def share(activation: nn.Module) -> float:
        model = nn.Sequential(LiftConv2d(1, 2, "p8"), activation, GroupConv2d(2, 2, "p8"))
        return source(lab.split_error(model.double(), field(65)), "activations").alone or 0.0

    assert share(nn.ReLU()) > 10 * share(nn.Tanh())


def test_blurred_activations_are_activations_and_blurs_alone_sampling():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8"), GroupActivation2d("relu"), GroupActivation2d("identity", width=1.1)
    ).double()
    split = lab.split_error(model, field(65))
    assert source(split, "activations").layers == ("1 (GroupActivation2d)",)
    assert source(split, "activations").share > 0.9
    assert abs(source(split, "sampling").share) < 0.1
    assert "other layers" not in {found.name for found in split.sources}


def test_what_a_conversion_flattens_turns_as_before():
    parts = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    source_network = nn.Sequential(*parts, nn.Linear(8, 3)).double()
    network = convert(source_network, "p4", example_input=field(33), measure=False)
    found = lab.split_error(network, field(33)).sources
    assert "not equivariant" not in {one.name for one in found}


def test_borders_are_blamed_for_images_that_reach_them():
    model = nn.Sequential(LiftConv2d(1, 2, "p8"), nn.Tanh(), GroupConv2d(2, 2, "p8")).double()
    model.extend([GroupPool2d("p8", "mean"), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    filled = lab.split_error(model, smooth_field(65, smoothness=4.0))
    faded = lab.split_error(model, lab.windowed(smooth_field(65, smoothness=4.0), start=0.5))
    assert source(filled, "borders").share > 0.9
    assert (source(faded, "borders").alone or 0.0) < source(filled, "borders").alone / 10


def test_a_stride_off_the_centre_is_sampling_at_every_angle():
    model = nn.Sequential(LiftConv2d(1, 4, "p8"), GroupConv2d(4, 4, "p8", stride=2)).double()
    for degrees in (45.0, 90.0):
        off = lab.split_error(model, field(64), degrees)
        assert source(off, "sampling").share > 0.8
        assert source(off, "sampling").layers == ("1 (GroupConv2d)",)
    on = lab.split_error(model, field(65), 90.0)
    assert on.exact
    assert on.sources == ()


def test_a_planted_layer_that_does_not_turn_is_named():
    norm = nn.BatchNorm2d(16)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    layers = [LiftConv2d(1, 2, "p8"), norm, nn.Tanh(), GroupConv2d(2, 2, "p8"), GroupPool2d("p8")]
    split = lab.split_error(nn.Sequential(*layers).double().eval(), field())
    assert split.sources[0].name == "not equivariant"
    assert split.sources[0].layers == ("1 (BatchNorm2d)",)
    nn.init.ones_(norm.weight)
    sound = lab.split_error(nn.Sequential(*layers).double().eval(), field())
    assert all(s.name != "not equivariant" for s in sound.sources)


def test_the_filters_of_an_ordinary_network_do_not_turn():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    split = lab.split_error(model.double().eval(), field(66), 90.0)
    blamed = source(split, "not equivariant")
    assert set(blamed.layers) <= {"0 (Conv2d)", "4 (Conv2d)"}
    assert abs(split.unexplained) < 0.1
    assert blamed.share == pytest.approx(1.0 - split.unexplained)


def test_angles_between_those_of_the_group_are_told_from_stencils():
    model = nn.Sequential(LiftConv2d(1, 4, "p4"), nn.Tanh(), GroupConv2d(4, 4, "p4")).double()
    model.append(GroupPool2d("p4", "mean"))
    split = lab.split_error(model, field())
    assert split.sources[0].name == "orientations"
    finer = nn.Sequential(LiftConv2d(1, 4, "p8"), nn.Tanh(), GroupPool2d("p8", "mean")).double()
    assert source(lab.split_error(finer, field(), 45.0), "orientations").share == 0.0


def test_sharp_images_lose_something_when_they_turn():
    model = nn.Sequential(LiftConv2d(1, 4, "p8"), GroupPool2d("p8", "mean")).double()
    sharp = lab.windowed(torch.randn(1, 1, 49, 49, dtype=torch.float64))
    assert (source(lab.split_error(model, sharp), "input").alone or 0.0) > 0.05
    assert (source(lab.split_error(model, field()), "input").alone or 0.0) < 1e-3


def test_what_cannot_be_split_is_said():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).double()
    x = field(17)
    for degrees in (0.0, 360.0, math.nan):
        with pytest.raises(ValueError, match="no whole turn"):
            lab.split_error(model, x, degrees)
    with pytest.raises(ValueError, match="square"):
        lab.split_error(model, x[..., 1:])
    with pytest.raises(ValueError, match="float tensor"):
        lab.lie_derivatives(model, x[0])
    with pytest.raises(ValueError, match="a transformation of"):
        lab.lie_derivatives(model, x, "shear")
    with pytest.raises(ValueError, match="shares are of the total"):
        lab.lie_derivatives(model, x, totals=False)
    own = lab.lie_derivatives(model, x, shares=False, totals=False)
    assert own.layers[0].own == lab.lie_derivatives(model, x).layers[0].own
    assert (own.output, own.layers[0].total) == (None, None)
    with pytest.raises(ValueError, match="finite and not zero"):
        lab.split_error(model, torch.full_like(x, math.nan))
    with pytest.raises(ValueError, match="pixels enough to turn by 45°; got 2×2"):
        lab.split_error(nn.Sequential(model, nn.AdaptiveAvgPool2d(2)), x)


class Moody(nn.Module):
    """Takes another way on its second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.relu = 0, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x if self.passes > 1 else self.relu(x)


def test_a_network_that_does_not_repeat_itself_is_refused():
    with pytest.raises(ValueError, match="the same on every image"):
        lab.lie_derivatives(Moody(), field(17))


# advice


def six_layers(**options: object) -> nn.Sequential:
    layers: list[nn.Module] = [LiftConv2d(1, 2, "p8", **options)]
    for _ in range(3):
        layers += [GroupBatchNorm2d(2, "p8"), nn.ReLU(), GroupConv2d(2, 2, "p8", **options)]
    return nn.Sequential(*layers).double().eval()


def test_what_is_advised_is_what_was_measured():
    model, x = six_layers(), field(65, 1.5)
    found = lab.advice(model, x, kinds=["activations"])
    best = found.suggestions[0]
    assert best.change == 'GroupActivation2d("silu") in place of these 3 ReLUs'
    assert best.layers == ("2", "5", "8")
    smooth = copy.deepcopy(model)
    for place in (2, 5, 8):
        smooth[place] = GroupActivation2d("silu").double()
    before, after = (lab.output_error(lab.calibrate(m, x), x) for m in (model, smooth))
    assert best.before == found.error == pytest.approx(before, rel=1e-9)
    assert best.after == pytest.approx(after, rel=1e-9)
    assert after < 0.4 * before


def test_advice_that_would_not_help_is_not_given():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8"), nn.ReLU(), nn.MaxPool2d(2), GroupConv2d(2, 2, "p8")
    ).double()
    off_centre, smooth = field(65, 3.0), "SiLU in place of this ReLU"
    found = lab.advice(model, off_centre)
    advised = [s.change for s in found.suggestions]
    assert smooth in found.tried
    assert smooth not in advised  # the samples lie off the centre, and that is all
    assert "Downsample2d('max') in place of this max pooling" in advised
    assert all(s.after <= 0.9 * s.before for s in found.suggestions)
    every = lab.advice(model, off_centre, kinds=["activations"], least=0.0)
    assert every.suggestions == () or every.suggestions[0].after > 0.9 * found.error


def test_stencils_are_tried_with_the_same_operators():
    def network(stencils: str) -> nn.Sequential:
        return nn.Sequential(
            LiftConv2d(1, 2, "p8", stencils=stencils), GroupConv2d(2, 2, "p8", stencils=stencils)
        ).double()

    model, isotropic = network("central"), network("isotropic")
    for one, other in zip(model, isotropic, strict=True):
        other.set_coefficients(one.coefficients().detach())
    x = field(65, 1.5)
    found = lab.advice(model, x, kinds=["stencils"])
    after = {s.change: s.after for s in found.suggestions}
    wanted = lab.output_error(isotropic, x)
    assert after['stencils="isotropic" in these 2 convolutions'] == pytest.approx(wanted, rel=1e-6)
    assert wanted < found.error / 5


def test_nothing_is_advised_to_what_is_exact():
    found = lab.advice(six_layers(), field(33), 90.0)
    assert found.suggestions == found.tried == ()
    assert found.error < 1e-12


def test_held_statistics_are_held():
    model, x = six_layers(), field(65, 1.5)
    lab.calibrate(model, 3 * x)
    held = lab.advice(model, x, kinds=["activations"], statistics="held")
    assert held.error == pytest.approx(lab.output_error(model, x), rel=1e-9)
    assert held.error != pytest.approx(lab.advice(model, x, kinds=[]).error, rel=1e-3)


def test_poolings_and_strides_are_changed_and_functions_too():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(1, 4, 5, padding=2), CentredMaxPool2d(3, 2, 1)
            self.down = nn.Conv2d(4, 4, 1, stride=2)
            with torch.no_grad():
                self.conv.weight.copy_(
                    gaussian(1.0, 5) * torch.tensor([1.0, -1, 2, -2])[:, None, None, None]
                )

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.pool(torch.relu(self.conv(x))))

    model = Functional().double()
    found = lab.advice(model, field(65, 2.0))
    assert "SiLU in place of this ReLU" in found.tried
    assert "Downsample2d('max') in place of this max pooling" in found.tried
    assert any(s.change.startswith("stride 1 and then Downsample2d()") for s in found.suggestions)
    assert found.together is None or found.together.after < found.suggestions[0].after
    assert isinstance(model.pool, CentredMaxPool2d)


def test_a_plain_background_is_advised_where_there_is_none():
    model = nn.Sequential(LiftConv2d(1, 2, "p8"), GroupPool2d("p8", "mean")).double()
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    text = "images faded to zero outside of their inscribed disc"
    assert text in [s.change for s in lab.advice(model, smooth_field(33) + 1.0).suggestions]
    assert text not in lab.advice(model, lab.windowed(smooth_field(33) + 1.0, start=0.6)).tried


def test_bad_requests_for_advice_are_refused():
    with pytest.raises(ValueError, match="'estimated' or 'held'"):
        lab.advice(six_layers(), field(17), statistics="new")
    with pytest.raises(ValueError, match=r"kinds among .*; got \['engines'\]"):
        lab.advice(six_layers(), field(17), kinds=["engines"])
    with pytest.raises(ValueError, match="a fraction"):
        lab.advice(six_layers(), field(17), least=1.0)


# sizes


class Sliced(nn.Module):
    def __init__(self, start: int, step: int) -> None:
        super().__init__()
        self.start, self.step = start, step

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.start :: self.step, self.start :: self.step]


class Function(nn.Module):
    def __init__(self, function, **options: object) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self.options)


def symmetric(layer: nn.Module) -> nn.Module:
    """The same with filters that quarter turns and flips leave alone: only sampling can fail."""
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.ndim == 4:
                turned = [weight.rot90(k, (-2, -1)) for k in range(4)]
                turned += [t.flip(-1) for t in turned]
                weight.copy_(torch.stack(turned).mean(0))
    return layer


ONES = torch.ones(1, 1, 3, 3, dtype=torch.float64)
SAMPLERS = {
    "max 2": lambda: nn.MaxPool2d(2),
    "max 3/2": lambda: nn.MaxPool2d(3, 2, 1),
    "max ceil": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "max dilated": lambda: nn.MaxPool2d(2, stride=3, dilation=2),
    "average 3/2": lambda: nn.AvgPool2d(3, 2),
    "conv 3/2": lambda: nn.Conv2d(1, 2, 3, 2, 1),
    "conv 4/2": lambda: nn.Conv2d(1, 2, 4, 2, 1),
    "conv 1/3": lambda: nn.Conv2d(1, 2, 1, 3),
    "conv 5/4 dilated": lambda: nn.Conv2d(1, 2, 3, 4, 2, dilation=2),
    "conv same": lambda: nn.Conv2d(1, 2, 4, padding="same"),
    "functional conv": lambda: Function(functional.conv2d, weight=ONES, stride=2),
    "functional pad": lambda: Function(functional.pad, pad=(1, 0)),
    "conv valid": lambda: nn.Conv2d(1, 2, 3, padding="valid"),
    "transposed": lambda: nn.ConvTranspose2d(1, 2, 3, 2, 1),
    "transposed, longer": lambda: nn.ConvTranspose2d(1, 2, 3, 2, 1, output_padding=1),
    "one side": lambda: nn.ZeroPad2d((0, 1, 0, 1)),
    "both sides": lambda: nn.ReflectionPad2d(1),
    "adaptive": lambda: nn.AdaptiveAvgPool2d(5),
    "nearest": lambda: nn.Upsample(size=(9, 9)),
    "nearest ×2": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(size=(9, 9), mode="bilinear"),
    "slice": lambda: Sliced(0, 2),
    "slice from 1": lambda: Sliced(1, 3),
    "functional max": lambda: Function(functional.max_pool2d, kernel_size=3, stride=2),
    "functional average": lambda: Function(functional.avg_pool2d, kernel_size=2),
    "functional nearest": lambda: Function(functional.interpolate, size=(7, 7)),
    "exact": lambda: (
        nn.Interpolate
        if False
        else Function(functional.interpolate, size=(7, 7), mode="nearest-exact")
    ),
    "econv": lambda: Downsample2d(),
    "econv max": lambda: CentredMaxPool2d(3, 2, 1),
    "PDO-eConv": lambda: LiftConv2d(1, 1, "p4", stride=2),
    "PDO-eConv, centred": lambda: LiftConv2d(1, 1, "p4", stride=2, centred=True),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("name", SAMPLERS)
def test_sizes_fit_where_quarter_turns_are_measured_to_be_exact(name):
    layer = symmetric(SAMPLERS[name]().double())
    kind = "regular" if isinstance(layer, LiftConv2d) else "scalar"
    wanted = []
    for n in range(10, 19):
        x = torch.randn(1, 1, n, n, dtype=torch.float64)
        result, expected = layer(transform(x, "p4", 1)), transform(layer(x), "p4", 1, kind)
        if result.shape == expected.shape and torch.allclose(result, expected, atol=1e-12):
            wanted.append(n)
    model = nn.Sequential(nn.Conv2d(1, 1, 1), layer).double()
    found = lab.sizes(model, torch.zeros(1, 1, 14, 14).double(), range(10, 19))
    assert list(found.fitting) == wanted
    assert found.exact == (14 in wanted)
    if not found.exact:
        assert found.misfits[0].name.startswith("1")
        assert found.misfits[0].reads == 14


def test_a_size_that_breaks_has_its_layer_and_the_nearest_that_fits():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1)
    )
    found = lab.sizes(model, torch.zeros(1, 3, 32, 32))
    assert found.exact is False
    assert [(m.name, m.reads) for m in found.misfits] == [("3 (Conv2d)", 16)]
    assert (found.below, found.above, found.pattern) == (30, 34, "sizes 4k+2")
    text = lab.size_verdict(found)
    assert "does not fit 32×32 pixels: 3 (Conv2d) reads 16 pixels: 8 windows of 3 pixels" in text
    assert "The nearest that fit: 30 and 34." in text
    assert lab.sizes(model, torch.zeros(1, 3, 30, 30)).exact


def test_sizes_far_away_are_found():
    layers = [nn.Conv2d(1, 1, 3, 2, 1) for _ in range(5)]
    found = lab.sizes(nn.Sequential(*layers), torch.zeros(1, 1, 49, 49))
    assert (found.below, found.above) == (33, 65)
    assert found.fitting == ()
    assert found.pattern == "none of these"


def test_a_size_that_does_not_run_is_said():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 14 * 14, 2))
    found = lab.sizes(model, torch.zeros(1, 1, 20, 20))
    assert found.exact is None
    assert (found.below, found.fitting) == (16, (16,))
    assert "does not run on 20×20" in lab.size_verdict(found)


def test_networks_that_need_numbers_have_sizes():
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.max_pool2d(x, 2) if float(x.sum()) >= 0 else x

    found = lab.sizes(Branching(), torch.zeros(1, 1, 9, 9), [8, 9])
    assert (found.exact, found.fitting) == (False, (8,))


def test_bad_sizes_are_refused():
    model = nn.MaxPool2d(2)
    with pytest.raises(ValueError, match="at least 1 pixel"):
        lab.sizes(model, torch.zeros(1, 1, 8, 8), [0, 4])
    with pytest.raises(ValueError, match="square"):
        lab.sizes(model, torch.zeros(1, 1, 8, 9))


def test_every_answer_becomes_json():
    model, x = six_layers(), field(33, 1.5)
    answers = [
        lab.lie_derivatives(model, x),
        lab.split_error(model, x),
        lab.advice(model, x, kinds=["activations"]),
        lab.sizes(nn.MaxPool2d(2), x),
    ]
    for answer in answers:
        assert json.loads(json.dumps(answer.to_dict(), allow_nan=False)) == answer.to_dict()


def test_the_inside_is_what_no_border_reaches_neither_before_nor_after_the_turn():
    x = torch.zeros(1, 1, 9, 15)
    inside = _inside(x, 0.0, 2).bool()
    assert inside[2:-2, 2:-2].all()
    assert int(inside.sum()) == 5 * 11
    turned = _inside(x, 90.0, 2).bool()  # what was 4 from the centre along y now is along x
    assert turned[4, 7]
    columns = [c for c in range(15) if turned[4, c]]
    assert columns == [5, 6, 7, 8, 9]
    assert [r for r in range(9) if turned[r, 7]] == [2, 3, 4, 5, 6]


def test_fading_is_tried_where_corners_hold_something_only():
    bright = torch.ones(1, 1, 16, 16)
    model = nn.Sequential(LiftConv2d(1, 1, "p4"))
    kinds = [change.kind for change in _changes(model, bright, ())]
    assert "images" in kinds
    kinds = [change.kind for change in _changes(model, lab.windowed(bright), ())]
    assert "images" not in kinds
