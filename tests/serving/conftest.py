"""Servers that several tests of this room talk to."""

import shutil
from dataclasses import replace

import pytest
from page_helpers import FLAGS, IMAGE, SCRIPT
from serving_helpers import in_process, in_thread

from small_run import SMALL
from transformer_xl.cli import main
from transformer_xl.data.store import open_store
from transformer_xl.training import train


@pytest.fixture(scope="module")
def server(trained_run):
    """In a thread, with the small run."""
    with in_thread(trained_run) as running:
        yield running


@pytest.fixture(scope="module")
def process(trained_run, tmp_path_factory):
    """In a process of its own, for many clients."""
    with in_process(trained_run, folder=tmp_path_factory.mktemp("process")) as running:
        yield running


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="module")
def page_server(trained_run, speaking_run, recurrent_run):
    with in_thread(trained_run, speaking_run, recurrent_run) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    """No longer than a module: while Playwright runs, its thread has an event loop, and other tests want one of their own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need: pip install playwright")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("the page's tests need Debian's Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a server's page. Console errors, violations of the policy and requests to anywhere else fail the test; `failing` are parts of errors that
    a test brings about itself."""
    contexts, wrong = [], []

    def opened(address, *, failing=(), **options):
        def hear(message):
            if message.type in ("error", "warning") and not any(part in message.text for part in failing):
                wrong.append(message.text)

        def see(request):
            if not request.url.startswith((f"{address}/", "data:")):
                wrong.append(request.url)

        context = browser.new_context(**options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        page.on("request", see)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", hear)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def page(open_page, page_server):
    return open_page(page_server.address)
