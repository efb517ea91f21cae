"""The site in a real browser: no error, no request, sorting, themes, narrow screens."""

import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from assay.bench.report import Page, write_site

pytestmark = pytest.mark.slow
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if not found:
        reason = "needs Chromium: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory, new_method, sample, new_hostile, hostile_text):
    """A site with a real result, a hostile one, and a method never run."""
    svg = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 200" width="300" height="200" onload="alert(1)">
      <script>alert(1)</script><image href="https://example.org/x.png" width="9" height="9"/>
      <rect width="300" height="200" fill="#ffffff"/></svg>"""
    folder = tmp_path_factory.mktemp("browser")
    pages = [
        Page(new_method(folder, "digits"), sample.result, sample.figures, "records"),
        Page(new_method(folder, "hostile", name=hostile_text, summary=hostile_text), new_hostile(), {"digits.svg": svg}),
        Page(new_method(folder, "letters", area="zoo")),
    ]
    return write_site(pages, folder / "site").parent


@pytest.fixture
def visit(browser, site):
    """Opens a page of the site; in the end there must have been no error, no dialog and no request."""
    contexts, trouble = [], []

    def open_page(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append("a script of the result ran"), dialog.dismiss()))
        page.on("requestfailed", lambda request: trouble.append(f"failed: {request.url[:100]}"))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or trouble.append(request.url[:100]))
        page.goto((site / f"{name}.html").as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert trouble == []


def column_of(page, index):
    return page.locator(f"#arms tbody tr > :nth-child({index + 1})").all_inner_texts()


def brightness(locator):
    image = Image.open(io.BytesIO(locator.screenshot())).convert("L")
    return float(np.median(np.asarray(image)))


@pytest.mark.parametrize("name", ["index", "digits", "hostile", "letters", "compare-training"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pages_load_whole_and_never_wider_than_the_screen(visit, name, width):
    page = visit(name, width)
    assert page.locator("h1").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for details in page.locator("details").all():
        details.evaluate("e => { e.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for image in page.locator("img").all():
        assert image.evaluate("e => e.complete && e.naturalWidth > 50 && e.naturalHeight > 50")
        box = image.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 100


def test_tables_sort_by_click_and_by_keyboard(visit):
    page = visit("digits")
    original = column_of(page, 0)
    header = page.locator("#arms thead th", has_text="final_loss")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    assert column_of(page, 0)[:3] == ["adam", "momentum", "sgd"]
    assert set(column_of(page, 0)[3:]) == {"broken", "runaway", "absent"}  # not measured: last

    header.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    assert column_of(page, 0)[:3] == ["sgd", "momentum", "adam"]
    page.keyboard.press("Space")
    assert header.get_attribute("aria-sort") is None
    assert column_of(page, 0) == original

    first = page.locator("#arms thead th").first
    first.get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert column_of(page, 0) == sorted(original)
    assert page.locator("#arms th[aria-sort]").count() == 1


def test_infinite_values_sort_as_the_largest(visit):
    page = visit("hostile")
    page.locator("#arms thead th", has_text="loss").get_by_role("button").click()
    arms = column_of(page, 0)
    assert arms[-1] == "arm-05"  # not measured
    assert arms[-2] == "arm-04"  # infinite
    assert arms[0] == "arm-14"


def test_the_index_filters_by_words_and_by_verdict(visit):
    page = visit("index")
    shown = page.locator("tr.method:visible")
    assert shown.count() == 3
    page.get_by_label("Filter").fill("LETTERS zoo")
    assert shown.count() == 1
    assert page.locator("#shown").inner_text() == "1 of 3"
    page.get_by_label("Filter").fill("nothing like it")
    assert page.get_by_text("No method matches.").is_visible()
    page.get_by_label("Filter").fill("")
    page.get_by_role("button", name="holds").click()
    assert shown.count() == 1
    assert "Digits" in shown.first.inner_text()


def test_light_and_dark_are_light_and_dark_and_figures_stay_readable(visit):
    for scheme in ("light", "dark"):
        page = visit("digits", scheme=scheme)
        red, green, blue = page.evaluate(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number)"
        )
        assert (max(red, green, blue) < 60) == (scheme == "dark")
        own, study = page.locator("#curves img").first, page.locator("#figures .picture").first
        assert (brightness(own) < 60) == (scheme == "dark")  # our curves follow the theme
        assert brightness(study) > 200  # a study's figure is drawn for white paper, and gets it
        pixels = np.asarray(Image.open(io.BytesIO(own.screenshot())).convert("L"), dtype=float)
        assert np.abs(pixels - np.median(pixels)).max() > 100  # ink that stands out


def test_verdicts_are_words_and_marks_not_colours_alone(visit):
    page = visit("digits")
    texts = page.locator("#claims .chip").all_inner_texts()
    assert texts == ["✓ holds", "? inconclusive", "✗ fails", "· reported", "✓ holds"]


def test_paper_shows_everything(visit):
    page = visit("digits")
    assert not page.locator("#lost pre").first.is_visible()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#lost pre").first.is_visible()
    assert not page.locator(".sections").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert not page.locator("#lost pre").first.is_visible()
