"""The page as people meet it: real Chromium, a server of the test's own, nothing else on the network.

A console error, a violation of the content security policy, or a request that leaves this machine fails whichever test saw it.
"""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import transformer_xl
from small_run import SMALL
from transformer_xl.cli import main
from transformer_xl.data.store import open_store
from transformer_xl.training import train

api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright: pip install playwright")

PAGE = Path(transformer_xl.__file__).parent / "serving" / "page"
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TEXT = "def decode(self, s):\n    return self.scan_once(s, idx=0)\n"
SCRIPT = "<script>window.ran=1</script>"
IMAGE = "<img/src=x/onerror=window.ran=1>"

in_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="the page's tests need Debian's chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def speaking_run(tmp_path_factory):
    """A run whose words are script: whatever it writes is an attempt to run something."""
    folder = tmp_path_factory.mktemp("speaking")
    (folder / "text.txt").write_text(f"{SCRIPT} {IMAGE} and {SCRIPT}\n" * 300)
    assert main(["prepare", str(folder / "text.txt"), "--tokenizer", "word", "--out", str(folder / "store")]) == 0
    store = open_store(folder / "store")
    model = replace(SMALL.model, vocabulary=store.manifest.vocabulary_size)
    config = replace(SMALL, model=model, training=replace(SMALL.training, validation_tokens=0))
    train(config, store=store, folder=folder / "speaking", command="txl train speaking")
    return folder / "speaking"


