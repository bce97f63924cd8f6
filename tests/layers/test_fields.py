"""Kinds of fields: scalars, pseudoscalars and vectors, in and out; flows without divergence."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import econv
from econv import Curl2d, FieldConv2d, Group, GroupConv2d, LiftConv2d, VectorConv2d
from econv.lab import layer_errors
from econv.testing import assert_equivariant, convergence_order, equivariance_error, transform

DOUBLE = {"dtype": torch.float64}
STATE = [("scalar", 1), ("pseudoscalar", 1), ("vector", 1)]


class Step(nn.Module):
    """A pressure, a vorticity and a velocity, and what becomes of them."""

    def __init__(self, group, **options):
        super().__init__()
        options = {**DOUBLE, **options}
        self.group = Group(group)
        self.lift = LiftConv2d(4, 2, group, pseudoscalars=1, vectors=1, bias=True, **options)
        self.body = GroupConv2d(2, 3, group, bias=True, **options)
        kinds = {"scalars": 1, "pseudoscalars": 1, "vectors": 1}
        self.head = FieldConv2d(3, group, **kinds, bias=True, **options)
        nn.init.normal_(self.head.scalars.bias)

    def forward(self, x):
        return x + self.head(torch.relu(self.body(torch.relu(self.lift(x)))))


@pytest.mark.parametrize("engine", ["dense", "spectral"])
@pytest.mark.parametrize("name", ["p1m", "p2m", "p4", "p4m", "p6m", "p8m"])
def test_all_kinds_together_turn_as_they_should(name, engine):
    step, group = Step(name, engine=engine), Group(name)
    x = torch.randn(2, 4, 10, 10, **DOUBLE)
    assert_equivariant(step, x, input_kind=STATE, output_kind=STATE)
    if name.endswith("m"):  # a vorticity that kept its sign would be seen
        wrong = [("scalar", 2), ("vector", 1)]
        flips = [e for e in group.grid_symmetries if e >= group.rotations]
        for kinds in ((wrong, STATE), (STATE, wrong), (wrong, wrong)):
            ends = dict(zip(("input_kind", "output_kind"), kinds, strict=True))
            assert equivariance_error(step, x, flips[0], **ends) > 1e-2


def test_layers_say_their_kinds_and_checkers_read_them():
    x = torch.randn(2, 4, 9, 9, **DOUBLE)
    lift = LiftConv2d(4, 2, "p4m", pseudoscalars=1, vectors=1, **DOUBLE)
    assert (lift.input_kind, lift.input_parts) == ("mixed", tuple(STATE))
    assert_equivariant(lift, x)
    head = FieldConv2d(2, "p4m", vectors=1, scalars=1, pseudoscalars=1, **DOUBLE)
    assert (head.output_kind, head.output_parts) == ("mixed", tuple(STATE))
    assert_equivariant(head, torch.randn(2, 16, 9, 9, **DOUBLE))
    for kind, parts in (("scalar", 2), ("pseudoscalar", 3), ("vector", 1)):
        one = FieldConv2d(2, "p4m", **{f"{kind}s": parts}, **DOUBLE)
        assert (one.output_kind, one.output_parts) == (kind, ((kind, parts),))
        assert_equivariant(one, torch.randn(2, 16, 9, 9, **DOUBLE))
    assert LiftConv2d(2, 1, "p4", pseudoscalars=2).input_kind == "pseudoscalar"
    assert LiftConv2d(2, 1, "p4", vectors=1).input_kind == "vector"
    assert LiftConv2d(2, 1, "p4").input_kind == "scalar"
    assert "pseudoscalars=1, vectors=1" in repr(lift)
    assert "output_kind='pseudoscalar'" in repr(head)


def test_the_vectors_are_those_of_a_vector_layer():
    head = FieldConv2d(3, "p8", scalars=1, vectors=2, **DOUBLE)
    alone = VectorConv2d(3, 2, "p8", **DOUBLE)
    alone.load_state_dict(head.vectors.state_dict())
    x = torch.randn(2, 24, 9, 9, **DOUBLE)
    assert torch.equal(head(x)[:, 1:], alone(x))


def test_scalars_are_sums_over_orientations():
    head = FieldConv2d(3, "p4m", scalars=2, pseudoscalars=2, bias=True, **DOUBLE)
    nn.init.normal_(head.scalars.bias)
    features = GroupConv2d(3, 2, "p4m", **DOUBLE)
    x = torch.randn(2, 24, 9, 9, **DOUBLE)
    for kind, signs in ((head.scalars, [1.0] * 8), (head.pseudoscalars, [1.0] * 4 + [-1.0] * 4)):
        features.weight.data.copy_(kind.weight)
        signs = torch.tensor(signs, **DOUBLE)[:, None, None]
        wanted = (features(x).unflatten(1, (2, 8)) * signs).sum(2)
        if kind.bias is not None:
            wanted = wanted + kind.bias[:, None, None]
        torch.testing.assert_close(kind(x), wanted, rtol=0, atol=1e-12)
    assert head.pseudoscalars.bias is None


def test_every_kind_is_drawn_for_the_orientations_that_it_adds():
    x = torch.randn(8, 16 * 16, 24, 24)
    head = FieldConv2d(16, "p8m", scalars=16, pseudoscalars=16, vectors=8, padding_mode="circular")
    with torch.no_grad():
        moments = [float(part(x).square().mean()) for part in head.heads]
    wanted = head.scalars.gains().noise
    assert moments == pytest.approx([wanted] * 3, rel=0.25)


def test_state_copies_and_old_layers():
    head = FieldConv2d(2, "p4m", scalars=1, pseudoscalars=1, vectors=1, bias=True)
    x = torch.randn(1, 16, 8, 8)
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(twin(x), head(x))
        assert twin.output_parts == head.output_parts
    names = [*head.state_dict()]
    weights = ["scalars.weight", "scalars.bias", "pseudoscalars.weight", "vectors.weight"]
    assert [name for name in names if not name.endswith("coordinates")] == weights
    old = LiftConv2d(3, 1, "p4", vectors=1)
    state = old.__getstate__()
    del state["pseudoscalars"]  # there were none when it was pickled
    new = LiftConv2d.__new__(LiftConv2d)
    new.__setstate__(state)
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(new(x), old(x))


def test_an_exported_head_is_one_convolution():
    options = {"bias": True, "padding_mode": "circular", "stride": 2}
    head = FieldConv2d(2, "p4m", scalars=2, pseudoscalars=1, vectors=2, **options)
    nn.init.normal_(head.scalars.bias)
    x = torch.randn(2, 16, 9, 9)
    plain = econv.export(head, x)
    assert type(plain) is nn.Conv2d
    assert plain.out_channels == 7
    network = nn.Sequential(GroupConv2d(2, 2, "p4m"), nn.ReLU(), head, nn.Tanh())
    assert [type(m) for m in econv.export(network, x).children()].count(nn.Conv2d) == 2


def test_layers_of_kinds_are_checked_one_by_one():
    step = Step("p4m")
    table = layer_errors(step.head.pseudoscalars, torch.randn(1, 24, 9, 9, **DOUBLE))
    assert table.output_kind == "pseudoscalar"
    assert max(table.layers[0].errors) < 1e-12


def test_checked_follows_pseudoscalars():
    state = torch.randn(1, 4, 9, 9, **DOUBLE)
    with econv.checked():
        Step("p4m")(state)  # parts that were split and joined are let through
    spin = FieldConv2d(2, "p1m", pseudoscalars=2)
    with econv.checked(), pytest.raises(ValueError, match="of p1m; got pseudoscalars"):
        GroupConv2d(1, 1, "p1m")(spin(torch.randn(1, 4, 9, 9)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "at least one of them above 0"),
        ({"scalars": -1, "vectors": 1}, "whole numbers"),
        ({"scalars": True}, "whole numbers"),
        ({"vectors": 1.0}, "whole numbers"),
        ({"vectors": 1, "bias": True}, "bias=False without scalars"),
        ({"vectors": 2, "groups": 2}, "groups=1; got 2"),
    ],
)
def test_heads_that_cannot_be(options, expected):
    with pytest.raises(ValueError, match=expected):
        FieldConv2d(2, "p4", **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pseudoscalars": 4}, r"between 0 and 3.*got 4"),
        ({"pseudoscalars": 2, "vectors": 1}, r"between 0 and 1, .*no vectors; got 2"),
        ({"pseudoscalars": -1}, "got -1"),
        ({"pseudoscalars": True}, "got True"),
        ({"pseudoscalars": 1, "groups": 3}, "groups=1 with vector or pseudoscalar"),
    ],
)
def test_images_that_cannot_be(options, expected):
    with pytest.raises(ValueError, match=expected):
        LiftConv2d(3, 3, "p4", **options)


def test_parts_that_do_not_fit():
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"\[batch, 4, height, width\]"):
        transform(x, "p4", 1, [("scalar", 2), ("vector", 1)])
    with pytest.raises(ValueError, match="pairs such as"):
        transform(x, "p4", 1, ["scalar", "vector"])
    with pytest.raises(ValueError, match=r"expected one of .*\('tensor', 3\)"):
        transform(x, "p4", 1, [("tensor", 3)])


# Flows without divergence


def divergence(flow, spacing=1.0):
    """By central differences, one pixel inside: x right, y up."""
    dy, dx = spacing if isinstance(spacing, tuple) else (spacing, spacing)
    u, v = flow.unflatten(1, (-1, 2)).unbind(2)
    along_x = (u[:, :, 1:-1, 2:] - u[:, :, 1:-1, :-2]) / (2 * dx)
    along_y = (v[:, :, :-2, 1:-1] - v[:, :, 2:, 1:-1]) / (2 * dy)
    return along_x + along_y


MODES = ["zeros", "replicate", "reflect", "circular", ("replicate", "circular")]


@pytest.mark.parametrize("spacing", [1.0, 0.3, (0.5, 2.0)])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_divergence_is_zero_to_rounding(mode, spacing):
    stream = torch.randn(2, 3, 12, 9, **DOUBLE)
    flow = Curl2d(spacing=spacing, padding_mode=mode)(stream)
    assert flow.shape == (2, 6, 12, 9)
    assert flow.abs().max() > 0.1
    assert divergence(flow, spacing).abs().max() < 1e-13
    assert divergence(flow.flip(1), spacing).abs().max() > 0.1  # what is no curl is seen


def test_on_a_torus_it_is_zero_everywhere():
    flow = Curl2d(padding_mode="circular")(torch.randn(1, 1, 8, 10, **DOUBLE))
    around = nn.functional.pad(flow, (1, 1, 1, 1), mode="circular")
    assert divergence(around).shape[2:] == (8, 10)
    assert divergence(around).abs().max() < 1e-13


def test_the_flow_around_a_hill_is_anticlockwise():
    """ψ = −(x² + y²)/2: u = ∂ψ/∂y = −y, v = −∂ψ/∂x = x."""
    line = torch.arange(-3.0, 4.0, **DOUBLE)
    x, y = line, -line[:, None]
    flow = Curl2d()((-(x**2 + y**2) / 2)[None, None])[0, :, 1:-1, 1:-1]
    torch.testing.assert_close(flow[0], (-y).expand(7, 7)[1:-1, 1:-1])
    torch.testing.assert_close(flow[1], x.expand(7, 7)[1:-1, 1:-1])


@pytest.mark.parametrize("mode", MODES[:4])
def test_curls_of_pseudoscalars_are_vectors(mode):
    stream = torch.randn(2, 2, 9, 9, **DOUBLE)
    curl = Curl2d(padding_mode=mode)
    assert_equivariant(curl, stream, "p4m")
    wrong = {"input_kind": "scalar"}  # the sense of rotation would stay
    assert equivariance_error(curl, stream, 4, "p4m", **wrong) > 1
    assert "padding_mode=" in repr(curl)


@pytest.mark.parametrize("spacing", [1.0, (0.7, 1.0)])
def test_other_angles_have_order_two(spacing):
    """A wave and its turned copy, in closed form, at the centre."""
    dy, dx = spacing if isinstance(spacing, tuple) else (spacing, spacing)

    def error(h):
        angle, (kx, ky) = np.pi / 4, (0.9, 0.4)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        line = np.array([-1.0, 0.0, 1.0])
        x, y = h * dx * line[None], -h * dy * line[:, None]
        flows = []
        for frequency in ((kx, ky), turn @ (kx, ky)):
            wave = np.sin(frequency[0] * x + frequency[1] * y + 0.3)
            curl = Curl2d(spacing=(h * dy, h * dx))
            flows.append(curl(torch.from_numpy(wave)[None, None])[0, :, 1, 1].numpy())
        return float(np.linalg.norm(turn @ flows[0] - flows[1]))

    assert 1.9 < convergence_order(error, [0.4, 0.3, 0.2, 0.1]) < 2.1


def test_a_network_whose_flow_has_no_divergence():
    network = nn.Sequential(
        LiftConv2d(2, 3, "p4m", vectors=1, padding_mode="circular", **DOUBLE),
        nn.SiLU(),
        FieldConv2d(3, "p4m", pseudoscalars=1, padding_mode="circular", **DOUBLE),
        Curl2d(padding_mode="circular"),
    )
    x = torch.randn(2, 2, 12, 12, **DOUBLE)
    kinds = {"input_kind": "vector", "output_kind": "vector"}
    assert_equivariant(network, x, "p4m", **kinds)
    assert divergence(network(x)).abs().max() < 1e-12
    assert divergence(x).abs().max() > 0.1
    table = layer_errors(network, x)
    assert (table.output_kind, max(e.relative for e in table.output) < 1e-12) == ("vector", True)
    assert [layer.kind for layer in table.layers][-2:] == ["pseudoscalar", "vector"]
    torch.testing.assert_close(econv.export(network, x)(x), network(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"padding_mode": "mirror"}, "expected padding_mode"),
        ({"spacing": 0.0}, "positive spacing"),
        ({"spacing": (1.0, 2.0, 3.0)}, "positive spacing"),
    ],
)
def test_curls_that_cannot_be(options, expected):
    with pytest.raises(ValueError, match=expected):
        Curl2d(**options)
    with pytest.raises(ValueError, match="expected a tensor"):
        Curl2d()(torch.randn(3, 8, 8))
