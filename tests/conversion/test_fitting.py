"""Conversions that keep what the source has learned: fitted to images, without training."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from econv import convert
from econv.conversion.fitting import _find_upright, _regression, _Ridge
from econv.data.digits import embedded
from econv.layers import GroupAttentionPool2d
from plain_networks import conv_norm

DOUBLE = {"dtype": torch.float64}


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = conv_norm(before, after, 3, stride)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.norm(self.conv2(self.conv1(x))) + self.shortcut(x))


def residual(width=8):
    """A stem as torchvision's, and maps that end at 2×2 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.MaxPool2d(3, 2, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )


@functools.cache
def trained():
    """A small network that knows upright digits, and images to fit and to test with."""
    x, y = (torch.from_numpy(values) for values in embedded(None))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float() / 255, y[order]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        source = residual()
        optimiser = torch.optim.AdamW(source.parameters(), 5e-3)
        for epoch in range(3):
            for batch in torch.randperm(4000).split(50):
                optimiser.param_groups[0]["lr"] = 5e-3 / 4**epoch
                optimiser.zero_grad()
                functional.cross_entropy(source(x[batch]), y[batch]).backward()
                optimiser.step()
    return source.eval(), (x[:400], y[:400]), (x[4000:], y[4000:])


@torch.no_grad()
def accuracy(network, images, labels, quarters=0):
    answers = network.eval()(torch.rot90(images, quarters, (2, 3))).argmax(1)
    return float((answers == labels).float().mean())


@functools.cache
def fitted(group):
    source, (images, _), _ = trained()
    return convert(
        source, group, example_input=images[:2], pretrained=True, images=images, measure=False
    )


def test_where_nothing_has_to_turn_the_source_s_accuracy_stays():
    source, _, test = trained()
    before = accuracy(source, *test)
    assert before > 0.9
    assert accuracy(fitted("p1"), *test) >= before - 0.01


def test_quarter_turns_read_as_upright_images_which_fitting_keeps():
    source, (images, _), test = trained()
    by_filters = convert(source, "p4", example_input=images[:2], pretrained=True, measure=False)
    alone, found = accuracy(by_filters, *test), accuracy(fitted("p4"), *test)
    assert found > accuracy(source, *test) - 0.15
    assert found > alone + 0.2
    for quarters in (1, 2, 3):
        assert accuracy(source, *test, quarters) < 0.5
        assert accuracy(fitted("p4"), *test, quarters) == pytest.approx(found, abs=0.002)


def test_the_scores_of_the_source_are_found_again():
    source, _, (images, _) = trained()
    with torch.no_grad():
        wanted, found = source(images), fitted("p1").eval()(images)
    assert float((found - wanted).norm() / (wanted - wanted.mean(0)).norm()) < 0.1


def test_norms_have_the_same_statistics_in_training():
    _, (images, _), _ = trained()
    network = fitted("p4")
    norm = network.get_submodule("1")
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    read = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        network.eval()(images)
    handle.remove()
    by_field = read[0].unflatten(1, (norm.fields, -1)).transpose(0, 1).flatten(1)
    assert torch.allclose(mean, by_field.mean(1), atol=1e-5)
    assert torch.allclose(variance, by_field.var(1), rtol=1e-3)


def test_the_report_has_the_accuracies_of_labelled_images():
    source, (images, labels), _ = trained()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 100)
    options = {"example_input": images[:2], "pretrained": True, "measure": False}
    from_loader = convert(source, "p2", images=loader, **options).report
    network = convert(source, "p2", images=images, labels=labels, **options)
    assert network.report.accuracy == from_loader.accuracy
    assert [found.turn for found in network.report.accuracy] == ["0°", "180°"]
    for quarters, found in zip((0, 2), network.report.accuracy, strict=True):
        assert found.source == pytest.approx(accuracy(source, images, labels, quarters))
        assert found.converted == pytest.approx(accuracy(network, images, labels, quarters))
    assert any(f"{found.converted:.1%}" in line for line in network.report.summary())


def test_every_fitted_layer_has_its_misfit():
    fits = {line.name: line.fit for line in fitted("p4").report.lines}
    assert all(0 <= fits[name] < 0.6 for name in ("0", "4.conv2", "5.conv2", "8"))
    assert not fitted("p1").report.notes


