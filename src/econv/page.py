"""One self-contained HTML page: a slider turns the input, and the page shows what that does.

It needs no server and no network: pictures are sprite sheets in data addresses, the numbers are in
the page. What is measured is the business of `lab`; this module knows HTML and PNG.
"""

from __future__ import annotations

import base64
import copy
import html
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from econv.engines.problem import times
from econv.files import atomic
from econv.groups import Group, GroupLike
from econv.lab import (
    Advice,
    ErrorSources,
    ErrorSplit,
    LayerError,
    LayerErrors,
    LieDerivatives,
    Sizes,
    calibrate,
    error_sources,
    find_group,
    layer_errors,
    plain_twin,
    size_verdict,
    verdict,
    windowed,
)
from econv.lab.kinds import input_kind_of
from econv.lab.measure import MARGIN, disc_mask, relative_error
from econv.testing import _undisturbed, rotate

__all__ = ["address", "filled", "page", "png", "write_page"]

STEPS = {2: 72, 3: 24}
"""Angles of images and of volumes, which have several slices for each."""
SLICES = 9
COLUMNS = 9
GAIN = 4
LARGEST = 3_000_000
_CLASSES = 10

Bytes = npt.NDArray[np.uint8]

# Lightness rises evenly, so that the maps read without colour too.
_MAP = ("#1b1044", "#3b2a7a", "#2f5f9e", "#2f8f94", "#5fb56f", "#b8d14f", "#fdf0a0")
_DIFFERENCE = ("#0b3c7a", "#4b86c2", "#b5d0e6", "#f4f4f2", "#f0c4b4", "#cf6a50", "#7f1420")
_GREY = ("#000000", "#ffffff")


def write_page(path: str | Path, model: nn.Module, images: Tensor, **options: Any) -> Path:
    """Write :func:`page` to a file: whole, or not at all."""
    wanted = Path(path)
    text = page(model, images, **options)
    with atomic(wanted) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return wanted


