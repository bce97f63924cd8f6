"""Networks of volumes, converted to groups of space."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import econv
from econv import ConversionError
from econv.conversion.cubes import with_cubes
from econv.lab import calibrate
from econv.layers import CentredMaxPool3d, GroupUpsampleConv3d, GroupWindowConv3d
from econv.testing import equivariance_error


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def convert(source, group, match=None, **options):
    """By the dense engine: nothing is compiled or timed here."""
    return econv.convert(source, group, match, options={"engine": "dense"}, **options)


def volume(size=9, channels=1, batch=2):
    return torch.randn(batch, channels, size, size, size, dtype=torch.float64)


def classifier(width=12):
    return nn.Sequential(
        *(nn.Conv3d(1, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(width, width, 3, stride=2, padding=1), nn.BatchNorm3d(width), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, 4)),
    ).double()


class Segmenter(nn.Module):
    """A U-Net as people write it: sizes are compared, one level is transposed, one enlarged."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 12, 3, padding=1), nn.GroupNorm(1, 12), nn.PReLU())
        self.down = nn.Conv3d(12, 24, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(24, 12, 2, stride=2)
        self.last = nn.Sequential(
            *(nn.Conv3d(24, 12, 3, padding=1), nn.InstanceNorm3d(12), nn.ReLU()),
            nn.Dropout3d(0.1),
        )
        self.head = nn.Conv3d(12, 3, 1)

    def forward(self, x):
        skip = self.first(x)
        coarse = torch.relu(self.down(functional.avg_pool3d(skip, 2)))
        x = self.up(functional.interpolate(coarse, scale_factor=2, mode="trilinear"))
        if x.shape[2:] != skip.shape[2:]:
            sides = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)][::-1]
            pads = [n for side in sides for n in (side // 2, side - side // 2)]
            x = functional.pad(x, pads)
        return self.head(self.last(torch.cat([x, skip], 1)))


def worst(network, x, elements=None):
    group = network.group
    chosen = group.grid_symmetries if elements is None else elements
    return max(equivariance_error(network, x, element) for element in chosen)


@pytest.mark.parametrize("size", [8, 9])
def test_a_classifier_is_exact_under_the_rotations_of_the_cube(size):
    source, x = classifier(), volume(size)
    network = convert(source, "O", "width", example_input=x).eval()
    assert network(x).shape == source(x).shape
    calibrate(network, x)
    assert worst(network, x) < 1e-12
    assert worst(network, volume(size + 1), [12, 4]) < 1e-12
    assert source.eval()(x).sub(source(x.rot90(1, (2, 3)))).abs().max() > 1e-6


@pytest.mark.parametrize("size", [8, pytest.param(9, marks=pytest.mark.slow)])
def test_a_u_net_is_exact_and_keeps_its_shape(size):
    source, x = Segmenter().double(), volume(size)
    network = convert(source, "T", "width", example_input=x, measure=False).eval()
    assert isinstance(network.up, GroupUpsampleConv3d)
    for other in (x, volume(size + 1, batch=1)):
        assert network(other).shape == source(other).shape
    assert worst(network, x, [1, 4, 11]) < 1e-12


def test_the_report_turns_as_far_as_generates_the_group():
    network = convert(classifier(), "O", "width", example_input=volume(8))
    assert network.report.turn == "90° about z and 90° about −y"
    assert network.report.error < 1e-12 < 1e-3 < network.report.source_error
    assert {cost.match for cost in network.report.costs} >= {"width", "params"}
    assert "CentredMaxPool3d" in str(network.report)


@pytest.mark.parametrize(
    ("group", "elements"),
    [
        ("C4v", None),
        pytest.param("Oh", (5, 24, 40), marks=pytest.mark.slow),
        pytest.param("I", None, marks=pytest.mark.slow),
    ],
)
def test_other_groups_of_space(group, elements):
    source = nn.Sequential(nn.Conv3d(2, 60, 3), nn.SiLU(), nn.Conv3d(60, 2, 1)).double()
    x = volume(5, 2, 1)
    network = convert(source, group, "width", example_input=x, measure=False).eval()
    assert worst(network, x, elements) < 1e-12


@pytest.mark.parametrize("match", ["params", "flops", "width"])
def test_every_match_keeps_what_it_says(match):
    x = volume(6)
    source = nn.Sequential(
        nn.Conv3d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv3d(48, 96, 3, padding=1), nn.ReLU(),
        nn.Conv3d(96, 2, 1),
    ).double()  # fmt: skip
    report = convert(source, "T", match, example_input=x, measure=False).report
    ratio = {
        "params": report.parameters / report.source_parameters,
        "flops": report.multiply_adds / report.source_multiply_adds,
        "width": report.scale * 12,
    }[match]
    assert ratio == pytest.approx(1, rel=0.25)


def test_a_flattened_map_becomes_one_window():
    x = volume(4)
    source = nn.Sequential(
        nn.Conv3d(1, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 64, 12), nn.ReLU(),
        nn.Linear(12, 3),
    ).double()  # fmt: skip
    network = convert(source, "T", "width", example_input=x).eval()
    assert isinstance(network[3], GroupWindowConv3d)
    assert worst(network, x) < 1e-12
    wanted = "expected volumes of the example's size: 3 reads a map of 4×4×4 voxels"
    with pytest.raises(ValueError, match=wanted):
        network(volume(5))


def test_smooth_takes_the_layers_of_volumes():
    x = volume(9)
    network = convert(classifier(), "T", "width", example_input=x, smooth=True, pool="mean")
    kinds = {type(module).__name__ for module in network.modules()}
    assert {"GroupActivation3d"} <= kinds
    assert worst(network.eval(), x, [4]) < 1e-12


def test_weights_of_the_source_are_taken_over():
    """With a field for every channel and no turn, the network is the source."""
    source = nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 2, 1)
    ).double()
    x = volume(6)
    calibrate(source, x)
    trivial = convert(source, "C1", pretrained=True, example_input=x, measure=False).eval()
    torch.testing.assert_close(trivial(x), source(x), rtol=0, atol=1e-12)
    turning = convert(source, "C4", pretrained=True, example_input=x)
    fits = [line.fit for line in turning.report.lines if line.name == "0"]
    assert fits[0] < 1e-6  # products of derivatives span all filters of 3×3×3
    assert worst(turning.eval(), x) < 1e-12