@contextmanager
def serving(*runs, key=None):
    """`txl serve` as a process of its own on a free loopback port, until it is no longer needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "TXL_API_KEY"}
    environment |= {"TXL_API_KEY": key} if key else {}
    source = str(Path(transformer_xl.__file__).parents[1])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    command = [sys.executable, "-m", "transformer_xl", "serve", *map(str, runs), "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            wait_until_it_answers(address, process)
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=20)


def wait_until_it_answers(address, process):
    for _ in range(600):
        if process.poll() is not None:
            raise AssertionError(process.stderr.read().decode())
        try:
            with urllib.request.urlopen(f"{address}/health") as answer:
                assert json.load(answer)["status"] == "ok"
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not answer within a minute")


@pytest.fixture(scope="module")
def server(trained_run, speaking_run, recurrent_run):
    with serving(trained_run, speaking_run, recurrent_run) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, request):
    """Opens the page of a server. `failing` are statuses that a test brings about itself, which Chromium logs as errors."""
    contexts, wrong = [], []

    def opened(address, *, failing=(), **options):
        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda one: wrong.append(one.url) if not one.url.startswith((address, "data:")) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: hear(message, failing))
        page.goto(address)
        return page

    def hear(message, failing):
        if message.type in ("error", "warning") and not any(str(status) in message.text for status in failing):
            wrong.append(message.text)

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(open_page, server):
    page = open_page(server)
    page.locator("#run option").first.wait_for(state="attached")
    page.fill("#text", TEXT)
    return page


def ask(server, path, **body):
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(server + path, json.dumps(body).encode(), headers), timeout=20
    ) as answer:
        return json.load(answer)


def read(page):
    page.click("#read")
    page.locator("#status", has_text=re.compile("^Read ")).wait_for()


def generate(page, *, length, seed=3):
    page.fill("#max_tokens", str(length))
    page.fill("#seed", str(seed))
    page.click("#generate")
    page.locator("#status", has_text=re.compile("^Wrote ")).wait_for()


def tokens(page):
    return page.locator("[role=option]")


def choose(page, place):
    tokens(page).nth(place).click()
    page.locator("#attention").wait_for()


def listed(page):
    """The rows of the table of what was looked at most: text, distance, share, memory or segment."""
    return page.locator("#most tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(c => c.textContent))"
    )


# Reading and writing


@in_chromium
def test_text_is_shown_token_by_token_with_the_surprise_the_server_gives(page, server):
    read(page)
    scored = ask(server, "/v1/score", model="small", text=TEXT, memory="on")["tokens"]
    assert tokens(page).count() == len(scored) == len(TEXT.encode())
    tokens(page).nth(9).hover()
    said = page.locator(".pane .detail").text_content()
    assert f"surprise {-scored[9]['logprob']:.2f} nats" in said
    assert tokens(page).nth(9).get_attribute("title") == said == tokens(page).nth(9).get_attribute("aria-label")
    level = sum(scored[9]["logprob"] < math.log(least) for least in (0.5, 0.2, 0.05, 0.01, 0.001, 0.0001))
    assert f"s{level}" in tokens(page).nth(9).get_attribute("class").split()
    assert "nothing before it" in tokens(page).first.get_attribute("aria-label")


@in_chromium
def test_generated_tokens_come_while_it_writes_and_the_seed_says_which(page, server):
    page.fill("#max_tokens", "400")
    page.fill("#seed", "5")
    page.click("#generate")
    page.locator(".written[role=option]").first.wait_for()
    assert page.locator("#stop").is_enabled()
    page.locator("#status", has_text="Wrote 400 tokens with seed 5.").wait_for()
    settings = {"temperature": 1, "top_p": 1, "top_k": 40}
    answer = ask(server, "/v1/completions", model="small", prompt=TEXT, max_tokens=400, seed=5, **settings)
    page.click(".keep")
    assert page.input_value("#text") == TEXT + answer["choices"][0]["text"]


@in_chromium
def test_stop_keeps_what_was_written_until_then(page):
    page.fill("#max_tokens", "16000")
    page.click("#generate")
    page.locator(".written[role=option]").nth(20).wait_for()
    page.click("#stop")
    page.locator("#status", has_text="Stopped after").wait_for()
    assert page.locator("#generate").is_enabled()
    assert 20 < page.locator(".written[role=option]").count() < 16000


@in_chromium
def test_memory_shows_how_full_it_is(page):
    page.fill("#text", "def f")
    read(page)
    assert page.locator("[role=meter]").get_attribute("aria-valuenow") == "5"
    page.fill("#text", TEXT)
    read(page)
    meter = page.locator("[role=meter]")
    assert meter.get_attribute("aria-valuenow") == meter.get_attribute("aria-valuemax") == "12"
    assert "full" in page.locator(".memory-said").text_content()


# Looking


@in_chromium
def test_a_chosen_token_shows_where_a_head_looked_with_the_papers_marks(page, server):
    read(page)
    choose(page, 30)
    answer = ask(server, "/v1/attention", model="small", text=TEXT, position=30, layer=0, head=0)
    spans = page.locator("#looked span:not(.boundary)")
    assert spans.count() == len(answer["weights"]) == 31 - answer["first"]
    marked = spans.evaluate_all("spans => spans.map(span => span.classList.contains('top'))")
    assert marked == answer["marked"]
    assert sum(marked) == math.ceil(0.2 * len(marked))
    before_boundary = page.locator("#looked .boundary").evaluate(
        "mark => [...mark.parentElement.querySelectorAll('span')].indexOf(mark)"
    )
    assert before_boundary == answer["segment_start"] - answer["first"] > 0
    best = max(answer["weights"])
    assert listed(page)[0][1] == str(30 - answer["first"] - answer["weights"].index(best))
    assert page.locator("[aria-selected=true]").count() == 1


@in_chromium
def test_layers_heads_and_terms_can_be_switched(page, server):
    read(page)
    choose(page, 40)
    seen = {str(listed(page))}
    for layer, head in [(0, 1), (1, 1)]:
        with page.expect_response("**/v1/attention") as answered:
            page.select_option("#layer", label=str(layer + 1))
            page.select_option("#head", label=str(head + 1))
        assert answered.value.ok
        answer = ask(server, "/v1/attention", model="small", text=TEXT, position=40, layer=layer, head=head)
        farthest = 40 - answer["first"] - answer["weights"].index(max(answer["weights"]))
        api.expect(page.locator("#most tbody tr td").nth(1)).to_have_text(str(farthest))
    for term in "abcd":
        page.locator(f"[name=term][value={term}]").check()
        best = max(range(len(answer["terms"][term])), key=answer["terms"][term].__getitem__)
        assert listed(page)[0][1] == str(40 - answer["first"] - best)
        assert f"Term ({term}) alone" in page.locator("#term-said").text_content()
        seen.add(str(listed(page)))
    assert len(seen) >= 4


@in_chromium
def test_terms_added_and_put_through_a_softmax_are_the_weights(server):
    """The page shows one term alone by its softmax, which is right only if the server's terms are scaled as the weights' scores are."""
    answer = ask(server, "/v1/attention", model="small", text=TEXT, position=40, layer=1, head=0)
    scores = [sum(parts) for parts in zip(*answer["terms"].values(), strict=True)]
    powers = [math.exp(score) for score in scores]
    assert [power / sum(powers) for power in powers] == pytest.approx(answer["weights"], abs=1e-5)


@in_chromium
def test_without_memory_a_token_looks_no_further_back_than_its_segment(page):
    page.locator("[name=memory][value=off]").check()
    read(page)
    choose(page, 29)
    assert page.locator("#looked span").count() == 29 % 12 + 1
    assert page.locator("#looked .boundary").count() == 0
    assert "memory is off" in page.locator("#attention-said").text_content()


@in_chromium
def test_a_recurrent_run_says_that_it_has_no_attention(page):
    page.select_option("#run", "lstm")
    read(page)
    tokens(page).nth(5).click()
    page.locator("#status", has_text="no attention").wait_for()
    assert page.locator("#attention").is_hidden()


# Comparing


@in_chromium
def test_memory_on_and_off_stand_side_by_side_with_the_difference_in_loss(page, server):
    page.locator("[name=memory][value=both]").check()
    generate(page, length=20)
    assert page.locator(".pane h3").all_text_contents() == ["Memory on", "Memory off"]
    on, off = (ask(server, "/v1/score", model="small", text=TEXT, memory=way)["tokens"] for way in ("on", "off"))
    both = [(a["logprob"], b["logprob"]) for a, b in zip(on, off, strict=True)]
    saved = [a - b for a, b in both if a is not None and b is not None]
    mean = sum(saved) / len(saved)
    verb = "saves" if mean >= 0 else "costs"
    said = page.locator("#difference").text_content()
    assert said.startswith(f"Memory {verb} {abs(mean):.2f} nats per token over the {len(saved)} tokens")
    written = page.locator(".pane").evaluate_all("panes => panes.map(p => p.querySelectorAll('.written').length)")
    assert written == [20, 20]
    assert page.locator("#difference-chart path.saved").count() == 1
    page.locator("[name=memory][value=on]").check()
    read(page)
    assert page.locator(".pane").count() == 1
    assert page.locator("#difference").is_hidden()


@in_chromium
def test_the_chart_tells_each_tokens_loss_to_pointer_and_keyboard(page, server):
    read(page)
    scored = ask(server, "/v1/score", model="small", text=TEXT, memory="on")["tokens"]
    chart = page.get_by_role("slider", name="Loss of each token")
    assert page.locator("#loss-chart svg text.axis-name").all_text_contents() == ["token", "loss, nats"]
    chart.focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    mean = -sum(token["logprob"] for token in scored[1:8]) / 7
    told = chart.get_attribute("aria-valuetext")
    assert f"surprise {-scored[7]['logprob']:.2f} nats" in told
    assert f"running mean of 32: {mean:.2f} nats" in told
    assert page.locator("#loss-chart .detail").text_content() == told
    page.keyboard.press("Enter")
    page.locator("#attention-said", has_text="From token 8,").wait_for()


# Keeping


@in_chromium
def test_a_reload_keeps_text_settings_run_and_theme(page):
    page.select_option("#run", "speaking")
    page.locator("[name=memory][value=both]").check()
    for name, value in {"temperature": "0.7", "top_p": "0.9", "top_k": "7", "max_tokens": "33", "seed": "12"}.items():
        page.fill(f"#{name}", value)
    page.click("#theme")
    page.reload()
    page.locator("#run option").first.wait_for(state="attached")
    values = [
        page.input_value(f"#{name}") for name in ("text", "run", "temperature", "top_p", "top_k", "max_tokens", "seed")
    ]
    assert values == [TEXT, "speaking", "0.7", "0.9", "7", "33", "12"]
    assert page.locator("[name=memory][value=both]").is_checked()
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"


@in_chromium
def test_it_is_light_or_dark_as_the_system_is_until_switched(open_page, server):
    def background(page):
        return sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]))

    light, dark = (open_page(server, color_scheme=scheme) for scheme in ("light", "dark"))
    assert background(light) > 600 > 150 > background(dark)
    dark.click("#theme")
    assert background(dark) > 600


# Everybody


@in_chromium
def test_tokens_are_one_stop_of_the_keyboard_and_arrows_walk_them(page):
    page.set_viewport_size({"width": 600, "height": 800})
    read(page)
    assert page.locator("[role=option][tabindex='0']").count() == 1
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


@in_chromium
def test_every_control_has_a_name_and_the_live_region_is_not_flooded(page):
    page.evaluate(
        """() => {
            window.changes = 0;
            new MutationObserver(() => window.changes++).observe(
                document.getElementById("status"), { childList: true, characterData: true, subtree: true });
        }"""
    )
    generate(page, length=200)
    assert page.evaluate("window.changes") <= 4
    choose(page, 5)
    nameless = page.locator(
        "button, input, select, textarea, [role=slider], [role=listbox], [role=meter]"
    ).evaluate_all(
        """all => all.filter(one => one.checkVisibility()
            && !(one.ariaLabel || one.textContent.trim() || [...(one.labels ?? [])].some(l => l.textContent.trim())))
            .map(one => one.outerHTML)"""
    )
    assert nameless == []


@in_chromium
@pytest.mark.parametrize("width", [360, 768, 1280, 2200])
def test_nothing_sticks_out_at_any_width(open_page, server, width):
    page = open_page(server, viewport={"width": width, "height": 800})
    page.locator("#run option").first.wait_for(state="attached")
    page.fill("#text", TEXT + "x" * 400)
    page.locator("[name=memory][value=both]").check()
    read(page)
    choose(page, 20)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@in_chromium
def test_a_text_of_more_tokens_than_are_shown_says_so(page):
    page.fill("#text", TEXT * 350)
    read(page)
    assert tokens(page).count() == 20_000
    assert "Only the last 20,000 of 21,700 tokens" in page.locator(".more").text_content()
    assert page.locator(".figures").text_content().startswith("21,700 tokens")
    tokens(page).nth(19_999).click()
    page.locator("#attention-said", has_text="From token 21,700").wait_for()


# Harm


@in_chromium
def test_script_in_the_prompt_and_in_generated_text_does_not_run(page):
    """W12, with a run that can write nothing else."""
    page.select_option("#run", "speaking")
    page.locator("[name=memory][value=both]").check()
    page.fill("#text", f"{SCRIPT} {IMAGE} </textarea>{SCRIPT}<svg/onload=window.ran=1>")
    generate(page, length=60)
    written = "".join(page.locator(".written[role=option]").all_text_contents())
    assert SCRIPT in written
    assert IMAGE in written
    choose(page, 30)
    tokens(page).nth(31).hover()
    page.locator(".keep").first.click()
    page.reload()
    page.locator("#run option").first.wait_for(state="attached")
    assert SCRIPT in page.input_value("#text")
    read(page)
    assert page.evaluate("window.ran") is None
    assert page.locator("main script, main img, main svg[onload], form script, form img").count() == 0


@in_chromium
def test_the_policy_stops_script_that_got_in_all_the_same(open_page, server):
    """The second lock: were text ever inserted as HTML, the browser would still refuse to run it."""
    page = open_page(server, failing=["Content Security Policy"])
    page.evaluate(
        """() => {
            const inline = document.createElement("script");
            inline.textContent = "window.ran = 1";
            const image = document.createElement("img");
            image.setAttribute("onerror", "window.ran = 1");
            image.src = "data:,";
            document.body.append(inline, image);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None


@in_chromium
def test_a_server_with_a_key_asks_for_it_and_the_tab_keeps_it(open_page, trained_run):
    with serving(trained_run, key="a-key-of-thirty-two-characters-00") as address:
        page = open_page(address, failing=[401])
        page.locator("#key-form").wait_for()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.locator("#problem").wait_for()
        page.fill("#key", "a-key-of-thirty-two-characters-00")
        page.keyboard.press("Enter")
        page.locator("#run option").first.wait_for(state="attached")
        page.fill("#text", TEXT)
        read(page)
        page.reload()
        page.locator("#run option").first.wait_for(state="attached")
        assert "a-key-of" not in page.evaluate("JSON.stringify(localStorage)")


@in_chromium
def test_what_goes_wrong_is_said_in_one_sentence(open_page, server):
    page = open_page(server, failing=[429, "ERR_FAILED"])
    page.locator("#run option").first.wait_for(state="attached")
    problem = page.locator("#problem")
    page.click("#read")
    api.expect(problem).to_have_text("There is no text to read; write some first.")
    page.fill("#text", TEXT)
    page.fill("#temperature", "-1")
    page.click("#generate")
    api.expect(problem).to_have_text(re.compile(r"^Temperature: "))
    busy = {"error": {"message": "The server is busy.", "type": "rate_limit", "code": None}}
    page.route("**/v1/score", lambda route: route.fulfill(status=429, headers={"Retry-After": "2"}, json=busy))
    page.click("#read")
    api.expect(problem).to_have_text("The server is busy. Try again in 2 s.")
    page.unroute("**/v1/score")
    page.route("**/v1/score", lambda route: route.abort())
    page.click("#read")
    api.expect(problem).to_have_text("The server does not answer; is txl serve still running?")
    page.unroute("**/v1/score")
    read(page)
    api.expect(problem).to_be_hidden()


def test_the_page_holds_no_way_to_insert_html_and_no_address_outside():
    files = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert {"index.html", "page.js", "page.css"} <= set(files)
    insertion = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|srcdoc|\beval\b|new Function"
    for name, text in files.items():
        assert not re.search(insertion, text), name
        addresses = set(re.findall(r"https?://[^\s'\"]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", files["index.html"])
