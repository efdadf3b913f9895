"""The page in real Chromium: reading, writing, looking and comparing show what the API says."""

import math
import re

import pytest
from page_helpers import TEXT, choose, generate, learn, looked_at_most, read, tokens, write


@pytest.fixture
def ask(page_server):
    """The API, asked past the page."""

    def asked(path, **body):
        answer = page_server.post(path, model="small", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return asked


def say(token):
    return f"surprise {-token['logprob']:.2f} nats"


# Reading and writing


def test_text_is_shown_token_by_token_with_the_surprise_the_server_gives(page, ask):
    read(page)
    scored = ask("/v1/score", text=TEXT)["tokens"]
    assert tokens(page).count() == len(scored) == len(TEXT.encode())
    tokens(page).nth(9).hover()
    said = page.locator(".pane .detail").text_content()
    assert say(scored[9]) in said
    assert tokens(page).nth(9).get_attribute("title") == said == tokens(page).nth(9).get_attribute("aria-label")
    level = sum(scored[9]["logprob"] < math.log(least) for least in (0.5, 0.2, 0.05, 0.01, 0.001, 0.0001))
    assert f"s{level}" in tokens(page).nth(9).get_attribute("class").split()
    assert "nothing before it" in tokens(page).first.get_attribute("aria-label")


def test_tokens_come_while_it_writes_and_the_seed_says_which(page, ask):
    write(page)
    page.fill("#max_tokens", "1500")
    page.fill("#seed", "5")
    page.click("#generate")
    page.locator(".written[role=option]").first.wait_for()
    assert page.locator("#stop").is_enabled()
    page.locator("#status", has_text="Wrote 1,500 tokens with seed 5.").wait_for()
    choice = ask("/v1/completions", prompt=TEXT, max_tokens=1500, seed=5, top_k=40, logprobs=0)["choices"][0]
    given = [token["id"] for token in ask("/v1/score", text=TEXT)["tokens"]]
    last = ask("/v1/score", tokens=[*given, *choice["logprobs"]["token_ids"]])["tokens"][-1]
    assert say(last) in tokens(page).last.get_attribute("aria-label")
    page.click(".keep")
    assert page.input_value("#text") == TEXT + choice["text"]


def test_stop_keeps_what_was_written_until_then(page, page_server):
    write(page)
    page.fill("#max_tokens", "16000")
    page.click("#generate")
    page.locator(".written[role=option]").nth(20).wait_for()
    page.click("#stop")
    page.locator("#status", has_text="Stopped after").wait_for()
    assert page.locator("#generate").is_enabled()
    assert 20 < page.locator(".written[role=option]").count() < 16000
    choose(page, len(TEXT) + 10)


def test_nothing_is_enough_to_begin_with(page, ask):
    generate(page, "", length=10)
    assert page.locator(".written[role=option]").count() == 10
    assert tokens(page).first.get_attribute("aria-label").startswith("“⏎”")


def test_memory_shows_how_full_it_is(page):
    meter = page.locator("[role=meter]")
    read(page, "def f")
    assert meter.get_attribute("aria-valuenow") == "5"
    read(page)
    assert meter.get_attribute("aria-valuenow") == meter.get_attribute("aria-valuemax") == "12"
    assert "full" in page.locator(".memory-said").text_content()


def test_a_text_of_more_tokens_than_are_shown_says_so(page):
    number = 360 * len(TEXT)
    write(page)
    page.locator("#text").evaluate("(box, text) => { box.value = text; }", TEXT * 360)  # typing it takes seconds
    page.click("#read")
    page.locator("#status", has_text=f"Read {number:,} tokens.").wait_for()
    assert tokens(page).count() == 20_000
    assert f"The first {number - 20_000} tokens are read but not shown" in page.locator(".more").text_content()
    assert page.locator(".figures").text_content().startswith(f"{number:,} tokens")
    tokens(page).last.click()
    page.locator("#attention-said", has_text=f"From token {number:,}").wait_for()


# Looking


def test_a_chosen_token_shows_where_a_head_looked_with_the_papers_marks(page, ask):
    read(page)
    choose(page, 30)
    answer = ask("/v1/attention", text=TEXT, position=30, layer=0, head=0)
    spans = page.locator("#looked span:not(.boundary)")
    assert spans.count() == len(answer["weights"]) == 31 - answer["first"]
    marked = spans.evaluate_all("spans => spans.map(span => span.classList.contains('top'))")
    assert marked == answer["marked"]
    assert sum(marked) == math.ceil(0.2 * len(marked))
    before = page.locator("#looked .boundary").evaluate(
        "mark => [...mark.parentElement.querySelectorAll('span')].indexOf(mark)"
    )
    assert before == answer["segment_start"] - answer["first"] > 0
    best = answer["weights"].index(max(answer["weights"]))
    assert looked_at_most(page)[0][1] == str(30 - answer["first"] - best)
    assert page.locator("[aria-selected=true]").count() == 1


def test_layers_heads_and_terms_can_be_switched(page, ask):
    read(page)
    choose(page, 40)
    seen = {str(looked_at_most(page))}
    for layer, head in [(0, 1), (1, 1)]:
        answer = ask("/v1/attention", text=TEXT, position=40, layer=layer, head=head)
        best = answer["weights"].index(max(answer["weights"]))
        share = f"{100 * answer['weights'][best]:.1f}"
        page.select_option("#layer", label=str(layer + 1))
        page.select_option("#head", label=str(head + 1))
        row = page.locator("#most tbody tr").first
        row.filter(has_text=re.compile(rf"{40 - answer['first'] - best}({share}|{share.split('.')[0]}) %")).wait_for()
        seen.add(str(looked_at_most(page)))
    for term in "abcd":
        page.locator(f"[name=term][value={term}]").check()
        best = max(range(len(answer["terms"][term])), key=answer["terms"][term].__getitem__)
        assert looked_at_most(page)[0][1] == str(40 - answer["first"] - best)
        assert f"Term ({term}) alone" in page.locator("#term-said").text_content()
        seen.add(str(looked_at_most(page)))
    assert len(seen) == 7


def test_terms_added_and_put_through_a_softmax_are_the_weights(ask):
    """The page shows one term alone by its softmax, which is right only if terms come scaled as the scores behind the weights are."""
    answer = ask("/v1/attention", text=TEXT, position=40, layer=1, head=0)
    powers = [math.exp(sum(parts)) for parts in zip(*answer["terms"].values(), strict=True)]
    assert [power / sum(powers) for power in powers] == pytest.approx(answer["weights"], abs=1e-5)


def test_without_memory_a_token_looks_no_further_back_than_its_segment(page):
    read(page, memory="off")
    for place in (29, 24, 0):
        choose(page, place)
        page.locator("#attention-said", has_text=f"From token {place + 1},").wait_for()
        assert page.locator("#looked span").count() == place % 12 + 1
        assert page.locator("#looked .boundary").count() == 0
        assert "memory is off" in page.locator("#attention-said").text_content()


def test_a_recurrent_run_says_that_it_has_no_attention(page):
    read(page, run="lstm")
    tokens(page).nth(5).click()
    page.locator("#status", has_text="no attention").wait_for()
    assert page.locator("#attention").is_hidden()


# Comparing


def test_memory_on_and_off_stand_side_by_side_with_the_difference_in_loss(page, ask):
    generate(page, length=20, memory="both")
    assert page.locator(".pane h3").all_text_contents() == ["Memory on", "Memory off"]
    on, off = (ask("/v1/score", text=TEXT, memory=way)["tokens"] for way in ("on", "off"))
    saved = [one["logprob"] - other["logprob"] for one, other in zip(on[1:], off[1:], strict=True)]
    mean = sum(saved) / len(saved)
    assert abs(mean) > 0.001
    said = f"Memory {'saves' if mean >= 0 else 'costs'} {abs(mean):.3f} nats per token over the {len(saved)} tokens"
    assert page.locator("#difference").text_content().startswith(said)
    written = page.locator(".pane").evaluate_all("panes => panes.map(p => p.querySelectorAll('.written').length)")
    assert written == [20, 20]
    assert page.locator("#difference-chart path.saved").count() == 1
    tokens(page).nth(20).hover()
    told = page.locator(".pane .detail").all_text_contents()
    assert say(on[20]) in told[0]
    assert say(off[20]) in told[1]
    read(page, memory="on")
    assert page.locator(".pane").count() == 1
    assert page.locator("#difference").is_hidden()


def test_the_chart_tells_each_tokens_loss_to_pointer_and_keyboard(page, ask):
    read(page)
    scored = ask("/v1/score", text=TEXT)["tokens"]
    chart = page.get_by_role("slider", name="Loss of each token")
    assert page.locator("#loss-chart svg text.axis-name").all_text_contents() == ["token", "loss, nats"]
    chart.focus()
    for _ in range(7):
        page.keyboard.press("ArrowRight")
    told = chart.get_attribute("aria-valuetext")
    mean = -sum(token["logprob"] for token in scored[1:8]) / 7
    assert say(scored[7]) in told
    assert f"running mean of 32: {mean:.2f} nats" in told
    assert page.locator("#loss-chart .detail").text_content() == told
    page.keyboard.press("Enter")
    page.locator("#attention-said", has_text="From token 8,").wait_for()
    chart.hover(position={"x": chart.bounding_box()["width"] - 14, "y": 50})
    assert f"token {len(TEXT)}" in page.locator("#loss-chart .detail").text_content()


def test_a_text_is_learned_from_piece_by_piece_and_both_losses_are_drawn(page, page_server, ask):
    text = TEXT * 6  # more than one piece
    learn(page, text)
    session = f"/v1/sessions/{ask('/v1/sessions', adapt={'compare': True})['id']}"
    ids = list(text.encode())
    pieces = [page_server.post(f"{session}/feed", tokens=ids[at : at + 256], logprobs=True).json() for at in (0, 256)]
    told, still = ([*pieces[0][name], *pieces[1][name]] for name in ("logprobs", "static_logprobs"))
    assert tokens(page).count() == len(text) == len(told)
    tokens(page).nth(300).hover()
    assert say({"logprob": told[300]}) in page.locator(".pane .detail").text_content()
    saved = (sum(told[1:]) - sum(still[1:])) / (len(text) - 1)
    said = (
        f"Learning {'saves' if saved >= 0 else 'costs'} {abs(saved):.3f} nats per token over the {len(text) - 1} tokens"
    )
    assert page.locator("#difference").text_content().startswith(said)
    assert page.locator("#loss-chart path.with").count() == page.locator("#loss-chart path.without").count() == 1
    assert page.locator("#difference-chart path.saved").count() == 1
    tokens(page).nth(5).click()
    page.locator("#status", has_text="stand still").wait_for()
    assert page.locator("#attention").is_hidden()
    with page_server.client() as client:
        client.delete(session)
    page.wait_for_function("fetch('/v1/sessions').then(a => a.json()).then(({data}) => data.length === 0)")


def test_learning_can_be_stopped(page, page_server):
    write(page, TEXT * 60)
    page.click("#learn")
    page.locator("#loss-chart svg").wait_for()
    page.click("#stop")
    page.locator("#status", has_text=re.compile("^Stopped after [0-9,]+ tokens: adapters of rank 8")).wait_for()
    assert 0 < tokens(page).count() < len(TEXT * 60)
    page.wait_for_function("fetch('/v1/sessions').then(a => a.json()).then(({data}) => data.length === 0)")
