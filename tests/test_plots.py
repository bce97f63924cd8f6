"""Pictures: they show the numbers that they were given, and are written whole or not at all."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from econv import GroupConv2d, LiftConv2d, VectorConv2d, filter_basis
from econv.groups import Group
from econv.lab import AngleCurve, ResolutionCurve, operator_symbols
from econv.plots import plot_angles, plot_filters, plot_resolution, plot_symbols, save


def angle_curve(scale: float = 1.0) -> AngleCurve:
    angles = tuple(5.0 * k for k in range(72))
    errors = tuple(scale * abs(math.sin(math.radians(2 * a))) for a in angles)
    return AngleCurve("scalar", angles, errors, Group("p8"))


def resolution_curve() -> ResolutionCurve:
    spacings = (1.0, 0.5, 0.25)
    return ResolutionCurve(1, "45°", spacings, tuple(0.1 * h**2 for h in spacings), 2.0)


def test_the_polar_picture_has_the_errors_as_logarithmic_radii():
    figure = plot_angles({"ours": angle_curve(0.01), "twin": angle_curve()})
    axis, beside = figure.axes
    ours, twin = (line for line in axis.lines if line.get_label() in ("ours", "twin"))
    at = 9  # 45°, where the error is 0.01 and 1
    assert ours.get_xdata()[at] == pytest.approx(math.pi / 4)
    assert twin.get_ydata()[at] - ours.get_ydata()[at] == pytest.approx(2.0)
    assert twin.get_ydata()[at] == pytest.approx(7.0)  # the circle begins at 1e-7
    assert ours.get_ydata()[0] == 0.0  # exact: in the centre
    assert [text.get_text() for text in beside.get_legend().get_texts()] == ["ours", "twin"]
    assert "45°" in [label.get_text() for label in axis.get_xticklabels()]


def test_beside_it_is_how_many_answers_change():
    curve = angle_curve()
    changed = dataclasses.replace(curve, changed=tuple(min(e, 0.5) for e in curve.errors))
    _, beside = plot_angles(changed).axes
    (line,) = beside.lines
    assert "class changes, %" in beside.get_title()
    assert (line.get_xdata()[9], line.get_ydata()[9]) == (45.0, 50.0)
    assert line.get_xdata()[-1] == 360.0
    _, beside = plot_angles(curve).axes
    assert "relative error, %" in beside.get_title()
    assert beside.lines[0].get_ydata()[9] == pytest.approx(100.0)


def test_what_could_not_be_compared_is_not_drawn():
    figure = plot_angles(AngleCurve("regular", (0.0, 45.0, 90.0), (0.0, None, 1e-3), Group("p8")))
    assert [np.isnan(axis.lines[-1].get_ydata()[1]) for axis in figure.axes] == [True, True]


def test_a_curve_that_is_exact_everywhere_can_be_drawn(tmp_path):
    curve = AngleCurve("scalar", (0.0, 90.0), (0.0, 0.0), None)
    assert save(plot_angles(curve), tmp_path / "x.png").stat().st_size > 1000


def test_the_resolution_picture_shows_points_line_and_order():
    figure = plot_resolution({"layer": resolution_curve()})
    (axis,) = figure.axes
    line, points = axis.lines
    np.testing.assert_allclose(points.get_ydata(), resolution_curve().errors)
    np.testing.assert_allclose(line.get_ydata(), 0.1 * np.asarray(line.get_xdata()) ** 2)
    assert "order 2.00" in axis.get_legend().get_texts()[0].get_text()


@pytest.mark.parametrize(
    ("layer", "panels"),
    [
        (LiftConv2d(2, 3, "p8"), 9),
        (GroupConv2d(2, 3, "p6m"), 13),
        (LiftConv2d(1, 1, "p4", operators="order<=1"), 4),
    ],
    ids=["lift", "group", "no canonical square"],
)
def test_every_turned_copy_of_a_filter_has_a_panel(layer, panels):
    figure = plot_filters(layer)
    images = [axis.images[0].get_array() for axis in figure.axes if axis.get_title()]
    assert len(images) == panels
    filters = layer.filters().detach().double().numpy()
    np.testing.assert_allclose(images[-layer.group.order], filters[0, 0])
    last = layer.group.order - 1
    column = last if isinstance(layer, GroupConv2d) else 0
    np.testing.assert_allclose(images[-1], filters[last, column])


def test_the_chosen_field_and_channel_are_drawn():
    layer = LiftConv2d(2, 3, "p4")
    images = [a.images[0].get_array() for a in plot_filters(layer, 2, 1).axes if a.get_title()]
    stencils = layer.basis.canonical_filters.reshape(9, 3, 3)
    pixels = np.tensordot(layer.coefficients().detach()[2, 1], stencils, axes=1)
    np.testing.assert_allclose(images[0], pixels, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(images[2], layer.filters().detach()[2 * 4 + 1, 1])


@pytest.mark.parametrize(
    ("layer", "where", "message"),
    [
        (VectorConv2d(1, 1, "p4"), (), "got VectorConv2d"),
        (torch.nn.Conv2d(1, 1, 3), (), "got Conv2d"),
        (LiftConv2d(2, 3, "p4"), (3, 0), "field below 3"),
        (LiftConv2d(2, 3, "p4"), (0, 2), "channel below 2"),
    ],
)
def test_what_has_no_turned_filters_is_refused(layer, where, message):
    with pytest.raises(ValueError, match=message):
        plot_filters(layer, *where)


def test_symbols_are_drawn_beside_the_ideal_on_one_scale():
    symbols = operator_symbols(filter_basis("p4", stencils="central"), points=9)
    figure = plot_symbols(symbols)
    assert len(figure.axes) == 3 * len(symbols)
    columns = np.array(figure.axes).reshape(3, len(symbols))
    ideal, stencil, difference = (axis.images[0] for axis in columns[:, 1])
    np.testing.assert_allclose(stencil.get_array(), symbols[1].stencil.imag)
    np.testing.assert_allclose(difference.get_array(), stencil.get_array() - ideal.get_array())
    assert ideal.get_clim() == stencil.get_clim() == difference.get_clim()
    assert columns[0, 1].get_title() == "∂x"


@pytest.mark.parametrize("draw", [plot_angles, plot_resolution, plot_symbols])
def test_nothing_to_draw_is_an_error(draw):
    with pytest.raises(ValueError, match="at least one"):
        draw({} if draw is not plot_symbols else [])


def test_a_picture_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.png"
    save(plot_resolution(resolution_curve()), path)
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    figure = plot_resolution(resolution_curve())
    figure.axes[0].set_title("$\\broken{$")
    with pytest.raises(ValueError, match="broken"):
        save(figure, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"econv\[plot\]"):
        plot_angles(angle_curve())


def test_importing_econv_loads_neither_matplotlib_nor_pillow():
    code = (
        "import sys, econv, econv.cli, econv.lab, econv.page, econv.plots; "
        "print({'matplotlib', 'PIL', 'selenium'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


# What a reader sees: positions, signs and scales


def seen(axis) -> dict[tuple[float, float], float]:
    """The numbers of the picture's pixels, by the place on the axes where a reader sees them."""
    (image,) = axis.images
    left, right, bottom, top = image.get_extent()
    rows, columns = image.get_array().shape
    values = np.asarray(image.get_array())
    if image.origin == "upper":
        values = values[::-1]
    up = axis.get_ylim()[0] < axis.get_ylim()[1]
    assert up, "y points up"
    assert axis.get_xlim()[0] < axis.get_xlim()[1]
    width, height = (right - left) / columns, (top - bottom) / rows
    return {
        (round(left + (c + 0.5) * width, 9), round(bottom + (r + 0.5) * height, 9)): values[r, c]
        for r in range(rows)
        for c in range(columns)
    }


