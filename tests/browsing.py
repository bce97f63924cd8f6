"""Looking at a page in a real browser: its width, what sticks out, and how large its text is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def started(profile: Path) -> Iterator[Any]:
    """A Chromium that ends with the tests; they are skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with chromedriver found: the page was not opened in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def resize(browser: Any, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def assert_nothing_overflows(browser: Any, width: int) -> None:
    resize(browser, width)
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # Only tables may be wider than the page, inside their own scroll boxes.
    beyond = browser.execute_script(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&"
        " e.getBoundingClientRect().right > window.innerWidth + 1).map(e => e.outerHTML)"
    )
    assert beyond == []


def assert_charts_are_legible(browser: Any, width: int) -> None:
    """The text of every chart has at least 11 pixels, inside the chart."""
    resize(browser, width)
    sizes, inside = browser.execute_script(
        "const shown = [...document.querySelectorAll('.chart text')].filter("
        " e => getComputedStyle(e).display !== 'none');"
        "const about = e => { const chart = e.closest('.chart');"
        " const box = chart.getBoundingClientRect(), r = e.getBoundingClientRect();"
        " const scale = box.width / chart.viewBox.baseVal.width;"
        " return [scale * parseFloat(getComputedStyle(e).fontSize),"
        " r.left >= box.left - 1 && r.right <= box.right + 1 && r.bottom <= box.bottom + 1] };"
        "const found = shown.map(about);"
        "return [found.map(f => f[0]), found.every(f => f[1])]"
    )
    assert min(sizes) >= 11
    assert inside


def assert_dark_mode_has_other_colours(browser: Any) -> None:
    def background(scheme: str) -> str:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        found: str = browser.find_element("tag name", "body").value_of_css_property(
            "background-color"
        )
        return found

    assert background("dark") != background("light")
