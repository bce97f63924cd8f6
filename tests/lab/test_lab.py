"""The laboratory: each instrument finds what is there, and says no to what is not."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Restrict2d,
    VectorConv2d,
    filter_basis,
    lab,
)
from econv.files import atomic
from econv.models import ResNet
from econv.testing import equivariance_error, rotate, smooth_field, transform


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def network(group: str = "p8", middle: nn.Module | None = None, **options: object) -> nn.Sequential:
    return nn.Sequential(
        LiftConv2d(1, 2, group, **options),
        middle or GroupBatchNorm2d(2, group),
        nn.ReLU(),
        GroupConv2d(2, 2, group, **options),
        GroupPool2d(group),
    ).double()


# rotate


@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3, 4])
def test_rotate_is_exact_at_quarter_turns(quarters):
    x = smooth_field(8, channels=2)
    assert torch.equal(rotate(x, 90.0 * quarters), torch.rot90(x, quarters, (-2, -1)))


def test_rotate_turns_as_the_group_does():
    x = smooth_field(17)
    torch.testing.assert_close(rotate(x, 135), transform(x, "p8", 3), rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(x, -45), transform(x, "p8", 7), rtol=0, atol=1e-13)


def test_rotating_there_and_back_keeps_smooth_images():
    x = lab.windowed(smooth_field(65, smoothness=4.0))
    back = rotate(rotate(x, 17.0), -17.0)
    assert float((back - x).norm() / x.norm()) < 1e-4
    assert float((rotate(x, 17.0) - x).norm() / x.norm()) > 0.1


@pytest.mark.parametrize("degrees", [math.nan, math.inf])
def test_rotate_refuses_what_is_no_angle(degrees):
    with pytest.raises(ValueError, match="finite angle"):
        rotate(torch.zeros(1, 1, 4, 4), degrees)


def test_rotate_interpolates_no_whole_numbers():
    with pytest.raises(ValueError, match="floating-point"):
        rotate(torch.arange(9).reshape(1, 1, 3, 3), 45)


def test_rotate_refuses_what_is_no_image():
    with pytest.raises(ValueError, match="height, width"):
        rotate(torch.zeros(4, 4), 90)


# layer_errors


def test_a_sound_network_is_exact_on_the_grid_and_close_elsewhere():
    table = lab.layer_errors(network().eval(), smooth_field(33, smoothness=3.0))
    assert [layer.name for layer in table.layers] == ["0", "1", "2", "3", "4"]
    assert [layer.kind for layer in table.layers] == ["regular"] * 4 + ["scalar"]
    assert table.names[:2] == ("45°", "90°")
    assert table.unknown == ()
    assert table.first_inexact(1e-12) is None
    for layer in table.layers:
        assert 1e-12 < layer.errors[0] < 0.05


def test_the_error_after_a_layer_is_that_of_the_checker():
    model, x = network(), smooth_field(33)
    table = lab.layer_errors(model, x, elements=[1, 2])
    expected = [equivariance_error(model[:4], x, element, "p8") for element in (1, 2)]
    assert table.layers[3].errors == pytest.approx(expected, abs=1e-15)


def test_a_norm_that_treats_orientations_unequally_is_pointed_at():
    norm = nn.BatchNorm2d(16)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
    model = network(middle=norm).eval()
    table = lab.layer_errors(model, smooth_field(32))
    assert table.first_inexact() == "1"
    assert max(table.layers[0].errors[1], table.layers[0].errors[3]) < 1e-12
    assert table.layers[1].errors[1] > 0.1
    assert "1" not in table.strided


def test_a_stride_off_the_centre_is_pointed_at_on_even_sizes_only():
    model = nn.Sequential(LiftConv2d(1, 2, "p4"), GroupConv2d(2, 2, "p4", stride=2)).double()
    even = lab.layer_errors(model, smooth_field(32))
    odd = lab.layer_errors(model, smooth_field(33))
    assert even.first_inexact() == "1"
    assert even.strided == ("1",)
    assert odd.first_inexact(1e-12) is None


def test_nan_is_not_taken_for_exact():
    model = network()
    with torch.no_grad():
        model[3].weight.fill_(math.nan)
    assert lab.layer_errors(model, smooth_field(16)).first_inexact() == "3"


def test_modules_of_unknown_effect_are_listed_and_not_guessed():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p4"), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 3)
    ).double()
    table = lab.layer_errors(model, smooth_field(8))
    assert [layer.name for layer in table.layers] == ["0"]
    assert table.unknown == ("1 (Conv2d)", "2 (ReLU)", "3 (Flatten)", "4 (Linear)")
    assert table.output_kind == "invariant"
    assert table.output[0].relative > 0.01


def test_the_kind_flows_through_functions_between_modules():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.conv = LiftConv2d(1, 2, "p4"), GroupConv2d(2, 2, "p4")
            self.act, self.pool = nn.ReLU(inplace=True), GroupPool2d("p4")
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            x = self.act(torch.relu(x) + self.conv(functional.max_pool2d(x, 3, 1, 1)))
            x = self.pool(torch.cat([x, 2 * x], dim=1))
            return self.head(x.mean(dim=(2, 3)))

    table = lab.layer_errors(Residual().double(), smooth_field(16))
    kinds = {layer.name: layer.kind for layer in table.layers}
    assert kinds == {
        "lift": "regular",
        "conv": "regular",
        "act": "regular",
        "pool": "scalar",
        "head": "invariant",
    }
    assert table.unknown == ()
    assert table.first_inexact(1e-11) is None
    assert table.output_kind == "invariant"


def test_a_function_that_mixes_channels_ends_the_kind():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.act = LiftConv2d(1, 2, "p4"), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.lift(x).flip(1)).mean(dim=(2, 3))

    table = lab.layer_errors(Mixed().double(), smooth_field(16))
    assert table.unknown == ("act (ReLU)",)


def test_what_is_changed_in_place_was_recorded_before():
    model, changed = network(), network()
    changed.load_state_dict(model.state_dict())
    changed[2] = nn.ReLU(inplace=True)
    x = smooth_field(24)
    assert lab.layer_errors(model, x).layers[1] == lab.layer_errors(changed, x).layers[1]


def test_a_relu_on_vectors_is_unknown():
    model = nn.Sequential(LiftConv2d(1, 2, "p8"), VectorConv2d(2, 1, "p8"), nn.ReLU()).double()
    with pytest.raises(ValueError, match=r"not known to be an equivariant map.*2 \(ReLU\)"):
        lab.layer_errors(model, smooth_field(17))
    table = lab.layer_errors(model[:2], smooth_field(17))
    assert table.layers[-1].kind == "vector"
    assert table.first_inexact(1e-12) is None


def test_scores_report_difference_and_agreement():
    model = nn.Sequential(*network("p4"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 5))
    table = lab.layer_errors(model.double(), smooth_field(16, batch=3))
    assert [error.agreement for error in table.output] == [1.0] * 3
    assert max(error.absolute for error in table.output) < 1e-12
    broken = nn.Sequential(nn.Flatten(), nn.Linear(256, 5)).double()
    scores = lab.layer_errors(broken, smooth_field(16, batch=16), "p4").output
    assert min(error.agreement for error in scores) < 1.0
    assert max(error.absolute for error in scores) > 0.1


def test_the_whole_resnet_is_known():
    model = ResNet("p4m", depth=8, fields=(1, 2, 2), in_channels=1, pool="max", exact=True)
    table = lab.layer_errors(model.double().eval(), smooth_field(20), elements=[1, 5])
    assert table.unknown == ()
    assert table.output_kind == "invariant"
    assert table.first_inexact(1e-11) is None


def test_elements_of_a_subgroup_are_found_in_larger_groups():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8"), Restrict2d("p8", "p4"), GroupConv2d(4, 1, "p4")
    ).double()
    x = smooth_field(16)
    with pytest.raises(ValueError, match=r"several \(p4, p8\)"):
        lab.layer_errors(model, x)
    assert lab.layer_errors(model, x, "p4").first_inexact(1e-12) is None
    with pytest.raises(ValueError, match="not a subgroup"):
        lab.layer_errors(model, x, "p8")


def test_regular_features_without_pixels_still_permute():
    model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    table = lab.layer_errors(model, smooth_field(16))
    assert [layer.kind for layer in table.layers] == ["regular"] * 3
    assert table.first_inexact(1e-11) is None


def test_the_model_is_left_as_it_was():
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    lab.layer_errors(model, smooth_field(16))
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_images_that_are_not_square_are_refused_for_quarter_turns_only():
    model, x = network(), torch.randn(1, 1, 16, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected square images.*16×20"):
        lab.layer_errors(model, x)
    assert lab.layer_errors(model, x, elements=[4]).first_inexact(1e-12) is None
    with pytest.raises(ValueError, match="square"):
        lab.angle_curve(model, x)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3)), {}, "the model has no layer that names one"),
        (nn.Conv2d(1, 4, 3), {"group": "p4"}, "no equivariant map"),
        (LiftConv2d(1, 1, "p4"), {"elements": [4]}, "elements of p4 from 0 to 3"),
        (LiftConv2d(1, 1, "p4"), {"elements": []}, "elements of p4"),
        (LiftConv2d(3, 1, "p4", vectors=1), {}, "got 'mixed'"),
        (nn.LSTM(16, 4), {"group": "p4"}, None),
    ],
    ids=["no group", "plain", "element", "empty", "mixed kinds", "tuple"],
)
def test_what_cannot_be_checked_is_said(model, options, message):
    x = smooth_field(16, channels=3 if message == "got 'mixed'" else 1)
    if message is None:
        x, message, model = x, "gives a tensor", _Tuple()
    with pytest.raises(ValueError, match=message):
        lab.layer_errors(model.double(), x, **options)


class _Tuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize("x", [torch.zeros(3, 3), torch.zeros(1, 1, 8, 8, dtype=torch.long), None])
def test_what_is_no_batch_of_images_is_refused(x):
    with pytest.raises(ValueError, match="float tensor"):
        lab.layer_errors(LiftConv2d(1, 1, "p4"), x)


# angle_curve


def test_the_angle_curve_is_lowest_at_the_angles_of_the_group():
    curve = lab.angle_curve(
        network(), lab.windowed(smooth_field(49, smoothness=4.0)), angles=[0, 22.5, 45, 90]
    )
    assert curve.kind == "scalar"
    assert curve.errors[0] == 0.0
    assert curve.errors[3] < 1e-12
    assert 1e-12 < curve.errors[2] < curve.errors[1] / 2


def test_the_angle_curve_tells_a_cnn_from_an_equivariant_network():
    model, x = network(), lab.windowed(smooth_field(33, smoothness=3.0))
    ours = lab.angle_curve(model, x, angles=[90])
    twin = lab.angle_curve(lab.plain_twin(model), x, angles=[90])
    assert ours.errors[0] < 1e-12
    assert twin.errors[0] > 0.1


def test_the_curve_of_scores_says_how_many_answers_change():
    class Corner(nn.Module):
        group = "p4"

        def forward(self, x: Tensor) -> Tensor:
            return x[:, 0, 1, 1:3]  # which of two pixels is larger

    x = torch.zeros(2, 1, 4, 4)
    x[0, 0, 1, 1] = x[1, 0, 1, 2] = 1.0
    curve = lab.angle_curve(Corner(), x, angles=[0, 90, 180])
    # A quarter turn brings the one from the left to the lower left: both are 0, the first is taken.
    assert curve.changed == (0.0, 0.5, 0.5)
    assert lab.angle_curve(network().eval(), smooth_field(9), angles=[0.0]).changed is None


def test_group_maps_have_a_curve_at_the_angles_of_the_group_only():
    model, x = LiftConv2d(1, 2, "p6").double(), smooth_field(25, smoothness=3.0)
    curve = lab.angle_curve(model, x)
    assert curve.angles == pytest.approx([0, 60, 120, 180, 240, 300])
    assert curve.errors[3] < 1e-12
    assert max(curve.errors) < 0.05
    with pytest.raises(ValueError, match=r"multiples of 60°.*got 45"):
        lab.angle_curve(model, x, angles=[0, 45])


def test_vector_outputs_turn_at_any_angle():
    model = nn.Sequential(LiftConv2d(1, 4, "p16"), VectorConv2d(4, 1, "p16")).double()
    x = lab.windowed(smooth_field(49, smoothness=5.0))
    errors = lab.angle_curve(model, x, angles=[45, 90, 180]).errors
    assert errors[0] < 0.05
    assert max(errors[1:]) < 1e-12


def test_invariant_outputs_are_compared_as_they_are():
    model = nn.Sequential(*network("p4"), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    curve = lab.angle_curve(model, smooth_field(17), angles=[90, 30])
    assert curve.kind == "invariant"
    assert curve.errors[0] < 1e-12 < curve.errors[1]


# resolution_curve


@pytest.mark.parametrize("stencils", ["central", "isotropic"])
@pytest.mark.parametrize("group", ["p8", "p6m"])
def test_layers_converge_with_order_two(stencils, group):
    for layer in (LiftConv2d(2, 3, group, stencils=stencils), GroupConv2d(2, 2, group)):
        assert lab.resolution_curve(layer).order > 1.8
    central = lab.resolution_curve(LiftConv2d(2, 3, group, stencils="central"))
    assert central.order == pytest.approx(2.0, abs=0.1)


def test_stacks_converge_and_fourth_order_stencils_faster():
    def stack(**options: object) -> nn.Sequential:
        return nn.Sequential(
            LiftConv2d(1, 2, "p8", stencils="central", **options),
            nn.Tanh(),
            GroupBatchNorm2d(2, "p8"),
            GroupConv2d(2, 2, "p8", stencils="central", **options),
            GroupPool2d("p8", "mean"),
        )

    assert lab.resolution_curve(stack()).order == pytest.approx(2.0, abs=0.1)
    assert lab.resolution_curve(stack(accuracy=4)).order == pytest.approx(4.0, abs=0.3)


def test_a_layer_that_does_not_turn_does_not_converge():
    layer = LiftConv2d(1, 2, "p8")

    class Wrong(LiftConv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flip(1)

    wrong = Wrong(1, 2, "p8")
    assert lab.resolution_curve(layer).errors[-1] < 1e-5
    curve = lab.resolution_curve(wrong)
    assert abs(curve.order) < 0.5
    assert curve.errors[-1] > 1e-3


def test_the_resolution_curve_leaves_the_layer_alone_and_keeps_to_its_own_grid():
    layer = LiftConv2d(1, 2, "p8", spacing=0.5, padding=1)
    state = layer.weight.clone()
    lab.resolution_curve(layer)
    assert torch.equal(layer.weight, state)
    assert (layer.spacing, layer.padding) == (0.5, 1)


@pytest.mark.parametrize(
    ("module", "element", "message"),
    [
        (LiftConv2d(1, 1, "p8"), 2, "no symmetry of the pixel grid"),
        (LiftConv2d(1, 1, "p8"), 8, "an element of p8"),
        (LiftConv2d(1, 1, "p8", stride=2), 1, "stride 1"),
        (nn.Sequential(LiftConv2d(1, 1, "p8"), nn.MaxPool2d(2)), 1, "got MaxPool2d"),
        (GroupPool2d("p8"), 1, "at least one PDO-eConv"),
        (LiftConv2d(3, 1, "p8", vectors=1), 1, "mixes"),
    ],
)
def test_what_has_no_resolution_curve_is_refused(module, element, message):
    with pytest.raises(ValueError, match=message):
        lab.resolution_curve(module, element)


# operator_symbols


def test_the_symbol_of_central_differences_is_known_in_closed_form():
    symbols = {s.name: s for s in lab.operator_symbols(filter_basis("p8", stencils="central"))}
    x, y = symbols["∂x"].frequencies[None, :], symbols["∂x"].frequencies[:, None]
    np.testing.assert_allclose(symbols["∂x"].stencil, 1j * np.sin(x) + 0 * y, atol=1e-12)
    np.testing.assert_allclose(symbols["∂yy"].stencil, 2 * np.cos(y) - 2 + 0 * x, atol=1e-12)
    np.testing.assert_allclose(symbols["∂xy"].stencil, -np.sin(x) * np.sin(y), atol=1e-12)
    np.testing.assert_allclose(symbols["∂xy"].ideal, -x * y, atol=1e-12)


def test_isotropic_stencils_turn_better_and_smooth_images_see_less():
    def worst(stencils: str, smoothness: float) -> float:
        found = lab.operator_symbols(filter_basis("p8", stencils=stencils), smoothness=smoothness)
        return max(symbol.turning_error for symbol in found)

    assert worst("isotropic", 1.5) < worst("central", 1.5) / 10
    assert worst("central", 3.0) < worst("central", 1.5) / 2


def test_the_grids_own_turns_are_exact_in_the_symbols():
    for symbol in lab.operator_symbols(filter_basis("p4m", stencils="central")):
        assert symbol.turning_error < 1e-12


# error_sources


def smooth_net(**options: object) -> nn.Sequential:
    return nn.Sequential(
        LiftConv2d(1, 4, "p8", **options), nn.Tanh(), GroupConv2d(4, 4, "p8")
    ).double()


def test_a_stride_off_the_centre_is_sampling_and_one_on_it_is_not():
    off = lab.error_sources(smooth_net(stride=2), lab.windowed(smooth_field(64, smoothness=4.0)))
    on = lab.error_sources(smooth_net(stride=2), lab.windowed(smooth_field(65, smoothness=4.0)))
    assert off.sampling > 0.5
    assert off.grid > 0.1
    assert on.sampling < 1e-9
    assert on.grid < 1e-12


def test_the_border_of_a_filled_image_is_padding():
    model = smooth_net()
    filled = lab.error_sources(model, smooth_field(65, smoothness=4.0))
    faded = lab.error_sources(model, lab.windowed(smooth_field(65, smoothness=4.0), start=0.5))
    assert filled.padding > 0.9
    assert faded.padding * faded.error**2 < filled.padding * filled.error**2 / 1000


def test_poor_stencils_are_blamed_and_good_ones_less():
    x = lab.windowed(smooth_field(65, smoothness=1.5), start=0.5)

    def interior(stencils: str) -> lab.ErrorSources:
        return lab.error_sources(
            nn.Sequential(LiftConv2d(1, 4, "p8", stencils=stencils)).double(), x
        )

    central, isotropic = interior("central"), interior("isotropic")
    assert central.stencil > 0.5
    assert isotropic.interior < central.interior / 5


def test_the_shares_are_a_whole_and_belong_to_the_last_map_with_pixels():
    model = nn.Sequential(*smooth_net(), GroupPool2d("p8"), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = lab.error_sources(model, smooth_field(33))
    assert found.layer == "3"
    assert found.sampling + found.padding + found.stencil == pytest.approx(1.0)
    assert found.angle == "45°"
    assert 0 < found.comparison < 1


def test_without_a_symmetry_of_the_grid_sampling_is_not_told_apart():
    found = lab.error_sources(
        nn.Sequential(LiftConv2d(1, 2, "p3", stride=2)).double(), smooth_field(32)
    )
    assert found.grid is None
    assert found.sampling == 0.0


def test_a_model_without_a_known_map_has_no_sources():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3)).double()
    with pytest.raises(ValueError, match=r"at least one map.*0 \(Conv2d\)"):
        lab.error_sources(model, smooth_field(8), 1, "p4")


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_maps_without_signal_have_no_sources(value):
    model = smooth_net()
    with torch.no_grad():
        model[2].weight.fill_(value)
    with pytest.raises(ValueError, match="finite and not zero"):
        lab.error_sources(model, smooth_field(17))


# plain_twin, calibrate, windowed


def test_the_twin_has_the_same_shapes_and_plain_layers():
    model = nn.Sequential(
        LiftConv2d(2, 2, "p4", bias=True),
        GroupInstanceNorm2d(2, "p4", affine=True),
        GroupLayerNorm2d(2, "p4"),
        GroupDropout2d("p4", 0.1),
        GroupConv2d(2, 4, "p4", stride=2, dilation=2, groups=2, padding_mode="circular"),
        GroupBatchNorm2d(4, "p4", eps=1e-3),
        GroupUpsampleConv2d(4, 2, "p4"),
        Restrict2d("p4", "p2"),
        GroupPool2d("p2"),
        VectorConv2d(2, 1, "p2"),
    ).eval()
    twin = lab.plain_twin(model)
    x = torch.randn(1, 2, 16, 16)
    assert twin(x).shape == model(x).shape
    assert not any(hasattr(m, "basis") for m in twin.modules())
    assert not twin[3].training
    conv = twin[4]
    assert (conv.stride, conv.dilation, conv.groups) == ((2, 2), (2, 2), 2)
    assert conv.padding_mode == "circular"
    assert twin[0].bias is not None
    assert twin[5].eps == 1e-3
    assert isinstance(model[0], LiftConv2d)  # the model itself is untouched


def test_the_twin_keeps_the_classifier_and_is_drawn_reproducibly():
    model = nn.Sequential(*network("p4"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    state = torch.get_rng_state()
    one, two, other = lab.plain_twin(model), lab.plain_twin(model), lab.plain_twin(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one[-1].weight, model[-1].weight)
    assert torch.equal(one[0].weight, two[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)


def test_the_twin_of_a_resnet_runs_and_is_not_invariant():
    model = ResNet("p4", depth=8, fields=(1, 2, 2), in_channels=1, pool="max", exact=True)
    model, x = model.double().eval(), smooth_field(20)
    twin = lab.calibrate(lab.plain_twin(model), x)
    assert twin(x).shape == model(x).shape
    assert lab.layer_errors(model, x).output[0].relative < 1e-11
    assert lab.layer_errors(twin, x, "p4").output[0].relative > 1e-3


def test_the_twin_of_a_layer_is_a_layer():
    assert isinstance(lab.plain_twin(LiftConv2d(1, 2, "p8")), nn.Conv2d)


def test_calibrated_norms_have_the_statistics_of_the_images():
    model, x = network(), smooth_field(33, batch=4)
    assert lab.calibrate(model, x) is model
    after = model[:2](x).unflatten(1, (2, 8))
    torch.testing.assert_close(
        after.mean(dim=(0, 2, 3, 4)), torch.zeros(2).double(), atol=1e-9, rtol=0
    )
    assert not model[1].training
    assert model[1].momentum == 0.1


def test_the_window_keeps_the_inside_and_clears_the_corners():
    x = torch.ones(1, 1, 33, 33)
    faded = lab.windowed(x)
    assert float(faded[0, 0, 16, 10]) == 1.0
    assert float(faded[0, 0, 1, 1]) == 0.0
    assert 0 < float(faded[0, 0, 16, 2]) < 1


# load_images


def save_picture(path, pixels):
    from matplotlib.image import imsave

    imsave(path, pixels)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 9), (1, 1, 8, 9)),
        ((3, 8, 9), (1, 3, 8, 9)),
        ((8, 9, 3), (1, 3, 8, 9)),
        ((7, 8, 9), (7, 1, 8, 9)),
        ((5, 2, 8, 9), (5, 2, 8, 9)),
        ((5, 8, 9, 3), (5, 3, 8, 9)),
    ],
)
@pytest.mark.parametrize("made", ["array", "tensor", "file"])
def test_arrays_of_every_layout_are_read(tmp_path, shape, expected, made):
    array = np.random.default_rng(0).normal(size=shape)
    source = {"array": array, "tensor": torch.from_numpy(array), "file": tmp_path / "x.npy"}[made]
    np.save(tmp_path / "x.npy", array)
    found = lab.load_images(source)
    assert tuple(found.shape) == expected
    assert found.sum() == pytest.approx(array.sum())


def test_bytes_become_unit_floats():
    found = lab.load_images(np.array([[0, 255], [51, 102]], dtype=np.uint8))
    torch.testing.assert_close(found[0, 0], torch.tensor([[0.0, 1.0], [0.2, 0.4]]))
    found = lab.load_images(np.array([[0, 65535]], dtype=np.uint16))
    assert found[0, 0].tolist() == [[0.0, 1.0]]


def test_subfolders_of_classes_are_read_in_turn(tmp_path):
    for name, value in (("cat/1", 1), ("cat/2", 2), ("dog/1", 3), ("dog/deep/1", 4), (".x/1", 9)):
        path = tmp_path / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full((4, 4), value, np.float32))
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found = lab.load_images(tmp_path)
    assert found[:, 0, 0, 0].tolist() == [1.0, 3.0, 4.0, 2.0]
    assert len(lab.load_images(tmp_path, limit=2)) == 2


def test_images_of_several_sizes_are_cut_and_resized(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6 * 12, dtype=np.float32).reshape(6, 12))
    np.save(tmp_path / "b.npy", np.zeros((8, 8), np.float32))
    with pytest.raises(ValueError, match=r"one size.*--size"):
        lab.load_images(tmp_path)
    found = lab.load_images(tmp_path, size=6)
    assert found.shape == (2, 1, 6, 6)
    assert found[0, 0, 0, 0] == 3.0  # the square in the middle
    assert lab.load_images(tmp_path, size=4, square=True).shape == (2, 1, 4, 4)


def test_grey_pictures_among_colour_ones_are_read_as_colour(tmp_path):
    image = pytest.importorskip("PIL.Image")
    image.new("L", (8, 8), 128).save(tmp_path / "a.png")
    image.new("RGB", (8, 8), (128, 128, 128)).save(tmp_path / "b.png")
    found = lab.load_images(tmp_path, 3)
    assert torch.equal(found[0], found[1])


def test_pictures_folders_and_archives_are_read(tmp_path):
    pixels = np.zeros((6, 6, 3))
    pixels[0, 0] = (1.0, 0.0, 0.0)
    for name in ("b.png", "a.png"):
        save_picture(tmp_path / name, pixels)
    (tmp_path / "notes.txt").write_text("not a picture")
    found = lab.load_images(tmp_path, 3, square=True)
    assert tuple(found.shape) == (2, 3, 6, 6)
    assert found[0, :, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert len(lab.load_images(tmp_path, limit=1)) == 1
    assert len(lab.load_images([tmp_path / "a.png", tmp_path / "b.png"])) == 2
    np.savez(tmp_path / "c.npz", np.zeros((2, 6, 6)))
    assert tuple(lab.load_images(tmp_path / "c.npz").shape) == (1, 2, 6, 6)


def bad_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "text.npy").write_text("no array")
    np.save(tmp_path / "names.npy", np.array(["a"]))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.zeros((4, 4)), b=np.zeros((4, 4)))
    np.save(tmp_path / "wide.npy", np.zeros((4, 6)))
    np.save(tmp_path / "small.npy", np.zeros((4, 4)))
    np.save(tmp_path / "nan.npy", np.full((4, 4), np.nan))
    return {
        "missing": (tmp_path / "missing.png", {}, "no such file or folder"),
        "empty": (tmp_path / "empty", {}, "no images in the folder"),
        "nothing": ([], {}, "at least one image"),
        "picture": (tmp_path / "text.png", {}, "cannot read .*text.png"),
        "array": (tmp_path / "text.npy", {}, "cannot read .*text.npy"),
        "names": (tmp_path / "names.npy", {}, "array of numbers"),
        "objects": (tmp_path / "objects.npy", {}, "cannot read .*objects.npy"),
        "two": (tmp_path / "two.npz", {}, "expected one array"),
        "sizes": ([tmp_path / "small.npy", tmp_path / "wide.npy"], {}, "images of one size"),
        "channels": (tmp_path / "small.npy", {"channels": 3}, "expected images of 3 channels"),
        "square": (tmp_path / "wide.npy", {"square": True}, "expected square images.*4×6"),
        "nan": (tmp_path / "nan.npy", {}, "NaN"),
        "no pixels": (np.zeros((0, 1, 4, 4)), {}, "at least one image"),
        "dimensions": (np.zeros(5), {}, "2 to 4 dimensions"),
        "complex": (torch.zeros(4, 4, dtype=torch.complex64), {}, "real numbers"),
    }


@pytest.mark.parametrize(
    "case",
    [
        *("missing", "empty", "nothing", "picture", "array", "names", "objects", "two", "sizes"),
        *("channels", "square", "nan", "no pixels", "dimensions", "complex"),
    ],
)
def test_images_that_cannot_be_read_are_named(tmp_path, case):
    source, options, message = bad_sources(tmp_path)[case]
    with pytest.raises(ValueError, match=message):
        lab.load_images(source, **options)


def test_every_record_becomes_json():
    model, x = network(), smooth_field(17)
    records = [
        lab.layer_errors(model, x, elements=[1]),
        lab.angle_curve(model, x, angles=[30]),
        lab.resolution_curve(model[0]),
        lab.operator_symbols(filter_basis("p4"), points=5)[1],
        lab.error_sources(model, x),
    ]
    for record in records:
        text = json.dumps(record.to_dict(), allow_nan=False)
        assert json.loads(text) == record.to_dict()
    assert records[0].to_dict()["group"] == "p8"
    assert records[0].to_dict()["layers"][0]["name"] == "0"


def interrupted(path):
    with atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyError


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("old")
    with pytest.raises(KeyError):
        interrupted(path)
    assert path.read_text() == "old"
    with atomic(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_downsampling_vectors_by_the_mean_is_known_and_by_the_maximum_is_not():
    vectors = nn.Sequential(LiftConv2d(1, 1, "p4"), VectorConv2d(1, 1, "p4")).double()
    table = lab.layer_errors(nn.Sequential(*vectors, Downsample2d()), smooth_field(12))
    assert table.layers[-1].kind == "vector"
    assert table.first_inexact(1e-12) is None
    with pytest.raises(ValueError, match="not known"):
        lab.layer_errors(nn.Sequential(*vectors, Downsample2d("max")), smooth_field(12))


def test_downsampling_hands_on_the_kind():
    model = nn.Sequential(LiftConv2d(1, 1, "p4"), Downsample2d(), nn.Upsample(scale_factor=2))
    kinds = [layer.kind for layer in lab.layer_errors(model.double(), smooth_field(12)).layers]
    assert kinds == ["regular"] * 3


def test_an_output_that_is_not_exact_is_named_where_all_layers_are():
    model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.Flatten(), nn.Linear(8 * 81, 3)).double()
    table = lab.layer_errors(model, smooth_field(9))
    assert max(table.layers[0].errors) < 1e-12
    assert table.output[0].relative > 0.1
    assert table.first_inexact() == "output"


class Swapped(nn.Module):
    output_kind = "regular"
    group = "p8"

    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.arange(x.shape[1]).roll(2)].clone() * torch.arange(1, 1 + x.shape[1])[
            :, None, None
        ].to(x)


@pytest.mark.parametrize(("group", "element"), [("p8", 1), ("p8", 2)])
def test_a_layer_that_is_not_equivariant_is_not_taken_for_sampling(group, element):
    model = nn.Sequential(
        LiftConv2d(1, 2, group), Downsample2d(), Swapped(), GroupConv2d(2, 2, group)
    ).double()
    found = lab.error_sources(model, smooth_field(33), element)
    assert found.broken_layer == "2 (Swapped)"
    assert found.sampling == 0.0
    assert found.broken > 0.5
    whole = found.broken + found.padding + found.stencil
    assert whole == pytest.approx(1.0)


def test_a_plain_convolution_in_the_middle_is_not_taken_for_sampling():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p4"), nn.Conv2d(8, 8, 3, padding=1), GroupConv2d(2, 2, "p4")
    ).double()
    found = lab.error_sources(model, smooth_field(17))
    assert (found.broken_layer, found.sampling) == ("1 (Conv2d)", 0.0)
    assert found.broken == pytest.approx(1.0)  # at a quarter turn nothing else can be wrong


@pytest.mark.parametrize(
    ("model", "blamed", "strided"),
    [
        # A stride behind what is broken is not to blame.
        (
            [LiftConv2d(1, 2, "p4"), nn.Conv2d(8, 8, 1), GroupConv2d(2, 2, "p4", stride=2)],
            "1 (Conv2d)",
            False,
        ),
        ([LiftConv2d(1, 2, "p4"), nn.ReLU(), nn.BatchNorm2d(8)], "2 (BatchNorm2d)", False),
        ([LiftConv2d(1, 2, "p4"), GroupConv2d(2, 2, "p4", stride=2)], "1 (GroupConv2d)", True),
        (
            [
                LiftConv2d(1, 2, "p4"),
                nn.Conv2d(8, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                GroupPool2d("p4"),
            ],
            "1 (Conv2d) or 2 (BatchNorm2d) or 3 (ReLU)",
            False,
        ),
        (
            [LiftConv2d(1, 2, "p4"), nn.Flatten(), nn.Linear(8 * 64, 2)],
            "1 (Flatten) or 2 (Linear)",
            False,
        ),
    ],
    ids=["before a stride", "itself", "a stride", "one of several", "the output"],
)
def test_what_is_to_blame_is_named(model, blamed, strided):
    network = nn.Sequential(*model).double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
    table = lab.layer_errors(network.eval(), smooth_field(8))
    assert (str(table.blame), table.blame.strided) == (blamed, strided)
    assert ("stride" in lab.verdict(table.blame)) == strided


def test_functions_between_layers_are_blamed_as_such():
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.conv = LiftConv2d(1, 2, "p4"), GroupConv2d(2, 2, "p4")

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.lift(x).roll(1, 1))

    table = lab.layer_errors(Rolled().double(), smooth_field(9))
    assert str(table.blame) == "what lies between lift and conv"
    assert table.blame.names == ()
    assert lab.layer_errors(network().eval(), smooth_field(9)).blame is None


def test_maps_of_too_few_pixels_for_an_angle_are_not_compared():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8"),
        nn.AvgPool2d(8),
        GroupConv2d(2, 2, "p8", size=1, operators="order<=0"),
    ).double()
    table = lab.layer_errors(model, smooth_field(16))
    names = dict(zip(table.names, table.layers[1].errors, strict=True))
    assert names["45°"] is None
    assert names["90°"] < 1e-12
    assert table.layers[0].errors[0] > 0
    assert table.output[0].relative is None
    assert table.first_inexact() is None
    assert "null" in json.dumps(table.to_dict())
    assert lab.error_sources(model, smooth_field(16)).layer == "0"
    assert None in lab.angle_curve(model, smooth_field(16)).errors
    three = lab.layer_errors(model, smooth_field(24))
    assert all(error is not None for layer in three.layers for error in layer.errors)


def test_a_map_without_signal_is_not_compared_at_other_angles():
    class Dark(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.relu = LiftConv2d(1, 1, "p8"), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.lift(x) - 1e3)

    (_, dark) = lab.layer_errors(Dark().double(), smooth_field(17)).layers
    assert dark.errors[:2] == (None, 0.0)


def test_a_stride_of_a_function_is_sampling():
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.conv = LiftConv2d(1, 2, "p8"), GroupConv2d(2, 2, "p8")

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(functional.max_pool2d(self.lift(x), 2))

    found = lab.error_sources(Strided().double(), smooth_field(33))
    assert found.broken_layer is None
    assert found.sampling > 0.1


def test_rounding_is_not_shared_out():
    model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.ReLU(), GroupConv2d(2, 2, "p4"))
    found = lab.error_sources(model, smooth_field(17, dtype=torch.float32))
    assert 0 < found.error < 1e-5
    assert found.exact
    assert (found.sampling, found.padding, found.stencil, found.broken) == (0, 0, 0, 0)
    assert not lab.error_sources(smooth_net(), smooth_field(17)).exact


@pytest.mark.parametrize(
    ("stencils", "element", "share"), [("central", 1, 0.44), ("isotropic", 3, 0.98)]
)
def test_the_estimate_of_sampling_is_near_what_centring_the_samples_saves(stencils, element, share):
    model = nn.Sequential(
        LiftConv2d(1, 4, "p8", stencils=stencils),
        nn.MaxPool2d(2),
        GroupConv2d(4, 4, "p8", stencils=stencils),
    ).double()
    centred, off = (
        lab.error_sources(model, lab.windowed(smooth_field(size, smoothness=2.0, batch=4)), element)
        for size in (64, 65)
    )
    assert centred.sampling < 1e-9
    truth = 1 - (centred.interior / off.interior) ** 2
    assert truth == pytest.approx(share, abs=0.01)
    assert off.sampling == pytest.approx(truth, abs=0.1)


@pytest.mark.parametrize("reduce", ["amax", "mean"])
@pytest.mark.parametrize(("dim", "known"), [(2, True), (1, False)])
def test_pooling_over_unflattened_orientations_is_known(reduce, dim, known):
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.relu = LiftConv2d(1, 4, "p4"), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(getattr(self.lift(x).unflatten(1, (4, 4)), reduce)(dim))

    model = nn.Sequential(Pooled(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    table = lab.layer_errors(model, smooth_field(9))
    assert ("0.relu" in [layer.name for layer in table.layers]) == known
    if known:
        assert table.layers[1].kind == "scalar"
        assert table.first_inexact(1e-12) is None
        assert not table.unknown


def test_unflattened_orientations_are_no_map():
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.relu = LiftConv2d(1, 4, "p4"), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.lift(x).unflatten(1, (4, 4)))

    with pytest.raises(ValueError, match="no equivariant map"):
        lab.layer_errors(Apart().double(), smooth_field(9))


def test_one_failure_among_exact_angles_makes_a_layer_inexact():
    model = nn.Sequential(LiftConv2d(1, 1, "p4"), nn.ReLU(), GroupPool2d("p4")).double()
    table = lab.layer_errors(model, smooth_field(16))
    assert table.first_inexact() is None
    errors = list(table.layers[1].errors)
    errors[-1] = 0.5
    worse = dataclasses.replace(table.layers[1], errors=tuple(errors))
    layers = (table.layers[0], worse, table.layers[2])
    assert dataclasses.replace(table, layers=layers).first_inexact() == "1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.layers = ()


def test_the_error_of_a_symbol_is_relative_and_weighs_smooth_waves():
    """Of ∂x by central differences, sin κ in place of κ, by its definition."""
    symbols = lab.operator_symbols(filter_basis("p4", stencils="central"), points=33)
    found = symbols[1]
    for symbol in symbols:
        assert 0 <= symbol.error < 2
    line = found.frequencies
    kx, ky = np.meshgrid(line, line)
    weight = np.exp(-(1.5**2) * (kx**2 + ky**2)) * (kx**2 + ky**2 <= np.pi**2)
    for smooth in (1.0, 1.5, 2.0):
        weight = np.exp(-(smooth**2) * (kx**2 + ky**2)) * (kx**2 + ky**2 <= np.pi**2)
        wanted = np.sqrt((weight * (np.sin(kx) - kx) ** 2).sum() / (weight * kx**2).sum())
        basis = filter_basis("p4", stencils="central")
        again = lab.operator_symbols(basis, points=33, smoothness=smooth)[1]
        assert again.error == pytest.approx(wanted, rel=0.02)