def derivative(which: int) -> LiftConv2d:
    """A layer of p4 whose first filter is one derivative by central differences."""
    layer = LiftConv2d(1, 1, "p4", stencils="central", size=3)
    beta = torch.zeros(layer.weight.shape)
    beta[0, 0, which] = 1.0
    layer.set_coefficients(beta)
    return layer


def filter_axes(figure) -> list:
    return [axis for axis in figure.axes if axis.get_title()]


def test_filters_are_the_right_way_up():
    """∂y is positive above and negative below; a quarter turn on, left and right."""
    canonical, straight, turned, *_ = filter_axes(plot_filters(derivative(2)))
    for axis in (canonical, straight):
        pixels = seen(axis)
        assert pixels[0.0, 1.0] == pytest.approx(0.5)
        assert pixels[0.0, -1.0] == pytest.approx(-0.5)
        assert [pixels[x, 0.0] for x in (-1.0, 0.0, 1.0)] == pytest.approx([0.0] * 3)
    pixels = seen(turned)  # ∂y, turned anticlockwise, looks to the left
    assert pixels[-1.0, 0.0] == pytest.approx(0.5)
    assert pixels[1.0, 0.0] == pytest.approx(-0.5)


def test_numbers_stand_in_their_pixels_with_their_signs():
    layer = LiftConv2d(1, 1, "p8")
    for axis in filter_axes(plot_filters(layer)):
        written = {
            tuple(round(float(v), 9) for v in text.get_position()): text.get_text()
            for text in axis.texts
        }
        pixels = seen(axis)
        assert set(written) == set(pixels)
        assert any(written.values())
        for place, text in written.items():
            if abs(pixels[place]) < 0.05:
                assert text == ""
            else:
                assert float(text.replace("−", "-")) == pytest.approx(pixels[place], abs=0.0501)
        assert all(text.get_ha() == text.get_va() == "center" for text in axis.texts)


def test_numbers_are_white_where_the_colour_is_dark():
    layer = LiftConv2d(1, 1, "p8")
    for axis in filter_axes(plot_filters(layer)):
        limit = axis.images[0].get_clim()[1]
        for text in axis.texts:
            value = seen(axis)[tuple(round(float(v), 9) for v in text.get_position())]
            assert text.get_color() == ("white" if abs(value) > 0.6 * limit else "black")


