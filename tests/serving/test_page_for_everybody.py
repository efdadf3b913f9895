"""The page in real Chromium: it keeps what it was told, serves keyboards and screen readers, says what fails, and runs nobody's script."""

import re
from pathlib import Path

import pytest
from page_helpers import IMAGE, SCRIPT, TEXT, choose, generate, learn, read, tokens, write
from serving_helpers import in_thread

from transformer_xl.serving import page_files
from transformer_xl.serving.page_files import PAGE

KEY = "a-key-that-only-this-test-knows"


def background(page):
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


# Keeping


def test_a_reload_keeps_text_settings_run_and_theme(page):
    settings = {"temperature": "0.7", "top_p": "0.9", "top_k": "7", "max_tokens": "33", "seed": "12"}
    write(page, run="speaking", memory="both")
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.click("#theme")
    page.reload()
    page.locator("#run option").first.wait_for(state="attached")
    assert {name: page.input_value(f"#{name}") for name in settings} == settings
    assert (page.input_value("#text"), page.input_value("#run")) == (TEXT, "speaking")
    assert page.locator("[name=memory][value=both]").is_checked()
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"
    assert background(page) < 150


def test_it_is_light_or_dark_as_the_system_is_until_switched(open_page, page_server):
    light, dark = (open_page(page_server.address, color_scheme=scheme) for scheme in ("light", "dark"))
    assert background(light) > 600 > 150 > background(dark)
    dark.click("#theme")
    assert background(dark) > 600


# Everybody


def test_tokens_are_one_stop_of_the_keyboard_and_arrows_walk_them(page):
    read(page)
    tokens(page).first.focus()
    for key, place in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowDown", 22), ("ArrowUp", 1)]:
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.place") == str(place)
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.place") == str(len(TEXT) - 1)
    assert page.locator("[role=option][tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    page.locator("#attention").wait_for()
    assert page.evaluate("document.activeElement.dataset.place") == str(len(TEXT) - 1)


def test_every_control_has_a_name_and_the_live_region_is_not_flooded(page):
    page.evaluate(
        """() => {
            window.changes = 0;
            new MutationObserver(() => window.changes++).observe(
                document.getElementById("status"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    generate(page, length=200)
    assert 2 <= page.evaluate("window.changes") <= 4
    choose(page, 5)
    controls = page.locator("button, input, select, textarea, [role=slider], [role=listbox], [role=meter]")
    nameless = controls.evaluate_all(
        """all => all.filter(one => one.checkVisibility()
            && !(one.ariaLabel || one.textContent.trim() || [...(one.labels ?? [])].some(l => l.textContent.trim())))
            .map(one => one.id || one.className)"""
    )
    assert nameless == []


@pytest.mark.parametrize("width", [360, 768, 1280, 2200])
def test_nothing_sticks_out_at_any_width(open_page, page_server, width):
    page = open_page(page_server.address, viewport={"width": width, "height": 800})
    read(page, TEXT + "x" * 400, memory="both")
    choose(page, 20)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    learn(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# What goes wrong


def test_what_goes_wrong_is_said_in_one_sentence(open_page, page_server):
    def problem(sentence):
        page.locator("#problem", has_text=re.compile(f"^{re.escape(sentence)}")).wait_for()

    page = open_page(page_server.address, failing=["429", "ERR_FAILED"])
    write(page, "")
    page.click("#read")
    problem("There is no text to read; write some first.")
    write(page)
    page.fill("#temperature", "-1")
    page.click("#generate")
    problem("Temperature: ")
    busy = {"error": {"message": "The server is busy.", "type": "rate_limit", "code": None}}
    page.route("**/v1/score", lambda route: route.fulfill(status=429, headers={"Retry-After": "2"}, json=busy))
    page.click("#read")
    problem("The server is busy. Try again in 2 s.")
    page.unroute("**/v1/score")
    page.route("**/v1/score", lambda route: route.abort())
    page.click("#read")
    problem("The server does not answer; is txl serve still running?")
    page.unroute("**/v1/score")
    read(page)
    assert page.locator("#problem").is_hidden()


def test_a_server_with_a_key_asks_for_it_and_only_the_tab_keeps_it(open_page, trained_run):
    with in_thread(trained_run, key=KEY) as running:
        page = open_page(running.address, failing=["401"])
        page.locator("#key-form").wait_for()
        for key in ("wrong", KEY):
            page.locator("#problem").wait_for()
            page.fill("#key", key)
            page.keyboard.press("Enter")
        read(page)
        assert page.locator("#key-form").is_hidden()
        page.reload()
        read(page)
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")


# Harm


def test_script_in_the_prompt_and_in_generated_text_does_not_run(page):
    """W12, with a run whose words are script."""
    prompt = f"{SCRIPT} {IMAGE} </textarea>{SCRIPT}<svg/onload=window.ran=1>"
    generate(page, prompt, length=60, run="speaking", memory="both")
    written = "".join(page.locator(".written[role=option]").all_text_contents())
    assert SCRIPT in written
    assert IMAGE in written
    choose(page, 30)
    tokens(page).nth(31).hover()
    page.locator(".keep").first.click()
    page.reload()
    page.locator("#run option").first.wait_for(state="attached")
    assert page.input_value("#text").startswith(prompt)
    assert page.input_value("#text").count(SCRIPT) > 2
    page.click("#read")
    page.locator("#status", has_text=re.compile("^Read ")).wait_for()
    assert page.evaluate("window.ran") is None
    assert page.locator("main script, main img, main svg[onload], form script, form img, form svg").count() == 0


def test_the_policy_stops_script_that_got_in_all_the_same(open_page, page_server):
    """The second lock: were text ever inserted as HTML, the browser would still refuse to run it."""
    page = open_page(page_server.address, failing=["Content Security Policy"])
    page.evaluate(
        """() => {
            const inline = document.createElement("script");
            inline.textContent = "window.ran = 1";
            const image = document.createElement("img");
            image.setAttribute("onerror", "window.ran = 1");
            const failed = new Promise((done) => image.addEventListener("error", done));
            image.src = "data:,";
            document.body.append(inline, image);
            return failed;
        }"""
    )
    assert page.evaluate("window.ran") is None


def test_the_page_holds_no_way_to_insert_html_and_no_address_outside():
    files = {path.name: path.read_text() for path in (Path(page_files.__file__).parent / "page").iterdir()}
    assert set(files) == {name for name, _ in PAGE.values()}
    insertion = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc|\beval\b|new Function"
    for name, text in files.items():
        assert not re.search(insertion, text), name
        addresses = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", files["index.html"])