def page(
    model: nn.Module,
    images: Tensor,
    *,
    twin: nn.Module | None = None,
    group: GroupLike | None = None,
    title: str = "Equivariance of a network",
    classes: Sequence[str] | None = None,
    table: LayerErrors | None = None,
    sources: ErrorSources | None = None,
    layer: str | None = None,
    lie: LieDerivatives | None = None,
    split: ErrorSplit | None = None,
    advice: Advice | None = None,
    sizes: Sizes | None = None,
) -> str:
    """The page for a model and the first of the images, as HTML text of less than 3 MB.

    Args:
        model: a network of layers of econv; measured in eval mode, and left as it is.
        images: ``[n, channels, size, size]``, or volumes with a third side; the pictures show the
            first, faded to zero outside of its inscribed disc, so that turning it loses nothing.
            Volumes turn about z, and a second slider moves through their slices.
        twin: the CNN to compare with, with modules of the same names; by default an untrained
            :func:`~econv.lab.plain_twin` whose batch norms have seen the images.
        group: the group to check, by default the model's.
        title: the heading.
        classes: names of the classes, for scores.
        table: what `layer_errors` gave, where that is at hand.
        sources: what `error_sources` gave, likewise.
        layer: the one whose maps are shown, by default the last whose maps have pixels.
        lie: what `lie_derivatives` gave; with any of this and the next three the page has a section
            on why the network is not equivariant and what would help.
        split: what `split_error` gave.
        advice: what `advice` gave.
        sizes: what `sizes` gave.

    Raises:
        ValueError: for a model that does not read images, layers or classes that are not there, and
            a page that would be too large.
    """
    found = find_group(model, group)
    if images.ndim != found.dimension + 2 or len(set(images.shape[2:])) > 1:
        what, sides = ("square images", 2) if found.dimension == 2 else ("cubes", 3)
        raise ValueError(
            f"expected {what} [n, channels{', size' * sides}]; got {tuple(images.shape)}"
        )
    if input_kind_of(model, None) != "scalar":
        raise ValueError(
            f"expected a model that reads images; got one that reads {input_kind_of(model, None)} "
            "features, which are not turned as pictures are"
        )
    ours = copy.deepcopy(model).eval()
    other = calibrate(plain_twin(model), images) if twin is None else copy.deepcopy(twin).eval()
    seen = windowed(images[:1])
    table = table or layer_errors(ours, windowed(images), found)
    if sources is None:
        off_grid = [e for e in range(found.order) if e not in found.grid_symmetries]
        element = (off_grid or [*found.grid_generators] or [0])[0]
        sources = error_sources(ours, images, element, found)
    wanted = layer or sources.layer
    shown = next((entry for entry in table.layers if entry.name == wanted), None)
    if shown is None:
        raise ValueError(f"the table has no layer {wanted!r}")
    called = shown.name.partition(" (call")[0]
    if called in dict(ours.named_modules()) and called not in dict(other.named_modules()):
        raise ValueError(
            "expected a twin with modules of the same names; it has no layer "
            f"{called!r}, whose maps the page shows"
        )
    steps = STEPS[found.dimension]
    angles = [360 * k / steps for k in range(steps)]
    multiple = shown.order
    results = {}
    for name, network in (("ours", ours), ("twin", other)):
        maps, scores = _turned_maps(network, seen, shown.name, angles)
        # A twin of other widths has channels that no field puts together.
        kind = shown.kind if maps.shape[1] == shown.shape[0] else "scalar"
        results[name] = _Result(_as_images(maps, kind, multiple), scores, angles)
    scores = results["ours"].scores
    with_classes = table.output_kind == "invariant" and scores.ndim == 2 and scores.shape[1] > 1
    counts = [sum(p.numel() for p in network.parameters()) for network in (ours, other)]
    about_twin = (
        "The twin has ordinary convolutions of the same size and number of channels; it is "
        "untrained."
        if twin is None
        else f"The network has {counts[0]:,} parameters, its twin with ordinary convolutions "
        f"{counts[1]:,}."
    )
    for size in (96, 80, 64, 48, 32):
        text = _fill(
            table,
            sources,
            shown,
            results,
            seen,
            angles,
            found,
            size,
            title,
            classes,
            about_twin,
            with_classes,
            _why(lie, split, advice, sizes),
        )
        if len(text.encode()) < LARGEST:
            return text
    raise ValueError(f"the page would exceed {LARGEST} bytes: the model has too many layers")


class _Result:
    """The maps of one network for every angle, turned back."""

    def __init__(self, maps: Tensor, scores: Tensor, angles: Sequence[float]) -> None:
        self.scores = scores
        back = [rotate(m[None], -angle) for m, angle in zip(maps, angles, strict=True)]
        self.maps = torch.cat(back)
        mask = disc_mask(self.maps, MARGIN)
        straight = self.maps[:1]
        self.errors = [relative_error(m[None], straight, mask, "the map") for m in self.maps]
        whole = self.maps[0] * (1.0 if mask is None else mask)
        self.channel = int(whole.flatten(1).std(dim=1, correction=0).argmax())