def test_all_copies_share_a_scale_that_holds_the_largest_and_has_zero_in_the_middle():
    for layer in (LiftConv2d(1, 1, "p8"), GroupConv2d(1, 1, "p6m")):
        axes = filter_axes(plot_filters(layer))
        largest = max(np.abs(axis.images[0].get_array()).max() for axis in axes)
        for axis in axes:
            assert axis.images[0].get_clim() == pytest.approx((-largest, largest))
            assert axis.images[0].get_cmap().name == "RdBu_r"  # red is positive


def test_the_square_turns_with_its_filter():
    axes = filter_axes(plot_filters(LiftConv2d(1, 1, "p8")))
    squares = [np.asarray(axis.patches[0].get_xy())[:4] for axis in axes]
    np.testing.assert_allclose(squares[0], squares[1])
    assert np.abs(squares[0]).max() == 1.5  # of the canonical filter of 3×3
    for element, square in enumerate(squares[1:]):
        angle = 2 * math.pi * element / 8
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        np.testing.assert_allclose(square, squares[0] @ turn.T, atol=1e-12)


def test_spectra_are_the_right_way_up_and_round():
    """The response of ∂x, without i, is the frequency along x; that of ∂y is the one along y."""
    symbols = operator_symbols(filter_basis("p4", stencils="central"), points=9)
    columns = np.array(plot_symbols(symbols).axes).reshape(3, len(symbols))
    for number, axis in ((1, 0), (2, 1)):
        assert columns[0, number].get_title() == ("∂x", "∂y")[axis]
        for place, value in seen_spectrum(columns[0, number], symbols[number]).items():
            assert value == pytest.approx(place[axis], abs=1e-9)
        stencil = seen_spectrum(columns[1, number], symbols[number])
        for place, value in stencil.items():
            assert value == pytest.approx(math.sin(place[axis]), abs=1e-9)
    for row in range(3):
        assert columns[row, 0].get_ylabel() == ("ideal", "stencil", "difference")[row]


def seen_spectrum(axis, symbol) -> dict[tuple[float, float], float]:
    """Pixels by the frequencies that they stand for, in the order in which they are seen."""
    pixels = seen(axis)
    xs, ys = (sorted({place[i] for place in pixels}) for i in (0, 1))
    assert len(xs) == len(ys) == len(symbol.frequencies)
    line = symbol.frequencies
    return {(line[i], line[j]): pixels[x, y] for i, x in enumerate(xs) for j, y in enumerate(ys)}


def test_the_scale_of_spectra_is_that_of_the_stencil():
    symbols = operator_symbols(filter_basis("p4", stencils="central"), points=9)
    columns = np.array(plot_symbols(symbols).axes).reshape(3, len(symbols))
    for column, symbol in zip(columns.T, symbols, strict=True):
        largest = np.abs(symbol.stencil).max()
        assert column[1].images[0].get_clim() == pytest.approx((-largest, largest))
        assert f"to ideal {symbol.error:.2g}" in column[2].get_xlabel()
        assert f"turning {symbol.turning_error:.2g}" in column[2].get_xlabel()
    ticks = columns[2, 0].get_xticks()
    assert dict(
        zip(ticks, [t.get_text() for t in columns[2, 0].get_xticklabels()], strict=True)
    ) == {
        -math.pi: "−π",
        0.0: "0",
        math.pi: "π",
    }


def test_the_rings_say_the_errors_that_lie_on_them():
    curve = AngleCurve("scalar", (0.0, 90.0, 180.0), (1e-2, 1e-4, 1e-6), Group("p8"))
    axis, _ = plot_angles(curve).axes
    radii = dict(zip((1e-2, 1e-4, 1e-6), axis.lines[-1].get_ydata(), strict=False))
    labels = [label.get_text() for label in axis.get_yticklabels()]
    rings = dict(zip(axis.get_yticks(), labels, strict=True))
    assert axis.get_ylim() == (0.0, 7.0)
    for error, radius in radii.items():
        exponent = round(math.log10(error))
        assert rings[round(radius)] in (f"$10^{{{exponent}}}$", "")
        assert radius == pytest.approx(exponent + 7)
    named = {ring: text for ring, text in rings.items() if text}
    assert named
    assert all(text == f"$10^{{{int(ring) - 7}}}$" for ring, text in named.items())


def test_the_linear_circle_is_in_percent_from_nothing():
    axis, _ = plot_angles(angle_curve(0.5), logarithmic=False).axes
    drawn = axis.lines[-1]
    assert drawn.get_ydata()[9] == pytest.approx(50.0)
    assert drawn.get_ydata()[0] == pytest.approx(0.0)
    low, high = axis.get_ylim()
    assert (low, high) == (0.0, pytest.approx(52.5))
    for ring, label in zip(axis.get_yticks(), axis.get_yticklabels(), strict=True):
        assert label.get_text() in (f"{ring:g} %", "")


def test_both_axes_of_the_resolution_are_logarithmic_and_say_the_pixels():
    (axis,) = plot_resolution(resolution_curve()).axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert axis.get_xticks().tolist() == [0.25, 0.5, 1.0]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["0.25", "0.5", "1"]
    assert "pixel" in axis.get_xlabel()
    assert "error" in axis.get_ylabel()
