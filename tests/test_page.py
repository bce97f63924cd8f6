"""The page: what it holds, and that it works in a real browser, from a file and with no network."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import browsing
from econv import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupPool2d,
    LiftConv2d,
    VectorConv2d,
    lab,
)
from econv.page import (
    LARGEST,
    _chart,
    _figure,
    _sheet,
    _table,
    _verdict,
    _why,
    page,
    png,
    write_page,
)
from econv.testing import smooth_field

HOSTILE = '</script><script>alert(1)</script>&"{{data}}'


def classifier(channels: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        LiftConv2d(channels, 2, "p8"),
        GroupBatchNorm2d(2, "p8"),
        nn.ReLU(),
        Downsample2d(),
        GroupConv2d(2, 4, "p8"),
        GroupPool2d("p8"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    nn.init.normal_(model[-1].weight, std=3.0)
    return lab.calibrate(model, images(channels))


def images(channels: int = 1) -> torch.Tensor:
    return smooth_field(48, channels, 3.0, batch=2, dtype=torch.float32)


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def decoded(address: str) -> np.ndarray:
    from matplotlib.image import imread

    content = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    return imread(io.BytesIO(content), format="png")


@pytest.fixture(scope="module")
def text() -> str:
    return page(classifier(), images(), title=HOSTILE, classes=["cat", "dog", HOSTILE])


# What the page holds


def test_png_files_decode_to_the_same_pixels():
    random = np.random.default_rng(0)
    colours = random.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    address = "data:image/png;base64," + base64.b64encode(png(colours)).decode()
    np.testing.assert_allclose(decoded(address) * 255, colours, atol=1e-4)
    palette = random.integers(0, 256, (256, 3), dtype=np.uint8)
    indices = random.integers(0, 256, (6, 3), dtype=np.uint8)
    address = "data:image/png;base64," + base64.b64encode(png(indices, palette, 255)).decode()
    found = decoded(address) * 255
    np.testing.assert_allclose(found[..., :3][indices < 255], palette[indices][indices < 255])
    assert (found[..., 3][indices == 255] == 0).all()
    assert (found[..., 3][indices < 255] == 255).all()


def test_the_numbers_are_those_of_the_laboratory(text):
    data = data_of(text)
    model, x = classifier(), lab.windowed(images()[:1])
    curve = lab.angle_curve(model[:6], x, angles=[45, 90])
    assert data["angles"][9] == 45
    # The page turns maps back and the curve turns them there: alike but for interpolation.
    assert data["errors"]["ours"][9] == pytest.approx(curve.errors[0], rel=0.2)
    assert data["errors"]["ours"][18] < 1e-5
    assert data["errors"]["twin"][18] > 0.1
    scores = model(x).softmax(dim=1)[0].tolist()
    assert data["probabilities"]["ours"][0] == pytest.approx(scores, abs=1e-4)
    assert data["own"][9]
    assert not data["own"][8]
    table = lab.layer_errors(model, lab.windowed(images()))
    assert f"<td>{table.layers[0].errors[0]:.1e}</td>" in text


def test_the_shares_of_the_sources_are_shown(text):
    sources = lab.error_sources(classifier(), images())
    assert re.search(r'id="share-sampling">[^<]+<span class="soft">estimate</span>', text)
    assert "not equivariant" not in text
    for name in ("sampling", "padding", "stencil"):
        shown = re.search(rf'id="share-{name}">([\d.]+) %', text)[1]
        assert float(shown) == pytest.approx(100 * getattr(sources, name), abs=0.06)


def test_every_sheet_has_a_frame_for_every_angle(text):
    data = data_of(text)
    assert len(data["angles"]) == 72
    names = {"input", "ours", "ours-difference", "twin", "twin-difference"}
    assert set(data["sheets"]) == names
    for sheet in data["sheets"].values():
        pixels = decoded(sheet["png"])
        assert pixels.shape[:2] == (8 * sheet["size"], 9 * sheet["size"])
        first, later = (
            pixels[: sheet["size"], k * sheet["size"] :][:, : sheet["size"]] for k in (0, 5)
        )
        assert not np.array_equal(first, later)


def test_no_string_of_the_user_becomes_markup(text):
    assert "<script>alert" not in text
    assert html.escape(HOSTILE) in text
    assert data_of(text)["predicted"]["ours"][0] in ("cat", "dog", HOSTILE)
    assert text.count("<script") == 2


def test_no_class_can_end_the_script_that_holds_the_data():
    text = page(classifier(), images()[:1], classes=[HOSTILE] * 3)
    assert text.count("<script") == text.count("</script>") == 2
    assert set(data_of(text)["predicted"]["ours"]) == {HOSTILE}
    assert data_of(text)["probabilities"]["ours"]


def test_names_of_layers_and_kinds_do_not_become_markup():
    table = lab.layer_errors(classifier(), images()[:1])
    entry = dataclasses.replace(table.layers[0], name="<b>&", type="<i>", kind="<u>")
    made = _table(dataclasses.replace(table, layers=(entry,)))
    assert "&lt;b&gt;&amp; &lt;i&gt;" in made
    assert "<td>&lt;u&gt;</td>" in made
    assert not re.search(r"<[biu]>", made)
    broken = dataclasses.replace(table, unknown=("<s>",))
    assert "<s>" not in _verdict(broken)
    assert "&lt;s&gt;" in _verdict(broken)


def test_the_table_marks_what_should_be_exact_and_is_not():
    table = lab.layer_errors(classifier(), images()[:1])
    grid, off = table.group.grid_symmetries[1], 1
    places = {element: table.elements.index(element) for element in (grid, off)}

    def cells(**errors: float) -> list[str]:
        row = list(table.layers[0].errors)
        for name, error in errors.items():
            row[places[grid if name == "grid" else off]] = error
        entry = dataclasses.replace(table.layers[0], errors=tuple(row))
        made = _table(dataclasses.replace(table, layers=(entry,)))
        return re.findall(r"<td( class=high)?>", made.split("</thead>")[1].split("</tr>")[0])[1:]

    assert [i for i, c in enumerate(cells(grid=2e-4, off=0.5)) if c] == [places[grid]]
    assert not any(cells(grid=1e-4, off=0.5))
    assert any(cells(grid=math.nan))
    heads = re.findall(r'<th scope="col">([^<]*)</th>', _table(table))[2:]
    exact = [i for i, element in enumerate(table.elements) if element in (0, 2, 4, 6)]
    assert [i for i, head in enumerate(heads) if head.endswith("∗")] == exact


def test_figures_are_rounded_and_what_was_not_compared_is_a_dash():
    assert [_figure(e) for e in (None, 0.0, 9e-13, 1e-12, 0.0123)] == [
        "–",
        "0",
        "0",
        "1.0e-12",
        "1.2e-02",
    ]


def test_the_chart_has_every_error_at_its_height_and_the_groups_angles():
    curves = {"ours": [0.0, 1e-7, 1e-3, 1.0], "twin": [10.0, 1.0, math.inf, math.nan]}
    results = {name: SimpleNamespace(errors=errors) for name, errors in curves.items()}
    chart = _chart(results, [True, False, True, False])
    lines = re.findall(r'<polyline points="([^"]+)" style="stroke:var\(--(\w+)\)"', chart)
    drawn = {
        name: [tuple(map(float, point.split(","))) for point in points.split()]
        for points, name in lines
    }
    heights = {
        label: float(y) - 4
        for y, label in re.findall(r'x="106" y="([\d.]+)" text-anchor="end">([^<]+)', chart)
    }
    # From 0° to 360°, where the first comes again.
    assert [x for x, _ in drawn["ours"]] == pytest.approx([112 + 160 * k for k in range(5)])
    ours = [y for _, y in drawn["ours"]]
    wanted = [heights[name] for name in ("≤ 1e-7", "≤ 1e-7", "1e-3", "1", "≤ 1e-7")]
    assert ours == pytest.approx(wanted, abs=0.1)
    assert heights["1e1"] < heights["1"] < heights["1e-3"] < heights["≤ 1e-7"]
    assert [y for _, y in drawn["twin"]] == pytest.approx(
        [heights[name] for name in ("1e1", "1", "1e1", "1e1", "1e1")], abs=0.1
    )
    own = re.findall(r'class="own" x1="([\d.]+)"', chart)
    assert [float(x) for x in own] == [112.0, 432.0]
    assert re.findall(r'text-anchor="middle">(\d+)°', chart) == [str(a) for a in range(0, 361, 45)]


def test_sheets_have_each_frame_in_its_place_and_colours_that_rise():
    frames = torch.arange(11.0)[:, None, None].expand(11, 8, 8) + torch.linspace(0, 0.5, 8)
    sheet, side = _sheet(frames, 0.0, 10.5, ("#000000", "#ffffff"), 8)
    pixels = decoded(sheet)[..., 0]
    assert pixels.shape == (2 * side, 9 * side)
    for number, frame in enumerate(frames):
        row, column = divmod(number, 9)
        part = pixels[row * side :, column * side :][:side, :side]
        np.testing.assert_allclose(part[4], (frame / 10.5)[4].numpy(), atol=1 / 250)
    clipped = decoded(_sheet(frames[:1] * 0 + 99, 0.0, 1.0, ("#000000", "#ffffff"), 8)[0])
    assert clipped[4, 4, 0] == 1.0


def test_bars_stand_where_the_probabilities_at_rest_are(text):
    at_rest = [row[0] for row in data_of(text)["probabilities"].values()]
    marks = [float(x) for x in re.findall(r'<b style="left:([\d.]+)%"></b>', text)]
    assert marks == pytest.approx(
        [100 * p for pair in zip(*at_rest, strict=True) for p in pair], abs=0.01
    )


def test_the_page_refers_to_nothing_outside(text):
    assert len(text.encode()) < LARGEST
    assert not re.search(r"https?:", text)
    assert "default-src 'none'" in text
    assert not re.search(
        r"\{\{\w+\}\}", text.replace(html.escape(HOSTILE), "").replace("{{data}}", "")
    )


def test_colour_images_and_many_classes_fit():
    torch.manual_seed(0)
    model = classifier(3)
    model[-1] = nn.Linear(4, 200)
    text = page(model, images(3))
    data = data_of(text)
    assert decoded(data["sheets"]["input"]["png"]).shape[2] == 4
    assert len(data["probabilities"]["ours"][0]) == 10
    assert "likeliest of 200 classes" in text
    assert len(text.encode()) < LARGEST


@pytest.mark.parametrize(
    "model",
    [
        LiftConv2d(1, 2, "p8"),
        nn.Sequential(LiftConv2d(1, 2, "p6m"), VectorConv2d(2, 1, "p6m")),
        nn.Sequential(LiftConv2d(1, 2, "p3")),
    ],
    ids=["layer", "vectors", "no grid symmetry"],
)
def test_models_without_scores_have_a_page_without_probabilities(model):
    text = page(model, images()[:1])
    assert data_of(text)["probabilities"] is None
    assert "Class probabilities" not in text


def test_the_page_names_the_broken_layer_and_what_is_unknown():
    model = nn.Sequential(
        LiftConv2d(1, 2, "p8", stride=2), nn.Flatten(), nn.Linear(16 * 24 * 24, 2)
    )
    text = page(model, images())
    assert "is that of <code>0</code>. 0 (LiftConv2d) has a stride" in text
    assert "1 (Flatten), 2 (Linear)" in text
    assert "class=high" in text


def test_an_output_that_is_not_exact_is_said():
    model = nn.Sequential(LiftConv2d(1, 2, "p4"), nn.Flatten(), nn.Linear(8 * 48 * 48, 2))
    text = page(model, images())
    assert "is that of <code>output</code>. One of these breaks equivariance: 1 (Flatten)" in text
    assert "Every layer is exact" not in text


def test_rounding_is_not_explained(text):
    exact = page(nn.Sequential(LiftConv2d(1, 2, "p4")), images())
    assert "Nothing to explain: exact to rounding" in exact
    assert "share-sampling" not in exact
    assert "Nothing to explain" not in text


def test_why_and_what_would_help_are_on_the_page_where_they_are_known(text):
    model, x = classifier(), lab.windowed(images()[:1])
    assert "what would help" not in text
    answers = {
        "lie": lab.lie_derivatives(model, x),
        "split": lab.split_error(model, x),
        "advice": lab.advice(model[:6], x),
        "sizes": lab.sizes(model, x),
    }
    whole = page(model, images()[:1], **answers)
    assert "Why, and what would help</h2>" in whole
    relu = answers["lie"].layers[2]
    assert f'<th scope="row">2 ReLU</th><td>{relu.own:.1e}</td><td>{relu.total:.1e}</td>' in whole
    first = answers["split"].sources[0]
    assert f'<th scope="row">{first.name}</th><td>{100 * first.share:.1f} %</td>' in whole
    best = answers["advice"].suggestions[0]
    row = f"{html.escape(best.change)}</th><td>{best.before:.1e}</td><td>{best.after:.1e}</td>"
    assert row in whole
    assert lab.size_verdict(answers["sizes"]) in whole
    only = _why(None, None, None, answers["sizes"])
    assert 'id="lie"' not in only
    assert lab.size_verdict(answers["sizes"]) in only


def test_a_layer_that_is_not_equivariant_is_named_instead_of_sampling():
    model = nn.Sequential(LiftConv2d(1, 2, "p8"), nn.Conv2d(16, 16, 1), GroupConv2d(2, 2, "p8"))
    text = page(model, images())
    share = re.search(r'id="share-broken">([\d.]+) %', text)[1]
    assert float(share) > 10
    assert "<code>1 (Conv2d)</code> does not turn with the image" in text
    assert "share-sampling" not in text


def test_the_page_says_that_images_are_faded(text):
    assert "Table and chart use images that are faded to zero outside of the inscribed disc" in text


def test_a_twin_with_other_names_is_refused():
    twin = nn.Sequential()
    twin.add_module("other", lab.plain_twin(classifier()))
    with pytest.raises(
        ValueError, match="twin with modules of the same names; it has no layer '5'"
    ):
        page(classifier(), images(), twin=twin)


def test_a_twin_of_other_widths_shows_a_channel_of_its_own():
    model = classifier()
    twin = lab.plain_twin(model)
    twin[0] = nn.Conv2d(1, 5, 3, padding=1)
    twin[1] = nn.BatchNorm2d(5)
    twin[4] = nn.Conv2d(5, 32, 3, padding=1)
    text = page(model, images()[:1], twin=twin, layer="2")
    assert "Map after layer <code>2</code>" in text
    assert "of one field, of the twin one channel" in text
    counts = [sum(p.numel() for p in network.parameters()) for network in (model, twin)]
    assert (
        f"has {counts[0]:,} parameters, its twin with ordinary convolutions {counts[1]:,}" in text
    )
    assert "untrained" not in text


def test_the_untrained_twin_is_said_to_be_one(text):
    assert "it is untrained" in text
    assert "of the twin one channel" not in text


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="the table has no layer '77'"):
        page(classifier(), images()[:1], layer="77")


def test_features_are_no_picture():
    with pytest.raises(ValueError, match="reads regular features"):
        page(GroupConv2d(2, 2, "p4"), smooth_field(17, 8, dtype=torch.float32))


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="square images"):
        page(classifier(), torch.zeros(1, 1, 16, 20))
    with pytest.raises(ValueError, match="names of 3 classes; got 2"):
        page(classifier(), images(), classes=["a", "b"])
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="no layer that names one"):
        write_page(path, nn.Conv2d(1, 1, 3), images())
    assert path.read_text() == "old"


def test_the_model_is_left_as_it_was():
    model = classifier().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    page(model, images()[:1])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# In a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from browsing.started(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def opened(browser, tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    browsing.resize(browser, 1200)
    browser.get(path.as_uri())
    wait(browser, "return document.documentElement.dataset.ready === 'yes'")
    return browser


def wait(browser, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda b: b.execute_script(script))


def seen(browser) -> dict[str, str]:
    """The picture on every canvas, and the numbers."""
    pictures = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('canvas')]"
        ".map(canvas => [canvas.id, canvas.toDataURL()]))"
    )
    names = ("degrees", "ours-error", "twin-error", "summary", "whose")
    return pictures | {name: browser.find_element("id", name).text for name in names}


def test_the_arrow_keys_turn_the_picture_and_the_numbers(opened):
    from selenium.webdriver.common.keys import Keys

    slider = opened.find_element("id", "angle")
    opened.find_element("tag name", "body").send_keys(Keys.TAB)
    assert opened.switch_to.active_element == slider  # the first stop of the Tab key
    slider.send_keys(Keys.HOME)
    before = seen(opened)
    assert before["degrees"] == "0°"
    assert before["ours-error"] == "0"
    for _ in range(9):
        slider.send_keys(Keys.ARROW_RIGHT)
    after = seen(opened)
    assert after["degrees"] == "45°"
    assert after["whose"] == "an angle of p8"
    unchanged = [name for name in before if before[name] == after[name]]
    assert unchanged == []
    slider.send_keys(Keys.HOME)
    assert seen(opened) == before


def test_the_numbers_shown_are_those_of_the_page(opened, text):
    from selenium.webdriver.common.keys import Keys

    slider = opened.find_element("id", "angle")
    slider.send_keys(Keys.END)
    assert seen(opened)["degrees"] == "355°"
    errors = data_of(text)["errors"]
    assert float(seen(opened)["twin-error"]) == pytest.approx(errors["twin"][71], rel=0.01)
    shown = opened.find_element("css selector", "#ours-0 span").text
    wanted = 100 * data_of(text)["probabilities"]["ours"][71][0]
    assert float(shown.removesuffix(" %")) == pytest.approx(wanted, abs=0.06)


def test_the_page_opens_at_an_angle_that_shows_something(opened, text):
    shown = seen(opened)
    assert shown["degrees"] == "45°"
    assert shown["whose"] == "an angle of p8"
    assert float(shown["twin-error"]) > float(shown["ours-error"]) > 1e-4


@pytest.mark.parametrize(("group", "start"), [("p4", 18), ("p6m", 12), ("p16", 9), ("p1m", 9)])
def test_the_first_angle_is_one_of_the_group(group, start):
    text = page(nn.Sequential(LiftConv2d(1, 1, group)), images()[:1])
    assert f'max="71" step="1" value="{start}"' in text


def test_the_chart_reaches_down_to_rounding(text):
    assert ">≤ 1e-7</text>" in text
    ours = re.search(r'<polyline points="([^"]+)" style="stroke:var\(--ours\)"', text)[1]
    heights = [float(point.split(",")[1]) for point in ours.split()]
    errors = data_of(text)["errors"]["ours"]
    assert 1e-8 < errors[18] < 1e-5  # a quarter turn in float32: not the floor of the others
    assert heights[18] > heights[9] + 50


def test_dragging_turns_it_too(opened):
    from selenium.webdriver import ActionChains

    before = seen(opened)
    slider = opened.find_element("id", "angle")
    ActionChains(opened).move_to_element(slider).click().perform()
    after = seen(opened)
    assert after["degrees"] in ("175°", "180°", "185°")
    assert after["input"] != before["input"]


def test_focus_is_visible_and_changes_are_announced(opened):
    from selenium.webdriver.common.keys import Keys

    slider = opened.find_element("id", "angle")
    slider.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert slider.value_of_css_property("outline-style") == "solid"
    assert slider.accessible_name == "Turn the input"
    assert slider.get_attribute("aria-valuetext") == "5°"
    assert opened.find_element("id", "summary").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("width", [320, 375, 768, 1200])
def test_nothing_overflows(opened, width):
    browsing.assert_nothing_overflows(opened, width)


@pytest.mark.parametrize("width", [375, 480, 768, 1200])
def test_the_text_of_the_chart_is_legible_and_inside(opened, width):
    browsing.assert_charts_are_legible(opened, width)


def test_dark_mode_changes_the_colours(opened):
    browsing.assert_dark_mode_has_other_colours(opened)


def requested(browser) -> list[str]:
    """The addresses that were asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]


def test_no_error_in_the_console_and_no_request_beyond_the_file(opened):
    from selenium.webdriver.common.keys import Keys

    requested(opened)
    opened.refresh()
    wait(opened, "return document.documentElement.dataset.ready === 'yes'")
    opened.find_element("id", "angle").send_keys(Keys.ARROW_RIGHT)
    assert opened.get_log("browser") == []
    addresses = requested(opened)
    assert addresses
    assert all(address.startswith(("file:", "data:image/png")) for address in addresses)


OUTSIDE = "http://127.0.0.1:9/x.png"  # nobody listens on the discard port
ASK = (
    "const image = new Image(); image.onerror = () => window.refused = true;"
    f"image.src = '{OUTSIDE}'"
)


def test_the_page_itself_forbids_requests(opened):
    opened.execute_script(ASK)
    wait(opened, "return window.refused === true")
    assert "Content Security Policy" in opened.get_log("browser")[0]["message"]


def test_requests_and_console_errors_of_another_page_are_seen(browser):
    browser.get("data:text/html,<title>another</title>")
    requested(browser)
    browser.execute_script(ASK)
    wait(browser, "return window.refused === true")
    assert OUTSIDE in requested(browser)
    assert browser.get_log("browser") != []