def _turned_maps(
    model: nn.Module, image: Tensor, layer: str, angles: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The map after one layer and the output, for the image turned by every angle."""
    module = dict(model.named_modules()).get(layer.partition(" (call")[0], model)
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        kept.append(output.detach().clone())

    maps, scores = [], []
    handle = module.register_forward_hook(keep)
    try:
        with _undisturbed(model, image.device) as run:
            for angle in angles:
                kept.clear()
                scores.append(run(rotate(image, angle)))
                if not kept:
                    raise ValueError(f"the layer {layer!r} of the twin is never called")
                maps.append(kept[-1])
    finally:
        handle.remove()
    return torch.cat(maps).double().cpu(), torch.cat(scores).double().cpu()


def _as_images(maps: Tensor, kind: str, multiple: int) -> Tensor:
    """Maps as images that turn: orientations pooled, vectors by their length."""
    if kind == "regular":
        return maps.unflatten(1, (-1, multiple)).amax(2)
    if kind == "vector":
        return maps.unflatten(1, (-1, multiple)).norm(dim=2)
    return maps


def _fill(
    table: LayerErrors,
    sources: ErrorSources,
    shown: LayerError,
    results: dict[str, _Result],
    image: Tensor,
    angles: Sequence[float],
    group: Group,
    size: int,
    title: str,
    classes: Sequence[str] | None,
    about_twin: str,
    with_classes: bool,
    why: str,
) -> str:
    turned = torch.cat([rotate(image, angle) for angle in angles]).double().cpu()
    volumes = group.dimension == 3
    sheets = {"input": _input_sheet(_slices(turned), size)}
    for name, result in results.items():
        maps = _slices(result.maps[:, result.channel, None])[:, 0]
        straight = maps[: len(maps) // len(angles)].repeat(len(angles), 1, 1)
        low, high = float(straight.min()), float(straight.max())
        reach = (high - low) or 1.0
        sheets[name] = _sheet(maps, low, low + reach, _MAP, size)
        half = reach / 2 / GAIN
        sheets[f"{name}-difference"] = _sheet(maps - straight, -half, half, _DIFFERENCE, size)
    own = [_turns_by(group, angle) for angle in angles]
    side = image.shape[-1]
    data: dict[str, Any] = {
        "group": group.name,
        "angles": [round(angle, 6) if angle % 1 else int(angle) for angle in angles],
        "own": own,
        "exact": [a % 90 == 0 and is_own for a, is_own in zip(angles, own, strict=True)],
        "columns": COLUMNS,
        "slices": SLICES if volumes else 1,
        "depths": [f"slice {n + 1} of {side}" for n in _places(side)] if volumes else [],
        "sheets": {name: {"png": sheet, "size": side} for name, (sheet, side) in sheets.items()},
        "errors": {name: [_finite(e) for e in result.errors] for name, result in results.items()},
        "chart": {"left": _LEFT, "width": _WIDTH},
        "probabilities": None,
    }
    probabilities = ""
    if with_classes:
        probabilities = _probabilities(data, results, classes)
    pooled = {
        "regular": "maximum over the orientations of one field",
        "vector": "length of one vector",
        "scalar": "one channel",
    }[shown.kind]
    if shown.kind != "scalar" and results["twin"].maps.shape[1] != results["ours"].maps.shape[1]:
        pooled += ", of the twin one channel"
    parts = {
        "title": html.escape(title),
        "sides": times(image.shape[2:]),
        "about": " about z" if volumes else "",
        "slices": _slice_slider() if volumes else "",
        "compared": str(len(table.layers)),
        "last": str(len(angles) - 1),
        "start": str(_first_shown(data["own"])),
        "step": f"{360 / len(angles):g}",
        "pooled": pooled,
        "twin": about_twin,
        "group": group.name,
        "gain": str(GAIN),
        "probabilities": probabilities,
        "chart": _chart(results, data["own"]),
        "table": _table(table),
        "verdict": _of_space(_verdict(table)) if volumes else _verdict(table),
        "layer": html.escape(shown.name),
        "angle": html.escape(sources.angle),
        "sources": _of_space(_sources(sources, group)) if volumes else _sources(sources, group),
        "why": why,
        # `<` cannot end the script element, and U+2028 and U+2029 are written as escapes.
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return filled("page.html", parts, _WORDS_OF_SPACE if volumes else {})


_WORDS_OF_SPACE = {
    "unturned image": "unturned volume",
    "The image is": "The volume is",
    "images that are": "volumes that are",
    "the images as they came": "the volumes as they came",
    "disc": "ball",
    "pixel grid": "voxel grid",
    "a square grid": "a cubic grid",
    "pixel": "voxel",
    "Pixels": "Voxels",
    "larger images": "larger volumes",
    "size of the image": "size of the volume",
    "centre of the image": "centre of the volume",
    "turn with the image": "turn with the volume",
    "Downsample2d": "Downsample3d",
    "size=7": "size=5",
    "for every element of {{group}}": "for elements of {{group}} that make all others on the "
    "voxel grid, and one of each other angle",
    "At quarter turns and flips": "At the symmetries of the cube",
}
"""What our own texts say of images, and say of volumes."""


def _of_space(text: str) -> str:
    for word, other in _WORDS_OF_SPACE.items():  # whole ones: names of layers stay as they are
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?=s?(?!\w|\.\w))", other, text)
    return text


def _slice_slider() -> str:
    return (
        '<div class="line" style="margin-top:.5rem"><label for="slice">Slice along z</label> '
        '<output id="depth" for="slice"></output></div>'
        f'<input id="slice" type="range" min="0" max="{SLICES - 1}" step="1" '
        f'value="{SLICES // 2}">'
    )


def _turns_by(group: Group, degrees: float) -> bool:
    """Whether a turn by this angle, in space about z, is an element of the group."""
    turn = np.eye(group.dimension)
    angle = math.radians(degrees)
    turn[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    return bool((np.abs(np.asarray(group.matrices) - turn).max(axis=(1, 2)) < 1e-9).any())


def _places(depth: int) -> list[int]:
    """Which slices are shown, of so many: evenly from the first to the last."""
    return [round(k * (depth - 1) / (SLICES - 1)) for k in range(SLICES)]


def _slices(frames: Tensor) -> Tensor:
    """The slices ``[n * slices, c, h, w]`` of volumes ``[n, c, d, h, w]``; images as they are."""
    if frames.ndim == 4:
        return frames
    return frames[:, :, _places(frames.shape[2])].transpose(1, 2).flatten(0, 1)


def filled(template: str, parts: Mapping[str, str], words: Mapping[str, str] | None = None) -> str:
    """A template of this package with the style that all pages share, and its parts filled in.

    ``words`` of the template are replaced by others first.
    """
    given = {
        name: files("econv").joinpath(name).read_text(encoding="utf-8").rstrip("\n")
        for name in (template, "base.css")
    }
    whole = {**parts, "style": given["base.css"]}
    for word, other in (words or {}).items():
        given[template] = given[template].replace(word, other)
    # One pass: what is filled in is never read as a template.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: whole[match[1]], given[template] + "\n")


def _first_shown(own: Sequence[bool]) -> int:
    """Where the page opens: at the first angle of the group, or an eighth of a turn."""
    return next((index for index, is_own in enumerate(own) if is_own and index), len(own) // 8)


def _finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _probabilities(
    data: dict[str, Any],
    results: dict[str, _Result],
    classes: Sequence[str] | None,
) -> str:
    found = {name: result.scores.softmax(dim=1) for name, result in results.items()}
    count, steps = found["ours"].shape[1], data["angles"]
    if classes is not None and len(classes) != count:
        raise ValueError(f"expected the names of {count} classes; got {len(classes)}")
    names = (
        [str(name) for name in classes] if classes is not None else [str(i) for i in range(count)]
    )
    # Where there are many classes, those that any of the two networks finds likely.
    likely = torch.stack([p.max(dim=0).values for p in found.values()]).max(dim=0).values
    shown = sorted(likely.argsort(descending=True)[:_CLASSES].tolist())
    data["probabilities"] = {
        name: [[round(v, 4) for v in row] for row in p[:, shown].tolist()]
        for name, p in found.items()
    }
    data["predicted"] = {
        name: [names[i] for i in p.argmax(dim=1).tolist()] for name, p in found.items()
    }
    rows = []
    for place, index in enumerate(shown):
        bars = "".join(
            f'<div class="bar {name}-bar" id="{name}-{place}"><i></i>'
            f'<b style="left:{100 * float(p[0, index]):.2f}%"></b><span></span></div>'
            for name, p in found.items()
        )
        rows.append(f'<div class="name">{html.escape(names[index])}</div><div>{bars}</div>')
    more = f" The {len(shown)} likeliest of {count} classes." if len(shown) < count else ""
    agreement = {name: sum(c == of[0] for c in of) for name, of in data["predicted"].items()}
    return (
        '<section aria-labelledby="classes-title"><h2 id="classes-title">Class probabilities</h2>'
        '<p class="soft"><span class="ours">Equivariant network</span> and <span class="twin">CNN '
        f"twin</span>; the thin line is where each bar stands at 0°.{more} Over the {len(steps)} "
        f"angles the predicted class stays the same {agreement['ours']} times for the network and "
        f"{agreement['twin']} times for the twin.</p>"
        f'<div class="classes">{"".join(rows)}</div></section>'
    )


_LEFT, _WIDTH, _TOP, _HEIGHT = 112, 640, 20, 260
_FLOOR = -7  # the decade in which rounding in float32 lies: what is exact reaches down to it


def _chart(results: dict[str, _Result], own: Sequence[bool]) -> str:
    errors = [e for result in results.values() for e in result.errors if 0 < e < math.inf]
    high = max(0, math.ceil(math.log10(max(errors)))) if errors else 0
    low = _FLOOR
    decades = high - low

    def y(error: float) -> float:
        # Written so that a NaN goes to the top.
        exponent = -math.inf if error <= 0 else math.log10(error) if error < math.inf else high
        return _TOP + _HEIGHT * (high - min(max(exponent, low), high)) / decades

    lines = []
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        label = f"≤ 1e{exponent}" if exponent == low else "1" if exponent == 0 else f"1e{exponent}"
        rank = ' class="minor"' if (exponent - low) % 2 and exponent else ""
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text{rank} x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for degrees in range(0, 361, 45):
        at = _LEFT + _WIDTH * degrees / 360
        rank = ' class="minor"' if degrees % 90 else ""
        lines.append(
            f'<text{rank} x="{at:.1f}" y="{_TOP + _HEIGHT + 28}" text-anchor="middle">'
            f"{degrees}°</text>"
        )
    for index, is_own in enumerate(own):
        if is_own:
            at = _LEFT + _WIDTH * index / len(own)
            lines.append(
                f'<line class="own" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_TOP + _HEIGHT}"/>'
            )
    for name in ("twin", "ours"):
        series = [*results[name].errors, results[name].errors[0]]
        steps = len(series) - 1
        points = " ".join(
            f"{_LEFT + _WIDTH * k / steps:.1f},{y(error):.1f}" for k, error in enumerate(series)
        )
        lines.append(f'<polyline points="{points}" style="stroke:var(--{name})"/>')
    lines.append(
        f'<line class="cursor" id="cursor" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" '
        f'y2="{_TOP + _HEIGHT}"/>'
    )
    width, height = _LEFT + _WIDTH + 40, _TOP + _HEIGHT + 36
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="relative error over the angle, logarithmic">{"".join(lines)}</svg>'
    )


def _table(table: LayerErrors) -> str:
    exact = set(table.group.grid_symmetries)
    heads = "".join(
        f'<th scope="col">{html.escape(name)}{"∗" if element in exact else ""}</th>'
        for element, name in zip(table.elements, table.names, strict=True)
    )

    def row(name: str, kind: str, errors: Sequence[float | None], extra: str = "") -> str:
        cells = ""
        for element, error in zip(table.elements, errors, strict=True):
            wrong = element in exact and error is not None and not error <= 1e-4
            cells += f"<td{' class=high' if wrong else ''}>{_figure(error)}</td>"
        head = f'<th scope="row">{html.escape(name)}</th><td>{html.escape(kind)}</td>'
        return f"<tr{extra}>{head}{cells}</tr>"

    rows = [row(f"{e.name} {e.type}", e.kind, e.errors) for e in table.layers]
    output = [error.relative for error in table.output]
    rows.append(row("output", table.output_kind, output, ' class="output"'))
    if all(error.agreement is not None for error in table.output):
        cells = "".join(f"<td>{100 * (e.agreement or 0):.0f} %</td>" for e in table.output)
        rows.append(f'<tr><th scope="row">same class</th><td></td>{cells}</tr>')
    return (
        f'<table><thead><tr><th scope="col">after layer</th><th scope="col">kind</th>{heads}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _figure(error: float | None) -> str:
    if error is None:
        return "–"
    return "0" if error < 1e-12 else f"{error:.1e}"


def _verdict(table: LayerErrors) -> str:
    parts = []
    inexact = table.first_inexact()
    if inexact is None and any(e in table.group.grid_symmetries for e in table.elements):
        parts.append("Every layer is exact at the symmetries of the pixel grid.")
    elif table.blame is not None:
        parts.append(
            "The first map that is not exact at the symmetries of the pixel grid is that of "
            f"<code>{html.escape(str(inexact))}</code>. {html.escape(verdict(table.blame))}"
        )
    if any(error is None for entry in table.layers for error in entry.errors):
        parts.append("–: too few pixels, or no signal, for a comparison at that angle.")
    if table.unknown:
        names = html.escape(", ".join(table.unknown))
        parts.append(
            f"How these treat orientations is unknown, so they were not compared: {names}."
        )
    return f'<p class="soft">{" ".join(parts)}</p>' if parts else ""


_SOURCES = (
    (
        "sampling",
        "twin",
        "Strided sampling",
        "A stride keeps pixels 0, 2, 4 …, which lie off the centre of the image on one parity of "
        "its size. This is what remains at quarter turns, where padding and stencils vanish. "
        "Choose sizes that fit the stride, or <code>Downsample2d</code>, which is exact on every "
        "size.",
    ),
    (
        "broken",
        "twin",
        "A layer that is not equivariant",
        "Without a stride to blame, this is what remains at quarter turns, where every layer can "
        "be exact: <code>{layer}</code> does not turn with the image.",
    ),
    (
        "padding",
        "third",
        "Padding and cropping",
        "Beyond the border there are zeros instead of the scene, and turning moves the corners out "
        "of sight. The error sits near the border and creeps inwards with depth. A plain "
        "background or a wider margin removes it; no layer can.",
    ),
    (
        "stencil",
        "ours",
        "Stencils",
        "Derivatives are taken from a few pixels. The rest of the error is theirs, with that of "
        "the sharp edges that ReLU and pooling make. It falls with the square of the pixel size: "
        'smoother or larger images lower it, and so does <code>stencils="isotropic"</code>, with '
        "<code>size=7</code> further still.",
    ),
)


def _sources(sources: ErrorSources, group: Group) -> str:
    layer, angle = html.escape(sources.layer), html.escape(sources.angle)
    if sources.exact:
        return (
            f'<p id="nothing">At {angle} the map after <code>{layer}</code> is off by '
            f"{_figure(sources.error)}. Nothing to explain: exact to rounding.</p>"
        )
    absent = "broken" if sources.broken_layer is None else "sampling"
    on_grid = sources.element in group.grid_symmetries
    bars, cards = "", ""
    for name, colour, title, text in _SOURCES:
        if name == absent:
            continue
        share = f"{100 * getattr(sources, name):.1f}"
        estimate = name in ("sampling", "broken") and not on_grid and sources.grid is not None
        note = ' <span class="soft">estimate</span>' if estimate else ""
        bars += f'<i style="width:{share}%;background:var(--{colour})"></i>'
        text = text.replace("{layer}", html.escape(sources.broken_layer or ""))
        cards += (
            f'<div><h3><span class="dot" style="background:var(--{colour})"></span>{title}</h3>'
            f'<p class="share number" id="share-{name}">{share} %{note}</p><p>{text}</p></div>'
        )
    return (
        f"<p>A check that “fails” at {angle} is not yet a broken network. Pixels are a square "
        "grid, and strides, borders and stencils keep any network from turning exactly. At "
        f"{angle} the map after <code>{layer}</code> is off by {_figure(sources.error)} in the "
        f"whole inscribed disc and by {_figure(sources.interior)} in its interior, for the images "
        "as they came. (Turning that map there and back changes it by "
        f"{_figure(sources.comparison)}: no comparison is finer than that.) These are the shares "
        f"of the squared error; an estimate is extrapolated from quarter turns and flips:"
        f'{_sources_note(sources, group)}</p><div class="stack" aria-hidden="true">{bars}</div>'
        f'<div class="sources">{cards}</div>'
    )


def _why(
    lie: LieDerivatives | None,
    split: ErrorSplit | None,
    advice: Advice | None,
    sizes: Sizes | None,
) -> str:
    """The section on why a network is not equivariant and what would help, if anything is known."""
    parts = []
    if advice is not None:
        parts.append(_advice(advice))
    if split is not None:
        parts.append(_split(split))
    if sizes is not None:
        parts.append(f"<h3>Sizes</h3><p>{html.escape(size_verdict(sizes))}</p>")
    if lie is not None:
        parts.append(_lie(lie))
    if not parts:
        return ""
    return (
        '<section aria-labelledby="why-title"><h2 id="why-title">Why, and what would help</h2>'
        f"{''.join(parts)}</section>"
    )


def _advice(advice: Advice) -> str:
    norms = "estimated anew" if advice.statistics == "estimated" else "held"
    text = (
        f"<h3>What would help</h3><p>Each change was made in a copy of the network, which was not "
        f"trained again; these are the errors of the output at {advice.degrees:g}° before and "
        f"after, statistics of norms {norms}.</p>"
    )
    if not advice.suggestions:
        return f'{text}<p id="advice">Nothing of {len(advice.tried)} changes that were tried.</p>'
    shown = [*advice.suggestions, *([advice.together] if advice.together is not None else [])]
    rows = "".join(
        f'<tr><th scope="row">{html.escape(entry.change)}</th><td>{_figure(entry.before)}</td>'
        f"<td>{_figure(entry.after)}</td></tr>"
        for entry in shown
    )
    return (
        f'{text}<div class="scroll" tabindex="0" role="region" aria-label="what would help">'
        '<table id="advice"><thead><tr><th scope="col">change</th><th scope="col">before</th>'
        f'<th scope="col">after</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _split(split: ErrorSplit) -> str:
    title = f"What the error of the output at {split.degrees:g}° is made of"
    if split.exact:
        return f"<h3>{title}</h3><p>Nothing to explain: exact to rounding.</p>"
    rows = "".join(
        f'<tr><th scope="row">{html.escape(source.name)}</th><td>{100 * source.share:.1f} %</td>'
        f"<td>{_figure(source.alone)}</td><td>{html.escape(', '.join(source.layers))}</td></tr>"
        for source in split.sources
        if source.alone is not None or abs(source.share) >= 0.005
    )
    return (
        f"<h3>{title}</h3><p>It is off by {_figure(split.error)}. Shares are of its square; errors "
        "that cancel others are negative. Alone is the error if nothing else erred.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="what the error is made of">'
        '<table id="split"><thead><tr><th scope="col">source</th><th scope="col">share</th>'
        '<th scope="col">alone</th><th scope="col">mostly</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _lie(lie: LieDerivatives) -> str:
    rows = "".join(
        f'<tr><th scope="row">{html.escape(entry.name)} {html.escape(entry.type)}</th>'
        f"<td>{_figure(entry.own)}</td><td>{_figure(entry.total)}</td>"
        f"<td>{'–' if entry.share is None else f'{100 * entry.share:.1f} %'}</td></tr>"
        for entry in lie.layers
    )
    return (
        "<h3>Lie derivatives</h3><p>What a layer does wrong when the image begins to turn, over "
        f"its map, per radian; by {html.escape(lie.method)}. Own is the layer alone, all the "
        "network up to here; the shares are of the output's, "
        f"{_figure(lie.output)}.</p>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Lie derivatives">'
        '<table id="lie"><thead><tr><th scope="col">layer</th><th scope="col">own</th>'
        '<th scope="col">all</th><th scope="col">share</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _sources_note(sources: ErrorSources, group: Group) -> str:
    if sources.grid is not None:
        return ""
    return (
        f" ({group.name} has no symmetry of the pixel grid, so that sampling cannot be told apart "
        "from stencils.)"
    )


# Pictures


def png(pixels: Bytes, palette: Bytes | None = None, transparent: int | None = None) -> bytes:
    """A PNG file: ``[h, w]`` indices into a palette ``[n, 3]``, or ``[h, w, 4]`` RGBA.

    >>> png(np.zeros((2, 2, 4), np.uint8))[1:4]
    b'PNG'
    """
    height, width = pixels.shape[:2]
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    depth = rows.shape[1] // width
    # Each pixel as the difference to its left neighbour: smooth pictures then compress well.
    left = np.zeros_like(rows)
    left[:, depth:] = rows[:, :-depth]
    filtered = np.concatenate([np.ones((height, 1), np.uint8), rows - left], axis=1)

    def chunk(name: bytes, body: bytes) -> bytes:
        check = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", check)

    colour = 3 if palette is not None else 6
    parts = [chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, colour, 0, 0, 0))]
    if palette is not None:
        parts.append(chunk(b"PLTE", palette.astype(np.uint8).tobytes()))
        if transparent is not None:
            parts.append(chunk(b"tRNS", b"\xff" * transparent + b"\x00"))
    parts += [chunk(b"IDAT", zlib.compress(filtered.tobytes(), 9)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _sheet(
    frames: Tensor, low: float, high: float, colours: Sequence[str], size: int
) -> tuple[str, int]:
    """Frames ``[n, h, w]`` side by side in a data address, and the side of one frame."""
    small = _shrunk(frames[:, None], size)[:, 0]
    levels = (small - low) / (high - low) * 254
    indices = levels.nan_to_num(0.0).clamp(0, 254).round().to(torch.uint8)
    indices[:, ~_inside(indices.shape[-1])] = 255
    pixels = png(_tiled(indices[:, None])[..., 0], _palette(colours), transparent=255)
    return address(pixels), int(indices.shape[-1])


def _input_sheet(frames: Tensor, size: int) -> tuple[str, int]:
    if frames.shape[1] != 3:
        first = frames[:, 0]
        low, high = float(first.min()), float(first.max())
        return _sheet(first, low, high if high > low else low + 1, _GREY, size)
    small = _shrunk(frames, size)
    low, high = float(small.min()), float(small.max())
    levels = ((small - low) / ((high - low) or 1.0) * 255).clamp(0, 255).round().to(torch.uint8)
    alpha = (_inside(small.shape[-1]) * 255).to(torch.uint8).expand(len(small), 1, -1, -1)
    return address(png(_tiled(torch.cat([levels, alpha], dim=1)))), int(small.shape[-1])


def _shrunk(frames: Tensor, size: int) -> Tensor:
    if frames.shape[-1] <= size:
        return frames
    return functional.interpolate(frames, (size, size), mode="bilinear", antialias=True)


def _inside(size: int) -> Tensor:
    line = torch.arange(size) - (size - 1) / 2
    return line[:, None] ** 2 + line**2 <= (size / 2 + 1) ** 2


def _tiled(frames: Tensor) -> Bytes:
    """Frames ``[n, c, s, s]`` in rows of `COLUMNS`, as ``[h, w, c]``."""
    count, channels, side, _ = frames.shape
    rows = math.ceil(count / COLUMNS)
    padded = torch.zeros(rows * COLUMNS, channels, side, side, dtype=torch.uint8)
    padded[:count] = frames
    grid = padded.reshape(rows, COLUMNS, channels, side, side).permute(0, 3, 1, 4, 2)
    return grid.reshape(rows * side, COLUMNS * side, channels).numpy()


def _palette(colours: Sequence[str]) -> Bytes:
    """255 colours between the given ones, and one more that is never seen."""
    given = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours], np.float64)
    places = np.linspace(0, len(given) - 1, 255)
    mixed = [np.interp(places, np.arange(len(given)), given[:, c]) for c in range(3)]
    return np.concatenate([np.stack(mixed, axis=1).round(), np.zeros((1, 3))]).astype(np.uint8)


def address(content: bytes) -> str:
    """A PNG file as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")
