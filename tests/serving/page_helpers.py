"""What people do on the page, for tests that do it in a browser."""

import re

TEXT = "def decode(self, s):\n    return self.scan_once(s, idx=0)\n"
SCRIPT = "<script>window.ran=1</script>"
IMAGE = "<img/src=x/onerror=window.ran=1>"
FLAGS = [
    "--no-sandbox",  # Chromium's own sandbox does not start as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def write(page, text=TEXT, *, run="small", memory="on"):
    page.locator("#run option").first.wait_for(state="attached")
    page.select_option("#run", run)
    page.locator(f"[name=memory][value={memory}]").check()
    page.fill("#text", text)


def read(page, text=TEXT, **choice):
    write(page, text, **choice)
    page.click("#read")
    page.locator("#status", has_text=re.compile("^Read ")).wait_for()


def learn(page, text=TEXT, **choice):
    write(page, text, **choice)
    page.click("#learn")
    page.locator("#status", has_text=re.compile("^Learned ")).wait_for()


def generate(page, text=TEXT, *, length, seed=3, **choice):
    write(page, text, **choice)
    page.fill("#max_tokens", str(length))
    page.fill("#seed", str(seed))
    page.click("#generate")
    page.locator("#status", has_text=re.compile("^Wrote ")).wait_for()


def tokens(page):
    return page.locator("[role=option]")


def choose(page, place):
    tokens(page).nth(place).click()
    page.locator("#attention").wait_for()


def looked_at_most(page):
    """The table's rows: token, how far back, share, memory or segment."""
    return page.locator("#most tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(c => c.textContent))"
    )