def test_what_the_operators_cannot_reach_is_warned_of():
    source = nn.Sequential(nn.Conv2d(1, 4, 9, padding=4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    noise = torch.randn(50, 1, 16, 16)
    with pytest.warns(UserWarning, match=r"give less than the source's on these images.*is left"):
        network = convert(
            source, "p8", example_input=noise[:2], pretrained=True, images=noise, measure=False
        )
    assert any("of the deviation is left" in note for note in network.report.notes)


def test_pixels_of_a_small_map_stay_apart_for_larger_stencils():
    torch.manual_seed(0)
    source = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(8), nn.Conv2d(4, 4, 3, padding=1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).double()
    x = torch.randn(4, 1, 16, 16, **DOUBLE)
    network = convert(source, "p1", example_input=x, pretrained=True, measure=False)
    assert torch.allclose(network(x), source(x), atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("side", [32, 33])
def test_strides_and_windows_stay_where_nothing_turns(kernel, side):
    torch.manual_seed(0)
    source = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, 2, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, kernel, 2, kernel // 2)),
        nn.Conv2d(4, 2, 1),
    ).double()
    x = torch.randn(2, 1, side, side, **DOUBLE)
    network = convert(source, "p1", example_input=x, pretrained=True, measure=False)
    assert torch.allclose(network(x), source(x), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": torch.zeros(4, 1, 16, 16), "pretrained": False}, "expected pretrained=True"),
        ({"labels": torch.zeros(4)}, "expected images beside labels"),
        ({"images": torch.zeros(1, 1, 16, 16)}, "expected at least two images"),
        ({"images": torch.zeros(4, 16, 16)}, "expected at least two images"),
        ({"images": []}, "got no batch"),
        ({"images": ["a path"]}, "got str"),
        ({"images": 0}, "got int"),
        ({"images": torch.zeros(4, 1, 16, 16), "labels": 3}, "labels as a tensor; got int"),
        (
            {"images": torch.zeros(4, 1, 16, 16), "labels": torch.zeros(3).long()},
            r"expected labels as 4 whole numbers; got \(3,\)",
        ),
        (
            {"images": torch.zeros(4, 1, 16, 16), "labels": torch.zeros(4)},
            "got .*torch.float32",
        ),
    ],
)
def test_images_that_cannot_be_fitted_to_are_refused(options, message):
    source = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    options = {"pretrained": True, **options}
    with pytest.raises(ValueError, match=message):
        convert(source, "p4", example_input=torch.zeros(1, 1, 16, 16), **options)


# The algebra


@pytest.mark.parametrize("pieces", [1, 7])
def test_without_a_ridge_it_is_least_squares(pieces):
    features, outputs = torch.randn(2, 70, 5, **DOUBLE), torch.randn(2, 70, 3, **DOUBLE)
    problem = _Ridge(torch.randn(2, 3, 5, **DOUBLE))
    for part, wanted in zip(features.chunk(pieces, 1), outputs.chunk(pieces, 1), strict=True):
        problem.add(part, wanted)
    weight, bias, misfit = problem.solve(0.0)
    ones = torch.ones(2, 70, 1, **DOUBLE)
    solution = torch.linalg.lstsq(torch.cat([features, ones], 2), outputs).solution
    assert torch.allclose(weight, solution[:, :-1].transpose(1, 2), atol=1e-9)
    assert torch.allclose(bias, solution[:, -1], atol=1e-9)
    left = outputs - features @ weight.transpose(1, 2) - bias[:, None]
    spread = outputs - outputs.mean(1, keepdim=True)
    assert misfit == pytest.approx(float(left.norm() / spread.norm()))


def test_what_the_images_do_not_show_stays_as_it_was():
    start = torch.randn(1, 3, 5, **DOUBLE)
    problem = _Ridge(start)
    features = torch.randn(1, 40, 5, **DOUBLE)
    features[:, :, 4] = 0
    problem.add(features, torch.randn(1, 40, 3, **DOUBLE))
    weight = problem.solve(1e-3)[0]
    assert torch.allclose(weight[..., 4], start[..., 4])
    assert not torch.allclose(weight[..., 0], start[..., 0], atol=1e-3)


def test_noise_does_not_move_a_good_first_guess():
    torch.manual_seed(0)
    features, truth = torch.randn(60, 40, **DOUBLE), torch.randn(2, 40, **DOUBLE)
    noisy = features @ truth.T + 5 * torch.randn(60, 2, **DOUBLE)
    kept, _ = _regression(features, noisy, truth)
    plain = torch.linalg.lstsq(features, noisy).solution.T
    assert (kept - truth).norm() < 0.5 * (plain - truth).norm()
    found, _ = _regression(features, features @ truth.T, torch.zeros(2, 40, **DOUBLE))
    assert torch.allclose(found, truth, atol=1e-2)


def test_the_frame_of_the_images_is_found():
    torch.manual_seed(0)
    pool = GroupAttentionPool2d(6, "p4", **DOUBLE)
    x = torch.randn(300, 6, 4, **DOUBLE)
    x[:, 0, 0] += 4  # one field is large where the image is upright
    seen, unseen = x[:200].flatten(1), x[200:].flatten(1)
    with torch.no_grad():
        _find_upright(pool, seen)
        left = (pool(unseen) - x[200:, :, 0]).norm() / x[200:, :, 0].norm()
        mean = (x[200:].mean(2) - x[200:, :, 0]).norm() / x[200:, :, 0].norm()
    assert float(left) < 0.5 * float(mean)