def test_a_converted_network_is_exported_and_made_again(tmp_path):
    x = volume(6).float()
    source = classifier().float().eval()
    network = convert(source, "T", "width", example_input=x, measure=False).eval()
    plain = econv.export(network, x)
    assert not [m for m in plain.modules() if type(m).__module__.startswith("econv")]
    torch.testing.assert_close(plain(x), network(x), rtol=1e-4, atol=1e-5)
    again = econv.conversion.rebuild(source, network.recipe)
    again.load_state_dict(network.state_dict())
    torch.testing.assert_close(again.eval()(x), network(x))


class Gated(nn.Module):
    """Squeeze and excitation, as it is written for any number of dimensions."""

    def __init__(self):
        super().__init__()
        self.conv, self.end = nn.Conv3d(1, 24, 3, stride=2, padding=1), nn.Linear(24, 2)
        self.gate = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.Sigmoid())

    def forward(self, x):
        x = torch.relu(self.conv(x))
        gate = self.gate(x.mean((2, 3, 4))).view(*x.shape[:2], *[1] * (x.ndim - 2))
        return self.end(functional.adaptive_avg_pool3d(x * gate, 1).flatten(1))


@pytest.mark.parametrize("size", [2, 5])
def test_gates_of_channels_follow_fields_also_on_one_voxel(size):
    source, x = Gated().double(), volume(size)
    network = convert(source, "T", "width", example_input=x, measure=False).eval()
    assert type(network.gate[0]).__name__ == "GroupLinear"
    assert worst(network, volume(5), [1, 4]) < 1e-12


# What is refused


@pytest.mark.parametrize(
    ("source", "group", "x", "wanted"),
    [
        (nn.Conv3d(1, 4, 3), "p4", (1, 1, 8, 8, 8), "of space, such as 'O', .* got 'p4'"),
        (nn.Conv2d(1, 4, 3), "O", (1, 1, 8, 8), "of the plane, such as 'p4', .* got 'O'"),
        (nn.Conv3d(1, 4, 3), "O", (1, 8, 8, 8), r"\[batch, channels, depth, height, width\]"),
        (nn.Conv2d(1, 4, 3), "p4", (1, 8, 8), r"\[batch, channels, height, width\]"),
    ],
)
def test_groups_and_inputs_of_another_dimension_are_refused(source, group, x, wanted):
    source = nn.Sequential(source, nn.ReLU())
    with pytest.raises(ValueError, match=wanted):
        convert(source, group, example_input=torch.randn(*x))


def test_images_to_fit_to_are_for_the_plane():
    with pytest.raises(ValueError, match="expected no images for O"):
        convert(classifier(), "O", example_input=volume(8), pretrained=True, images=volume(8))


def test_what_takes_axes_apart_is_named():
    def refused(*layers, size=8):
        source = nn.Sequential(nn.Conv3d(1, 24, 3, padding=1), *layers).double()
        with pytest.raises(ConversionError) as raised:
            convert(source, "O", "width", example_input=volume(size))
        return str(raised.value)

    assert "its output sizes are unequal" in refused(nn.AdaptiveAvgPool3d((1, 2, 2)))
    assert "it pads the sides" in refused(nn.ConstantPad3d((1, 1, 1, 1, 0, 0), 0.0))
    assert "it normalises" in refused(nn.LayerNorm(8)) or "every pixel" in refused(nn.LayerNorm(8))


# Sides that differ


def test_sides_that_differ_become_cubes():
    source = nn.Sequential(
        nn.Conv3d(1, 24, (3, 7, 7), (1, 2, 2), (1, 3, 3)), nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)), nn.Conv3d(24, 24, (1, 3, 3), padding=(0, 1, 1)), nn.ReLU(),
        nn.ConvTranspose3d(24, 24, (1, 2, 2), stride=(1, 2, 2)), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(24, 3),
    ).double()  # fmt: skip
    x = volume(16)
    network = convert(source, "O", "width", example_input=x).eval()
    assert network(x).shape == (2, 3)
    assert worst(network, x, [4, 12]) < 1e-12
    (note,) = [note for note in network.report.notes if "cubes" in note]
    assert "0: 3×7×7, stride 1×2×2 → 5×5×5, stride 2" in note
    assert "2: 1×2×2, stride 1×2×2 → 2×2×2, stride 2" in note
    assert isinstance(network[2], CentredMaxPool3d)
    positions = {0: 16 * 64, 3: 16 * 16, 5: 16 * 16, 9: 1}
    work = sum(source[place].weight.numel() * n for place, n in positions.items())
    assert network.report.source_multiply_adds == work
    assert source[0].kernel_size == (3, 7, 7)  # the source stays as it is


@pytest.mark.parametrize(
    ("kernel", "padding", "wanted"),
    [((1, 3, 3), (0, 1, 1), (3, 1)), ((3, 1, 1), (1, 0, 0), (1, 0)), ((3, 7, 7), 0, (5, 0))],
)
def test_a_cube_has_about_as_many_voxels(kernel, padding, wanted):
    source = nn.Sequential(nn.Conv3d(2, 4, kernel, padding=padding))
    (made,) = with_cubes(source)[0]
    assert (made.kernel_size, made.padding) == ((wanted[0],) * 3, (wanted[1],) * 3)
    ratio = wanted[0] ** 3 / math.prod(kernel)
    assert 1 / 3 <= ratio <= 3


def test_a_cube_that_would_change_the_output_is_refused():
    """Without a pooling at its end the network would return a map of another size."""
    source = nn.Sequential(nn.Conv3d(1, 24, 3, (1, 2, 2), 1), nn.ReLU()).double()
    with pytest.raises(ConversionError, match=r"it would return .* the source returns"):
        convert(source, "O", "width", example_input=volume(8))


def test_paddings_that_no_cube_has_are_refused():
    source = nn.Sequential(nn.Conv3d(1, 24, (3, 5, 5), padding=(0, 2, 1)), nn.ReLU()).double()
    with pytest.raises(ConversionError, match="not a cube: a quarter turn would exchange"):
        convert(source, "O", "width", example_input=volume(8))
